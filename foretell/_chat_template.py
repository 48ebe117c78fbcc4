"""Chat templates: a model's own Jinja text that turns a conversation into a prompt.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`, the `generation` block), in a sandbox with a budget: a template
is part of a downloaded model and may be hostile. What it does is bounded, to some hundred
megabytes and some seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from foretell._errors import InputError, TokenizerError
from foretell._template_sandbox import Budget, Sandbox

# No context holds a prompt this long; a template that writes more is broken or hostile.
_MAX_CHARACTERS = 1 << 25
_MAX_TEMPLATE = 1 << 18
_MAX_REASON = 500


@final
class ChatTemplate:
    """A compiled template. `special_tokens` ("bos_token", ...) are its variables."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        """Raises TokenizerError for a template that is no valid Jinja."""
        self._special_tokens = dict(special_tokens)
        self._source = source
        try:
            if len(template) > _MAX_TEMPLATE:
                raise ValueError(f"it has {len(template)} characters")
            self._template = Sandbox().from_string(template)
        except Exception as error:  # the parser and Python's compiler fail in many ways
            raise TokenizerError(
                f"{source}: the chat template is not valid ({_reason(error)}); give a plain "
                "prompt, or get a fixed version of the model"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises InputError for malformed messages and ones the template rejects."""
        conversation = _checked(messages)
        pieces, length = [], 0
        try:
            with Budget():
                for piece in self._template.generate(
                    **self._special_tokens,
                    messages=conversation,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                ):
                    length += len(piece)
                    if length > _MAX_CHARACTERS:
                        raise ValueError("the template writes without end")
                    pieces.append(piece)
        except Exception as error:  # a template can fail in any way that Python can
            roles = ", ".join(message["role"] for message in conversation[:8])
            raise InputError(
                f"the chat template of {self._source} rejects this conversation "
                f"(roles: {roles}): {_reason(error)}"
            ) from error
        return "".join(pieces)


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise InputError("messages is empty; give at least one {'role': 'user', 'content': ...}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"message {number} is {type(message).__name__}, but it must be "
                "{'role': ..., 'content': ...}"
            )
        for key in ("role", "content"):
            if key not in message:
                raise InputError(f"message {number} has no {key!r}")
        for key, value in message.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InputError(
                    f"message {number}: {key!r} is {type(value).__name__}, but it must be a string"
                )
        if not message["role"]:
            raise InputError(f"message {number} has an empty 'role'")
    return [dict(message) for message in messages]


def _reason(error: Exception) -> str:
    """An error of a template in words; it may have none of its own, or too many."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for what it does"
    try:
        text = str(error)
    except Exception:
        text = ""
    text = text or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
