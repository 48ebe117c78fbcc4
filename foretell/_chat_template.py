"""Chat templates: a model's own Jinja text that turns a conversation into a prompt.

The environment is the one transformers gives templates (trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`, the `generation` block), in Jinja's immutable sandbox: a template
is part of a downloaded model and may be hostile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from foretell._errors import InputError, TokenizerError

# No context holds a prompt this long; a template that writes or counts more is broken or hostile.
_MAX_CHARACTERS = 1 << 25
_MAX_COUNTED = 1 << 20


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with products and powers kept from filling the memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                if len(one) * other > _MAX_CHARACTERS:
                    raise jinja2.TemplateError("a template repeats a value too often")
            elif operator == "**" and isinstance(other, int | float) and abs(other) > 1024:
                raise jinja2.TemplateError("a template computes too large a power")
        return super().call_binop(context, operator, left, right)


class _Range:
    """Jinja's bounded `range`, with a bound on all ranges of a prompt together."""

    def __init__(self) -> None:
        self._left = _MAX_COUNTED

    def __call__(self, *bounds: int) -> range:
        numbers = safe_range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise jinja2.TemplateError("a template counts without end")
        return numbers


@final
class ChatTemplate:
    """A compiled template. `special_tokens` ("bos_token", ...) are its variables."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        """Raises TokenizerError for a template that is no valid Jinja."""
        self._special_tokens = dict(special_tokens)
        self._source = source
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TokenizerError(
                f"{source}: the chat template is not valid ({error}); give a plain prompt, or get "
                "a fixed version of the model"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises InputError for malformed messages and ones the template rejects."""
        conversation = _checked(messages)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                **self._special_tokens,
                range=_Range(),
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                length += len(piece)
                if length > _MAX_CHARACTERS:
                    raise jinja2.TemplateError("a template writes without end")
                pieces.append(piece)
        except Exception as error:  # a template can fail in any way that Python can
            roles = ", ".join(message["role"] for message in conversation[:8])
            raise InputError(
                f"the chat template of {self._source} rejects this conversation "
                f"(roles: {roles}): {error}"
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
