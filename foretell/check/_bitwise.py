"""Bitwise: a model of one's own, with speculation and without.

Tokens, log-probabilities and the cache must have the same bits. Works with any Model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from foretell._draft import Drafter
from foretell._engine import Engine
from foretell._logprobs import TokenLogprobs, token_logprobs
from foretell._model import FloatArray, Model, Output, Rows, Session
from foretell._result import Generation
from foretell._sampling import SamplingParams

ALTERNATIVES = 2
"""Log-probabilities asked for beside the token's own, so that gaps are known."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part.

    ``position`` counts output tokens from 0. ``gap`` is that between the two best logits of
    plain decoding there: one near 0 is what rounding could turn round.
    """

    what: str
    position: int
    expected: int | None = None
    got: int | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.what != "tokens":
            return f"{self.what} differ from output token {self.position} on"
        return (
            f"token {self.position} is {self.got} instead of {self.expected}; the two best "
            f"logits there are {self.gap:.6g} apart"
        )


@dataclass(frozen=True)
class Run:
    """One generation and the cache it left."""

    result: Generation
    keys: FloatArray
    values: FloatArray

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of every output token."""
        assert self.result.logprobs is not None
        return self.result.logprobs


class _Recording(Model):
    """A model that remembers the session it made last."""

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        self.max_length = inner.max_length
        self.capabilities = inner.capabilities
        self.tokenizer = inner.tokenizer
        self.eos_token_ids = inner.eos_token_ids
        self.session: Session | None = None

    def new_session(self) -> Session:
        self.session = self._inner.new_session()
        return self.session

    def forward(self, rows: Sequence[Rows]) -> Output:
        return self._inner.forward(rows)


def run(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    model: Model | None = None,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 0,
    verification: str = "match",
) -> Run:
    """One generation by the public engine; with the engine's own drafters where none is given."""
    recording = _Recording(model or engine.model)
    drafters = list(engine.drafters) if drafter is None else [drafter]
    result = Engine(recording, drafters=drafters, tokenizer=engine.tokenizer).generate(
        prompt,
        sampling=replace(sampling, logprobs=ALTERNATIVES),
        num_draft_tokens=num_draft_tokens,
        verification=verification,
    )
    assert recording.session is not None
    keys, values = recording.session.keys_values()
    return Run(result, keys, values)


def scored(model: Model, prompt: Sequence[int], result: Generation) -> Run:
    """The same tokens given to the model one at a time: what plain decoding would have computed."""
    session = model.new_session()
    tokens = result.token_ids
    output = model.forward([Rows(session, prompt, logits="last")])
    session.keep(range(len(prompt)))
    logprobs = [token_logprobs(output.logits[-1], tokens[0], ALTERNATIVES)]
    for token, following in pairwise(tokens):
        output = model.forward([Rows(session, [token])])
        session.keep([0])
        logprobs.append(token_logprobs(output.logits[0], following, ALTERNATIVES))
    keys, values = session.keys_values()
    return Run(replace(result, logprobs=logprobs), keys, values)


def difference(plain: Run, other: Run) -> Difference | None:
    """The first thing in which ``other`` is not ``plain``, to the bit."""
    ours, theirs = plain.result, other.result
    for position, (expected, got) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)):
        if expected != got:
            return Difference("tokens", position, expected, got, gap(plain.logprobs[position]))
    for position, (left, right) in enumerate(zip(plain.logprobs, other.logprobs, strict=False)):
        if left != right:
            return Difference("log-probabilities", position)
    shorter = min(len(ours.token_ids), len(theirs.token_ids))
    if len(ours.token_ids) != len(theirs.token_ids) or ours.finish_reason != theirs.finish_reason:
        return Difference("length or ending", shorter)
    if ours.text != theirs.text:
        return Difference("text", 0)
    first = _first_difference(plain.keys, other.keys), _first_difference(plain.values, other.values)
    places = [place for place in first if place is not None]
    return Difference("cache", min(places) - ours.prompt_tokens) if places else None


def gap(logprobs: TokenLogprobs) -> float | None:
    """Between the two best logits."""
    if len(logprobs.top) < 2:
        return None
    return logprobs.top[0][1] - logprobs.top[1][1]


def _first_difference(left: FloatArray, right: FloatArray) -> int | None:
    """The first position of a cache, (layers, heads, length, width), with other bits."""
    shorter = min(left.shape[2], right.shape[2])
    bits = [
        np.ascontiguousarray(np.moveaxis(x[:, :, :shorter], 2, 0)).view(np.uint8)
        for x in (left, right)
    ]
    wrong = (bits[0] != bits[1]).reshape(shorter, -1).any(axis=1)
    if wrong.any():
        return int(wrong.argmax())
    return None if left.shape == right.shape else shorter
