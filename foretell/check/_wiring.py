"""The decoder on a table, with any one of its parts exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from foretell._decode import decode
from foretell._draft import Drafter
from foretell._model import FloatArray, Model
from foretell._noise import Floats
from foretell._policy import FixedPolicy
from foretell._request import Request
from foretell._result import FinishReason
from foretell._sampling import (
    DraftSampler,
    Draws,
    Logits,
    RequestSampler,
    SamplingParams,
)
from foretell._stop import StopConditions
from foretell._verify import RULES, Rule
from foretell.backends.table import TableModel
from foretell.check._worlds import Noise


@dataclass(frozen=True)
class Scenario:
    """A target of known distributions, a drafter and a request."""

    name: str
    table: FloatArray
    drafter: Drafter
    params: SamplingParams
    prompt: tuple[int, ...] = (1,)
    num_draft_tokens: int = 2
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What a decoder is made of beside its rule; each is given the right part and may spoil it."""

    rule: Callable[[Rule], Rule] = lambda rule: rule
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    drawing: Callable[[DraftSampler], DraftSampler] = lambda sampler: sampler
    target: Callable[[Model], Model] = lambda model: model
    stops: Callable[[StopConditions], StopConditions] = lambda stops: stops
    shares_noise: bool = False


RIGHT = Parts()


class Outcome(NamedTuple):
    """All that speculation must not change."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    cache: tuple[float, ...]


@dataclass
class NoisySampler:
    """The request's own sampler, with randomness from where the test says. A Sampler."""

    inner: RequestSampler
    noise: Noise
    memo: dict[bytes, Floats] = field(default_factory=dict)

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        if not self.noise.replaces_choice:
            return self.inner.choose(logits, history, position)
        return self.noise.choice(position, self.distribution(logits, history, position))

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        # A pure function of the row and the history, which is what makes this allowed.
        key = logits.tobytes() + np.array([*history, position], np.int64).tobytes()
        known = self.memo.get(key)
        if known is None:
            known = self.memo[key] = self.inner.distribution(logits, history, position)
        return known

    def draws(self, step: int) -> Draws:
        return self.noise.draws(step)


def decoded(
    scenario: Scenario,
    rule: Rule | None,
    noise: Noise,
    parts: Parts = RIGHT,
    memo: dict[bytes, Floats] | None = None,
    *,
    seed: int = 0,
) -> Outcome:
    """One request decoded to its end; plainly, by the first of RULES, where ``rule`` is None.

    ``memo`` may be shared by all runs of a scenario. ``seed`` is that of the target's own choices
    where ``noise`` does not make them.
    """
    params = scenario.params
    memo = {} if memo is None else memo
    ours, theirs = (
        NoisySampler(
            RequestSampler(
                params,
                seed=seed,
                prompt_length=len(scenario.prompt),
                eos_token_ids=scenario.eos_token_ids,
            ),
            noise,
            memo,
        )
        for _ in range(2)
    )
    model = parts.target(TableModel(scenario.table, eos_token_ids=scenario.eos_token_ids))
    used = RULES["match"] if rule is None else rule
    drawing = DraftSampler(
        cast(RequestSampler, theirs), model.vocab_size, shares_noise=used.same_tokens
    )
    policy = FixedPolicy(
        model,
        [parts.drafter(scenario.drafter)],
        0 if rule is None else scenario.num_draft_tokens,
        rule=used,
        sampler=parts.drawing(drawing),
    )
    stops = StopConditions(
        eos_token_ids=() if params.ignore_eos else scenario.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        stop_strings=(),
        max_tokens=params.max_tokens,
        max_context_tokens=model.max_length - len(scenario.prompt),
        min_tokens=params.min_tokens,
        decoder=None,
    )
    request = Request(
        model.new_session(),
        list(scenario.prompt),
        ours,
        policy,
        parts.stops(stops),
        rule=parts.rule(used),
    )
    for _ in decode(model, [request]):
        pass
    tokens = tuple(request.tokens[len(scenario.prompt) :])
    cache = tuple(request.session.keys_values()[0].ravel().tolist())
    return Outcome(tokens, request.finish, cache)
