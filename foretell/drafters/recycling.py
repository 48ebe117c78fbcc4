"""Drafts what the target itself thought likely after the same token."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from foretell._draft import Draft
from foretell._errors import OptionError
from foretell._model import FloatArray, Output
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._verify import Accepted

LEAST_PATH_PROBABILITY = 0.02  # beyond that no model is so cheap that verifying pays

# --- Evidence ------------------------------------------------------------------------

_RANKS = ("first", "second", "third", "later")
_GAPS = (0.5, 1.5, 3.0, 6.0)  # between logits
_GAP_NAMES = ("close", "near", "clear", "far", "very far")
_KINDS = tuple(tuple(f"{rank}, {gap}" for gap in _GAP_NAMES) for rank in _RANKS)
# Where calibration starts from; the rows are ranks, the columns gaps. Rounded from what a small
# model did with a few dozen prompts that nothing is measured on.
_ESTIMATES = (
    (0.30, 0.38, 0.48, 0.53, 0.56),
    (0.17, 0.10, 0.09, 0.06, 0.06),
    (0.06, 0.06, 0.04, 0.04, 0.04),
    (0.06, 0.05, 0.03, 0.03, 0.02),
)


class Recycling(EvidenceDrafter):
    """Token Recycling (Luo et al. 2024): the target's own top tokens, kept for the next time.

    After every pass the ``k`` most likely successors of each token that was run, those of
    rejected branches included, are written down; the last word on a token counts. Drafts a tree
    of them. The evidence of a successor is its rank and how far its logit was behind the first
    one's (of the first: how far ahead of the second).

    Memory: at most ``max_tokens`` tokens are known (then the one whose successors are oldest is
    forgotten), at about 450 bytes each with 4 successors: 2 MB with the default.
    """

    name = "recycling"
    observes_every_pass = False

    def __init__(self, k: int = 4, max_tokens: int = 4096) -> None:
        if not 2 <= k <= 8 or max_tokens < 1:
            raise OptionError(
                f"k is {k} and max_tokens {max_tokens}; use 2..8 successors of 1 token or more"
            )
        self._k = k
        self._max_tokens = max_tokens
        self._successors: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        self._last = 0

    def spawn(self) -> Recycling:
        return Recycling(self._k, self._max_tokens)

    def start(self, prompt: Sequence[int]) -> None:
        self._successors.clear()
        self._last = prompt[-1]

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        ran = (self._last, *draft.tokens)
        kept = set(accepted.nodes)
        ids, logits = largest(output.logits, self._k)
        known = self._successors
        # The accepted ones come last: where a token was run twice, their word counts.
        for node in sorted(range(len(ran)), key=kept.__contains__):
            first, *others = logits[node]
            if not others:
                return
            gaps = (first - others[0], *(first - logit for logit in others))
            known.pop(ran[node], None)  # so that the oldest stay in front
            known[ran[node]] = ids[node], tuple(bisect(_GAPS, gap) for gap in gaps)
            if len(known) > self._max_tokens:
                del known[next(iter(known))]
        if accepted.tokens:
            self._last = accepted.tokens[-1]

    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        tokens: list[int] = []
        parents = [-1]
        probabilities: list[float] = []
        kinds: list[str] = []
        heap: list[tuple[float, int, int, int, float, str]] = []
        arrivals = 0
        path, token = -1.0, context[-1]
        self._last = token
        while True:
            node = len(tokens)
            ids, gaps = self._successors.get(token, ([], ()))
            for rank, (successor, gap) in enumerate(zip(ids, gaps, strict=True)):
                row = min(rank, len(_RANKS) - 1)
                estimate = _ESTIMATES[row][gap]
                if path * estimate <= -LEAST_PATH_PROBABILITY:
                    arrivals += 1  # settles ties: first come, first served
                    kind = _KINDS[row][gap]
                    heappush(heap, (path * estimate, arrivals, node, successor, estimate, kind))
            if not heap or node >= limit:
                break
            path, _, parent, token, estimate, kind = heappop(heap)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(estimate)
            kinds.append(kind)
        return Proposal.trusted(tokens, parents, probabilities, kinds)


# --- The largest of a row ------------------------------------------------------------

SLICES = 128


def largest(rows: FloatArray, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The ids of the ``k`` largest values of each row and these, largest first, exactly.

    Ties in any order. A fraction of the time of partitioning the rows: each is cut into SLICES
    slices, one below the other, and only the ``k`` columns with the largest maxima are looked
    into. Every other column has ``k`` columns before it that hold a value at least as large as
    all of its own.
    """
    count, size = rows.shape
    width = size // SLICES
    if width <= k:
        ids = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        return ids.tolist(), np.take_along_axis(rows, ids, 1).tolist()
    whole = width * SLICES
    maxima = rows[:, :whole].reshape(count, SLICES, width).max(axis=1)
    columns = maxima.argpartition(width - k, axis=1)[:, width - k :]
    ids = (np.arange(0, whole, width)[:, None] + columns[:, None, :]).reshape(count, -1)
    if whole < size:
        rest = np.broadcast_to(np.arange(whole, size), (count, size - whole))
        ids = np.concatenate((ids, rest), axis=1)
    values = np.take_along_axis(rows, ids, 1)
    best = values.argpartition(values.shape[1] - k, axis=1)[:, values.shape[1] - k :]
    of = np.take_along_axis(values, best, 1)
    best = np.take_along_axis(best, (-of).argsort(axis=1), 1)
    return np.take_along_axis(ids, best, 1).tolist(), np.take_along_axis(values, best, 1).tolist()
