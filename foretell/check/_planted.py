"""Errors planted on purpose, each of a kind that real systems have shipped.

A kit that finds nothing may be blind. These are the right decoder with one part spoiled; each says
under which rules that is an error. Under the others the output is right all the same, and must not
be called wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from foretell._draft import Draft, Drafter
from foretell._model import FloatArray, Model, Output, Rows, Session
from foretell._noise import Floats
from foretell._result import FinishReason
from foretell._sampling import DraftSampler, Drawn, Draws, Logits, Sampler
from foretell._stop import StopConditions
from foretell._verify import Origin, Rule, Verdict
from foretell.check._wiring import Parts
from foretell.check._worlds import softmax

EPSILON = 1e-6


@dataclass(frozen=True)
class PlantedError:
    """One wrong decoder.

    ``scenario`` is the kind of request that shows it (see ``_scenarios``). ``sampled_table`` is the
    seed of tables on which a sample of the usual size shows it, too; None where none would.
    """

    name: str
    about: str
    scenario: str
    parts: Callable[[], Parts]
    is_error_under: Callable[[Rule], bool]
    applies_to: Callable[[Rule], bool] = lambda rule: True
    sampled_table: int | None = None
    vocab_size: int = 2
    """How many tokens it takes to show it for certain."""


def _always(rule: Rule) -> bool:
    return True


def _never(rule: Rule) -> bool:
    return False


def _draws(rule: Rule) -> bool:
    return not rule.same_tokens


# --- Wrong q -------------------------------------------------------------------------


class _RawQ:
    """Hands over the softmax of the raw logits instead of what was drawn from. A DraftSampler."""

    def __init__(self, inner: DraftSampler) -> None:
        self._inner, self.vocab_size = inner, inner.vocab_size

    def draw(self, logits: Logits, history: Sequence[int], node: int) -> Drawn | None:
        drawn = self._inner.draw(logits, history, node)
        return drawn and Drawn(drawn.token, softmax(logits.astype(np.float64)))


class _PreviousQ:
    """Hands over the q of the token before, as an index off by one does. A DraftSampler."""

    def __init__(self, inner: DraftSampler) -> None:
        self._inner, self.vocab_size = inner, inner.vocab_size
        self._last: Floats | None = None

    def draw(self, logits: Logits, history: Sequence[int], node: int) -> Drawn | None:
        drawn = self._inner.draw(logits, history, node)
        if drawn is None:
            return None
        q = softmax(logits.astype(np.float64)) if drawn.q is None else drawn.q
        wrong = q if node == 1 or self._last is None else self._last
        self._last = q
        return Drawn(drawn.token, wrong)


# --- Wrong draws ---------------------------------------------------------------------

Recover = Callable[[Floats], Floats]


class _SpoiledDraws:
    """Changes the weights of a correction. Draws."""

    def __init__(self, inner: Draws, last: int, change: Recover) -> None:
        self._inner, self._last, self._change = inner, last, change

    def accept(self, node: int, probability: float) -> bool:
        return self._inner.accept(node, probability)

    def recover(self, node: int, weights: Floats) -> int:
        return self._inner.recover(node, weights if node == self._last else self._change(weights))


@dataclass
class _SpoiledSampler:
    """The target's sampler with one answer changed. A Sampler."""

    inner: Sampler
    draft: Draft
    start: int
    change: Recover | None = None
    flat: bool = False
    freezes: bool = False

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        if self.flat:
            return self.inner.draws(position).recover(0, softmax(logits.astype(np.float64)))
        return self.inner.choose(logits, self._seen(history), position)

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        if self.flat:
            return softmax(logits.astype(np.float64))
        return self.inner.distribution(logits, self._seen(history), position)

    def draws(self, step: int) -> Draws:
        draws = self.inner.draws(step)
        return _SpoiledDraws(draws, len(self.draft), self.change) if self.change else draws

    def _seen(self, history: Sequence[int]) -> Sequence[int]:
        return history[: self.start] if self.freezes else history


def _sampling(**changes: Any) -> Parts:
    """A rule that asks a spoiled sampler, wherever there is a draft."""

    def spoil(rule: Rule) -> Rule:
        def verify(
            draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]
        ) -> Verdict:
            if draft.tokens:
                sampler = _SpoiledSampler(sampler, draft, len(history), **changes)
            return rule.verify(draft, logits, sampler, history)

        return replace(rule, verify=verify)

    return Parts(rule=spoil)


