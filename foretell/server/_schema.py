"""What requests may hold. Types are strict, unknown fields errors, null is as good as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_DRAFT_TOKENS = 32
MOST_LOGPROBS = 20
MOST_PROMPTS = 64

UNSUPPORTED = (
    "audio best_of suffix tools tool_choice parallel_tool_calls functions function_call modalities "
    "prediction reasoning_effort service_tier store metadata web_search_options verbosity "
    "prompt_cache_key prompt_cache_retention safety_identifier"
).split()
"""Fields of the OpenAI API that this server does not carry out; the error says so."""


class Fields(BaseModel):
    """Common to everything: no coercion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Speculation(Fields):
    """Foretell's own object: how to speculate. Nothing in it changes a token, unless
    ``verification`` is another rule than match."""

    drafters: Annotated[list[str], Field(min_length=1, max_length=8)] | None = None
    num_draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_DRAFT_TOKENS)] | None = (
        None
    )
    verification: Literal["match", "rejection", "block"] | None = None
    steps: bool | None = None
    """In a stream: each step's draft tree and the stats so far."""


class StreamOptions(Fields):
    """``stream_options``."""

    include_usage: bool | None = None


class ResponseFormat(Fields):
    """``response_format``: text is what there is."""

    type: Literal["text"]


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class Sampling(Fields):
    """What both kinds of completions share; see docs/server.md."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    seed: int | None = None
    user: str | None = None
    # Not of the OpenAI API, but of vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    foretell: Speculation | None = None


class ChatRequest(Sampling):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None


def problem(errors: list[Any]) -> tuple[str, str | None]:
    """The sentence and the field for pydantic's list of errors."""
    error = errors[0]
    kind = error["type"]
    if kind == "json_invalid":
        return "the body is not valid JSON", None
    path = _path(error["loc"])
    if kind == "extra_forbidden":
        name = path.rsplit(".", 1)[-1]
        if name in UNSUPPORTED:
            return f"{path} is not supported by this server; leave it out", path
        return f"{path} is unknown; the API has no such field, or this server does not", path
    if kind == "missing":
        return f"{path or 'the body'} is missing", path or None
    message = error["msg"]
    others = [e["msg"] for e in errors[1:] if _path(e["loc"]).startswith(path)]
    if others and (kind.endswith("_type") or kind == "literal_error"):
        message = "; or: ".join(dict.fromkeys([message, *others]))
    return f"{path or 'the body'}: {message[:1].lower()}{message[1:]}", path or None


def _path(parts: tuple[int | str, ...]) -> str:
    """A location as messages.0.role; what pydantic adds for branches of unions is left out."""
    kept = [
        str(part)
        for part in parts[1:]
        if isinstance(part, int) or (part.isidentifier() and part not in _BRANCHES)
    ]
    return ".".join(kept)


_BRANCHES = {"str", "int", "float", "bool", "TextPart", "Speculation"}
