"""Counts the positions where a tiny difference of logits could have changed the choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell._noise import Floats
from foretell._result import Stats
from foretell._sampling import Draws, Logits, Sampler


class NearTies:
    """A Sampler that chooses as another one does, and counts near-ties on the way.

    A near-tie is a position whose two best logits are closer than ``gap``, which is how far a
    backend's logits move with the width of a pass.
    """

    def __init__(self, sampler: Sampler, gap: float, stats: Stats) -> None:
        self._sampler, self._gap, self._stats = sampler, gap, stats
        stats.num_near_ties = 0
        self._last = -1

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        if position > self._last and len(logits) > 1:  # once, however often it is asked
            self._last = position
            second, best = np.partition(logits, -2)[-2:]
            assert self._stats.num_near_ties is not None
            self._stats.num_near_ties += int(best - second < self._gap)
        return self._sampler.choose(logits, history, position)

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        return self._sampler.distribution(logits, history, position)

    def draws(self, step: int) -> Draws:
        return self._sampler.draws(step)
