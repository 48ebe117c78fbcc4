"""Accept rules: how much of a draft is kept, and what the target says itself.

A rule reads the target's logits for every node of a draft and emits tokens one after another:
the accepted ones, then one of the target's own. ``RULES`` has them all by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import overload

import numpy as np

from foretell._draft import Draft, Probabilities
from foretell._model import FloatArray
from foretell._sampling import Sampler


class Origin(StrEnum):
    """Where an emitted token came from."""

    DRAFT = "draft"
    """Proposed by a drafter and accepted."""
    CORRECTION = "correction"
    """The target's own token at the first disagreement."""
    BONUS = "bonus"
    """The target's own token after a fully accepted draft."""
    PLAIN = "plain"
    """The target's own token in a step without a draft."""


Verdict = Iterator[tuple[int, Origin]]
"""The tokens of a step: drafted ones, then one of another origin."""

Verify = Callable[[Draft, FloatArray, Sampler, Sequence[int]], Verdict]
"""``verify(draft, logits, sampler, history)``.

``logits`` is (len(draft) + 1, vocab_size), row i being what the target says after node i;
``history`` is prompt and output so far, whose last token is node 0. Randomness comes from
``sampler`` alone. Tokens are worked out as they are asked for where the rule allows it.
"""


@dataclass(frozen=True)
class Rule:
    """An accept rule and what it promises."""

    name: str
    verify: Verify
    same_tokens: bool
    """Every token is the one plain decoding would emit; otherwise their distribution is exact."""
    trees: bool
    """Drafts may be trees."""


@dataclass(frozen=True)
class Accepted:
    """A path through the draft and the tokens it emits.

    ``nodes`` starts with node 0, the token emitted last, and ``tokens`` is one step ahead of it:
    ``tokens[i]`` is what follows ``nodes[i]``. All tokens but the last were drafted, and the last
    one was if the output ends there.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    last_origin: Origin

    @classmethod
    def of(cls, draft: Draft, emitted: Iterable[tuple[int, Origin]]) -> Accepted:
        """What a rule emitted, or the part of it before the output ended.

        Node 0 stays in any case: it was emitted before.
        """
        nodes, tokens, last = [0], list[int](), Origin.DRAFT
        for token, origin in emitted:
            last = origin
            if tokens:
                child = draft.child(nodes[-1], tokens[-1])
                assert child is not None, "a rule may emit one token that was not drafted, the last"
                nodes.append(child)
            tokens.append(token)
        return cls(tuple(nodes), tuple(tokens), last)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of every token."""
        if not self.tokens:
            return ()
        return (Origin.DRAFT,) * (len(self.tokens) - 1) + (self.last_origin,)

    @property
    def num_accepted(self) -> int:
        """How many of the tokens were drafted."""
        return len(self.tokens) - (self.last_origin is not Origin.DRAFT and bool(self.tokens))


def match(draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Descend the draft for as long as the target's own choice is one of its children.

    The emitted token is the target's choice in any case, so the result is what plain decoding
    would have emitted (drafter-invariant: Daliri, Musco and Suresh 2024).
    """
    node, position = 0, len(history)
    seen, followed = history, list[int]()
    while True:
        token = sampler.choose(logits[node], seen, position)
        child = draft.child(node, token) if draft.tokens else None
        if child is None:
            yield token, _own(draft, node)
            return
        yield token, Origin.DRAFT
        followed.append(token)
        node, position, seen = child, position + 1, _Followed(history, followed)


def rejection(
    draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]
) -> Verdict:
    """Keep x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0) and stop.

    Leviathan et al. 2023, Chen et al. 2023. After a fully kept draft the last token is drawn
    from p. Each token has exactly the target's distribution.
    """
    draws, seen = sampler.draws(len(history)), list(history)
    for node, token in enumerate(draft.tokens):
        p = sampler.distribution(logits[node], seen, len(seen))
        q = draft.q_of(node, len(p))
        if not draws.accept(node + 1, min(1.0, _ratio(p, q, token))):
            yield draws.recover(node, _residual(p, q)), Origin.CORRECTION
            return
        yield token, Origin.DRAFT
        seen.append(token)
    last = len(draft)
    yield (
        draws.recover(last, sampler.distribution(logits[last], seen, len(seen))),
        _own(draft, last),
    )


def block(draft: Draft, logits: FloatArray, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Keep the longest prefix of the draft that passes its own test, whatever those before did.

    Block verification, Sun et al. 2024: with p_0 = 1 and p_i = min(1, p_(i-1) p(x_i) / q(x_i)),
    a prefix of i < len(draft) tokens passes with probability h_i = Z / (Z + 1 - p_i), where Z is
    the sum of max(p_i p - q, 0) at the next token (0 / 0 is 1), and the whole draft with p_i. The
    next token is drawn from max(p_i p - q, 0), after the whole draft from p. The joint
    distribution is the target's, and never are fewer tokens kept on average than by
    ``rejection``.
    """
    draws, seen = sampler.draws(len(history)), list(history)
    count = len(draft)
    reached = 1.0  # p_i
    kept, next_weights = 0, None
    for node in range(count + 1):
        p = sampler.distribution(logits[node], seen, len(seen))
        if node == count:
            passes, weights = reached, p
        else:
            q = draft.q_of(node, len(p))
            weights = np.maximum(reached * p - q, 0.0)
            surplus = float(weights.sum())
            passes = surplus / (surplus + (1.0 - reached)) if surplus or reached < 1.0 else 1.0
            weights = weights if surplus else p
        if node == 0 or draws.accept(node, passes):
            kept, next_weights = node, weights
        if node < count:
            token = draft.tokens[node]
            reached = min(1.0, reached * _ratio(p, q, token))
            seen.append(token)
    assert next_weights is not None
    for token in draft.tokens[:kept]:
        yield token, Origin.DRAFT
    yield draws.recover(kept, next_weights), _own(draft, kept)


RULES = {
    rule.name: rule
    for rule in (
        Rule("match", match, same_tokens=True, trees=True),
        Rule("rejection", rejection, same_tokens=False, trees=False),
        Rule("block", block, same_tokens=False, trees=False),
    )
}
"""Every accept rule by name; the conformance tests run over all of them."""


class _Followed(Sequence[int]):
    """``history``, then ``tokens``: a view, because a copy of a long history takes time."""

    __slots__ = ("_history", "_tokens")

    def __init__(self, history: Sequence[int], tokens: Sequence[int]) -> None:
        self._history, self._tokens = history, tokens

    def __len__(self) -> int:
        return len(self._history) + len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return chain(self._history, self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        start = len(self._history)
        at = index if index >= 0 else index + len(self)
        if at < 0:
            raise IndexError(index)
        return self._history[at] if at < start else self._tokens[at - start]


def _own(draft: Draft, node: int) -> Origin:
    """The origin of the target's own token after ``node``."""
    if not draft.tokens:
        return Origin.PLAIN
    return Origin.BONUS if draft.is_leaf(node) else Origin.CORRECTION


def _ratio(p: Probabilities, q: Probabilities, token: int) -> float:
    # A token that q could not have drawn: the policy refuses it, and here it divides nothing by 0.
    return float(p[token] / q[token]) if q[token] > 0 else 1.0


def _residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """max(p - q, 0); p where nothing is left, which rounding alone can bring about."""
    weights: Probabilities = np.maximum(p - q, 0.0)
    return weights if weights.any() else p