def _not_renormalized(weights: Floats) -> Floats:
    """The last token gets what is missing: the end of an inversion that runs off its sums."""
    missing = max(1.0 - float(weights.sum()), 0.0)
    result = weights.copy()
    result[-1] += missing
    return result


def _with_epsilon(weights: Floats) -> Floats:
    return weights + EPSILON


# --- Wrong verdicts ------------------------------------------------------------------


def _stops_at_first_failure(rule: Rule) -> Rule:
    """Block verification that ends at the first prefix that does not pass."""

    def verify(
        draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]
    ) -> Verdict:
        draws, seen = sampler.draws(len(history)), list(history)
        reached, kept = 1.0, 0
        p = sampler.distribution(logits[0], seen, len(seen))
        weights = np.maximum(p - draft.q_of(0, len(p)), 0.0) if draft.tokens else p
        for node, token in enumerate(draft.tokens, 1):
            q = draft.q_of(node - 1, len(p))
            reached = min(1.0, reached * float(p[token] / q[token]))
            seen.append(token)
            p = sampler.distribution(logits[node], seen, len(seen))
            if node == len(draft):
                residual, passes = p, reached
            else:
                residual = np.maximum(reached * p - draft.q_of(node, len(p)), 0.0)
                surplus = float(residual.sum())
                passes = surplus / (surplus + 1 - reached) if surplus or reached < 1 else 1.0
            if not draws.accept(node, passes):
                break
            kept, weights = node, residual
        yield from ((token, Origin.DRAFT) for token in draft.tokens[:kept])
        weights = weights if weights.any() else p
        yield draws.recover(kept, weights), Origin.CORRECTION

    return replace(rule, verify=verify)


def _bonus_from_q(rule: Rule) -> Rule:
    """The token after a fully accepted draft comes from the draft's last distribution."""

    def verify(
        draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]
    ) -> Verdict:
        for token, origin in rule.verify(draft, logits, sampler, history):
            if origin is not Origin.BONUS:
                yield token, origin
                continue
            q = draft.q_of(len(draft) - 1, logits.shape[1])
            if rule.same_tokens:
                yield int(q.argmax()), origin
            else:
                yield sampler.draws(len(history)).recover(len(draft) + 1, q), origin

    return replace(rule, verify=verify)


# --- Wrong ends ----------------------------------------------------------------------


class _LooksAtTheLast:
    """Stop conditions that look for an end only at the last token of a block."""

    def __init__(self, inner: StopConditions, inside: list[bool]) -> None:
        self._inner, self._inside = inner, inside

    @property
    def room(self) -> int:
        return self._inner.room

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        piece, reason = self._inner.push(token)
        if reason is FinishReason.STOP and self._inside[0] and self._inner.room > 0:
            reason = None
        return piece, reason

    def finish(self) -> str:
        return self._inner.finish()


def _passes_over_eos() -> Parts:
    inside = [False]

    def spoil(rule: Rule) -> Rule:
        def verify(
            draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]
        ) -> Iterator[tuple[int, Origin]]:
            for token, origin in rule.verify(draft, logits, sampler, history):
                inside[0] = origin is Origin.DRAFT
                yield token, origin

        return replace(rule, verify=verify)

    return Parts(
        rule=spoil,
        stops=lambda stops: cast(StopConditions, _LooksAtTheLast(stops, inside)),
    )


# --- Wrong caches --------------------------------------------------------------------


class MisrollingModel(Model):
    """A model whose sessions, where drafted nodes are dropped, drop one too few or too many.

    ``surplus`` is 1 for one token too many in the cache, -1 for one that is missing. Works
    around any Model.
    """

    def __init__(self, inner: Model, surplus: int) -> None:
        self._inner, self._surplus = inner, surplus
        self.vocab_size = inner.vocab_size
        self.max_length = inner.max_length
        self.capabilities = inner.capabilities
        self.tokenizer = inner.tokenizer
        self.eos_token_ids = inner.eos_token_ids

    def new_session(self) -> Session:
        return _MisrollingSession(self._inner.new_session(), self._surplus)

    def forward(self, rows: Sequence[Rows]) -> Output:
        inner = []
        for part in rows:
            session = cast(_MisrollingSession, part.session)
            session.remember(part)
            inner.append(replace(part, session=session.inner))
        return self._inner.forward(inner)


