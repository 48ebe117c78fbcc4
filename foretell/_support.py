"""The tokens that are left to choose from, and how one of them is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell._noise import TWO_53, Floats, Ids, as_floats, bits_of, gumbel

BLOCK = 8192  # entries at a time, so that what is computed on the way stays in the cache
SORTED_AT_ONCE = 512
BINS = 1024


@dataclass(frozen=True)
class Support:
    """Tokens with a probability above 0.

    ``ids`` (count,) ascend; ``scores`` (count,) are log-probabilities up to a common constant:
    0 for the most probable token, never -inf.
    """

    ids: Ids
    scores: Floats
    vocab_size: int

    @classmethod
    def of(cls, logits: npt.NDArray[np.floating[Any]], temperature: float) -> Support:
        """The softmax of a row, in float64, at a temperature above 0.

        The largest logit must be above -inf. Where it is +inf, all tokens that have it share
        the whole probability.
        """
        best = float(logits.max())
        if best == math.inf:
            scores = np.where(logits == best, 0.0, -math.inf)
        else:
            scores = np.subtract(logits, best, dtype=np.float64)
            with np.errstate(over="ignore"):  # a tiny temperature may leave nothing but the best
                scores /= temperature
        support = cls(_all_ids(len(logits)), scores, len(logits))
        return support if scores.min() > -math.inf else support._where(scores > -math.inf)

    def min_p(self, min_p: float) -> Support:
        """Drop tokens less probable than ``min_p`` times the best one."""
        return self._where(self.scores >= math.log(min_p)) if min_p > 0 else self

    def top_k(self, k: int) -> Support:
        """Keep the ``k`` best, ties to the lowest id."""
        if k >= len(self.ids):
            return self
        return self._where(leading(self.scores, k, np.ones(len(self.ids))))

    def top_p(self, top_p: float) -> Support:
        """Keep the fewest best tokens that reach ``top_p`` of the probability, but at least one."""
        if top_p >= 1:
            return self
        weights = np.exp(self.scores)
        return self._where(leading(self.scores, top_p * float(weights.sum()), weights))

    def choose(self, key: int) -> int:
        """argmax of log p + Gumbel noise under ``key``, ties to the lowest id: a draw from p.

        Noise is computed for those tokens alone that can win. With 1 - u <= -log u, a token's
        score plus noise is at most log(w / (1 - u)), where w is the exponential of its score;
        it cannot win if this is below the sum that some other token is known to have. So
        neither the exponential's last bits nor the order of anything can matter.
        """
        places = _all_ids(len(self.ids))
        if len(places) > SORTED_AT_ONCE:
            bound = self._bounds(key)
            likely = int(bound.argmin())
            known = self.scores[likely] + gumbel(bits_of(key, self.ids[likely : likely + 1]))[0]
            places = np.flatnonzero(bound <= TWO_53 * math.exp(-known) * (1 + 1e-6))
        sums = self.scores[places] + gumbel(bits_of(key, self.ids[places]))
        return int(self.ids[places[sums.argmax()]])

    def _bounds(self, key: int) -> Floats:
        """2^53 (1 - u) / w for every token, (count,)."""
        result = np.empty(len(self.ids))
        for start in range(0, len(result), BLOCK):
            part = slice(start, start + BLOCK)
            weights = np.exp(self.scores[part])
            with np.errstate(divide="ignore", over="ignore"):
                result[part] = (TWO_53 - as_floats(bits_of(key, self.ids[part]))) / weights
        return result

    def probabilities(self) -> Floats:
        """p over the whole vocabulary, (vocab_size,)."""
        weights = np.exp(self.scores)
        weights /= weights.sum()
        if len(weights) == self.vocab_size:
            return weights
        result = np.zeros(self.vocab_size)
        result[self.ids] = weights
        return result

    def _where(self, kept: Ids | npt.NDArray[np.bool_]) -> Support:
        return Support(self.ids[kept], self.scores[kept], self.vocab_size)


def leading(scores: Floats, mass: float, weights: Floats) -> Ids:
    """Places, ascending, of the best scores that together reach ``mass``, but at least one.

    In the order of falling scores, ties by place, an entry is in if the weights before it sum
    to less than ``mass``. Nothing is sorted but the bin of a histogram in which the sum is
    reached; a row with few tokens near the boundary takes one pass.
    """
    kept = np.zeros(len(scores), np.bool_)
    pool = _all_ids(len(scores))
    before = 0.0
    while len(pool) > SORTED_AT_ONCE:
        low, high = scores.min(), scores.max()
        if low == high:
            break
        depth = high - scores
        depth /= high - low
        depth *= BINS - 1
        bins = depth.astype(np.int64)
        sums = before + np.bincount(bins, weights, minlength=BINS).cumsum()
        crossed = min(int(np.searchsorted(sums, mass)), BINS - 1)
        if crossed:
            kept[pool[bins < crossed]] = True
            before = float(sums[crossed - 1])
        inside = np.flatnonzero(bins == crossed)
        pool, scores, weights = pool[inside], scores[inside], weights[inside]
    order = np.argsort(-scores, kind="stable")
    ahead = before + np.concatenate(([0.0], weights[order].cumsum()[:-1]))
    kept[pool[order[ahead < mass]]] = True
    if not kept.any():
        kept[pool[order[0]]] = True
    return np.flatnonzero(kept)


@lru_cache(maxsize=8)
def _all_ids(count: int) -> Ids:
    result = np.arange(count)
    result.flags.writeable = False
    return result
