"""From the API's requests to prompts and parameters for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foretell._engine import Engine, NumDraftTokens
from foretell._errors import ContextLengthError, InputError
from foretell._sampling import SamplingParams
from foretell.server._errors import bad_request
from foretell.server._schema import ChatRequest, CompletionRequest, Sampling
from foretell.server._settings import Settings

FIELDS = {
    name: name
    for name in (
        "max_tokens min_tokens stop stop_token_ids ignore_eos temperature top_p top_k min_p "
        "repetition_penalty presence_penalty frequency_penalty logit_bias seed n logprobs"
    ).split()
}
"""How the engine's messages about options begin, and which field of the API they are about."""


@dataclass(frozen=True)
class Order:
    """What is to be generated for one call."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    drafters: Sequence[str] | None
    num_draft_tokens: NumDraftTokens
    verification: str
    stream: bool
    include_usage: bool
    steps: bool
    echo: bool = False
    only_echo: bool = False
    """max_tokens was 0: the token that is generated nevertheless is not shown."""


def chat_order(body: ChatRequest, engine: Engine, settings: Settings) -> Order:
    """The order of a chat completion. Raises ApiError or InputError."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request(
            "max_tokens and max_completion_tokens mean the same; give one of them",
            "max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    messages = []
    for message in body.messages:
        content = message.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        name = {} if message.name is None else {"name": message.name}
        messages.append({"role": role, "content": content, **name})
    with _about("messages"):
        tokens = engine.encode(messages=messages)
    wanted = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _order(body, [tokens], wanted, logprobs, engine, settings)


def completion_order(body: CompletionRequest, engine: Engine, settings: Settings) -> Order:
    """The order of a text completion. Raises ApiError or InputError."""
    prompt = body.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if single else list(prompt)
    with _about("prompt"):
        encoded = [engine.encode(one) for one in prompts]
    echo, wanted = bool(body.echo), 16 if body.max_tokens is None else body.max_tokens
    if wanted == 0 and not echo:
        raise bad_request("max_tokens is 0, so there is nothing to do; use 1 or more", "max_tokens")
    extra = {"prompt_logprobs": body.logprobs} if echo and body.logprobs is not None else {}
    return _order(
        body,
        encoded,
        max(wanted, 1) if wanted == 0 else wanted,
        body.logprobs,
        engine,
        settings,
        extra,
        echo=echo,
        only_echo=wanted == 0,
    )


def _order(
    body: Sampling,
    prompts: list[list[int]],
    wanted: int | None,
    logprobs: int | None,
    engine: Engine,
    settings: Settings,
    extra: Mapping[str, Any] | None = None,
    *,
    echo: bool = False,
    only_echo: bool = False,
) -> Order:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    speculation = body.foretell
    given = {
        name: getattr(body, name)
        for name in (
            "n stop temperature top_p frequency_penalty presence_penalty top_k min_p "
            "repetition_penalty min_tokens stop_token_ids ignore_eos"
        ).split()
        if getattr(body, name) is not None
    }
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.seed is not None:
        given["seed"] = body.seed % (1 << 64)  # the API's seeds are signed
    given.setdefault("temperature", 1.0)
    if given.get("n", 1) > settings.max_running:
        raise bad_request(
            f"n is {given['n']}, and {settings.max_running} completions can run at a time here", "n"
        )
    limit = min(engine.model.max_length, settings.max_request_tokens or engine.model.max_length)
    longest = max(map(len, prompts))
    if longest >= limit:
        raise bad_request(
            f"the prompt has {longest} tokens, and prompt and answer together may have {limit}; "
            "shorten it",
            "prompt" if isinstance(body, CompletionRequest) else "messages",
            "context_length_exceeded",
        )
    room = limit - longest
    if wanted is None:
        wanted = max(min(settings.default_max_tokens, room), given.get("min_tokens", 0))
    if wanted > room:
        raise bad_request(
            f"the prompt has {longest} tokens and max_tokens is {wanted}, but together they may "
            f"have {limit}; ask for at most {room}",
            "max_tokens",
            "context_length_exceeded",
        )
    params = SamplingParams(max_tokens=wanted, logprobs=logprobs, **given, **(extra or {}))
    drafters = None if speculation is None else speculation.drafters
    number = None if speculation is None else speculation.num_draft_tokens
    _check_drafters(drafters or (), engine)
    rule = None if speculation is None else speculation.verification
    options = body.stream_options
    return Order(
        prompts,
        params,
        drafters,
        "auto" if number is None else number,
        rule or "match",
        bool(body.stream),
        bool(options is not None and options.include_usage),
        bool(speculation is not None and speculation.steps),
        echo,
        only_echo,
    )


ANYWHERE = ("suffix", "recycling", "prompt_lookup", "ngram")
"""Drafters that need nothing of the model, or beside it."""


def drafters_of(engine: Engine) -> list[str]:
    """What requests may ask: the engine's own drafters, and those that work with any model."""
    own = [drafter.name for drafter in engine.drafters]
    return own + [name for name in ANYWHERE if name not in own]


def _check_drafters(names: Sequence[str], engine: Engine) -> None:
    known = drafters_of(engine)
    for name in names:
        if name not in known:
            raise bad_request(
                f"foretell.drafters has {name[:40]!r}; the drafters here are {', '.join(known)}",
                "foretell.drafters",
            )


@contextmanager
def _about(field: str) -> Iterator[None]:
    """What the engine does not like in here is this field's fault."""
    try:
        yield
    except InputError as error:
        long = isinstance(error, ContextLengthError)
        code = "context_length_exceeded" if long else None
        raise bad_request(str(error), field, code) from error


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise bad_request(
            f"logit_bias has the key {text[:40]!r}, which is no token id", "logit_bias"
        )
    return int(text)