class _MisrollingSession(Session):
    def __init__(self, inner: Session, surplus: int) -> None:
        self.inner, self._surplus = inner, surplus
        self._parents: list[int] = []

    def remember(self, rows: Rows) -> None:
        count = len(rows.tokens)
        self._parents = list(range(-1, count - 1) if rows.parents is None else rows.parents)

    @property
    def length(self) -> int:
        return self.inner.length

    def keep(self, nodes: Sequence[int]) -> None:
        kept = list(nodes)
        if len(kept) < len(self._parents):
            if self._surplus < 0:
                kept = kept[:-1]
            elif kept and kept[-1] in self._parents:
                kept.append(self._parents.index(kept[-1]))
        self.inner.keep(kept)

    def rollback(self, n: int) -> None:
        self.inner.rollback(n)

    def fork(self) -> Session:
        return _MisrollingSession(self.inner.fork(), self._surplus)

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        return self.inner.keys_values()


class _Behind(Drafter):
    """A drafter that does not see the last token of its context."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.name, self.trees = inner.name, inner.trees

    def spawn(self) -> _Behind:
        return _Behind(self._inner.spawn())

    def sample_with(self, sampler: DraftSampler) -> None:
        self._inner.sample_with(sampler)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        return self._inner.propose(context[:-1], limit) if len(context) > 1 else Draft.empty()


PLANTED: tuple[PlantedError, ...] = (
    PlantedError(
        "q before the processors",
        "the drafter draws after temperature and penalties, but hands over the softmax of its "
        "raw logits",
        "processors",
        lambda: Parts(drawing=lambda inner: cast(DraftSampler, _RawQ(inner))),
        _draws,
        sampled_table=22,
    ),
    PlantedError(
        "q of another token",
        "an index off by one: each token comes with the q of the one before it",
        "sampling",
        lambda: Parts(drawing=lambda inner: cast(DraftSampler, _PreviousQ(inner))),
        _draws,
        sampled_table=20,
    ),
    PlantedError(
        "residual not renormalized",
        "the correction is drawn from max(p - q, 0) as if it summed to 1, and the last token "
        "gets the rest",
        "sampling",
        lambda: _sampling(change=_not_renormalized),
        _draws,
        _draws,
        sampled_table=4,
        vocab_size=3,
    ),
    PlantedError(
        "epsilon added to the residual",
        f"{EPSILON:g} is added to max(p - q, 0), against a division by 0",
        "sampling",
        lambda: _sampling(change=_with_epsilon),
        _draws,
        _draws,
    ),
    PlantedError(
        "noise shared between uses",
        "one random number drafts a token, accepts it and draws its correction",
        "sampling",
        lambda: Parts(shares_noise=True),
        _draws,
        sampled_table=0,
    ),
    PlantedError(
        "block stops at the first failure",
        "block verification that does not look for the longest prefix that passes",
        "sampling",
        lambda: Parts(rule=_stops_at_first_failure),
        lambda rule: rule.name == "block",
        lambda rule: rule.name == "block",
        sampled_table=17,
    ),
    PlantedError(
        "bonus token from q",
        "the token after a fully accepted draft is the drafter's",
        "sampling",
        lambda: Parts(rule=_bonus_from_q),
        _always,
        sampled_table=11,
    ),
    PlantedError(
        "greedy from a flat softmax",
        "at temperature 0 drafts are verified by sampling at temperature 1",
        "greedy",
        lambda: _sampling(flat=True),
        _always,
    ),
    PlantedError(
        "penalties once per block",
        "all tokens of a block are penalized by the history before the block",
        "processors",
        lambda: _sampling(freezes=True),
        _always,
        sampled_table=6,
    ),
    PlantedError(
        "end of sequence passed over",
        "an end-of-sequence token inside a block does not end the output",
        "end",
        _passes_over_eos,
        _always,
        sampled_table=10,
    ),
    PlantedError(
        "rolled back one token too few",
        "one rejected token stays in the target's cache",
        "sampling",
        lambda: Parts(target=lambda model: MisrollingModel(model, 1)),
        _always,
        sampled_table=4,
    ),
    PlantedError(
        "rolled back one token too many",
        "the last accepted token is missing in the target's cache",
        "sampling",
        lambda: Parts(target=lambda model: MisrollingModel(model, -1)),
        _always,
        sampled_table=4,
    ),
    PlantedError(
        "draft cache one token behind",
        "the drafter does not see the last token: worse drafts, drawn from the q it hands over",
        "sampling",
        lambda: Parts(drafter=_Behind),
        _never,
    ),
)
"""Every planted error; the last one is none."""
