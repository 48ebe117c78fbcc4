"""Medians, rates, and how far they can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000
COVERAGE: Final = 0.95


@dataclass(frozen=True)
class Sample:
    """What one engine needed for one question, in each repetition; a median of them counts."""

    tokens: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval; ``low`` and ``high`` are None where nothing varied."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_list(self) -> list[float | None]:
        """The JSON form: value, low, high."""
        return [self.value, self.low, self.high]

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"


def number(value: float) -> str:
    """Two digits behind the point, fewer where there are more before it."""
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def rate(samples: Sequence[Sample]) -> Estimate:
    """Tokens per second over all questions: the sum of tokens over the sum of median seconds.

    The interval is of 2000 resamples: questions are drawn with replacement, and of each question
    drawn its repetitions are.
    """
    tokens, seconds = _tokens(samples), _medians(samples)
    value = float(tokens.sum() / seconds.sum())
    if not _varies(samples):
        return Estimate(value)
    random = np.random.default_rng(0)
    drawn = _draw_questions(random, len(samples))
    drawn_seconds = _redrawn(random, samples, drawn).sum(axis=1)
    return _estimate(value, tokens[drawn].sum(axis=1) / drawn_seconds)


def speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Estimate:
    """How many times ``baseline``'s speed: the ratio of the two rates on the same questions.

    ``samples[i]`` and ``baseline[i]`` are of the same question, and are drawn together.
    """
    if len(samples) != len(baseline):
        raise ValueError("a speedup needs the same questions on both sides")
    value = rate(samples).value / rate(baseline).value
    if not (_varies(samples) or _varies(baseline)):
        return Estimate(value)
    random = np.random.default_rng(0)
    drawn = _draw_questions(random, len(samples))
    rates = [
        _tokens(side)[drawn].sum(axis=1) / _redrawn(random, side, drawn).sum(axis=1)
        for side in (samples, baseline)
    ]
    return _estimate(value, rates[0] / rates[1])


Array = npt.NDArray[np.float64]


def _tokens(samples: Sequence[Sample]) -> Array:
    return np.array([sample.tokens for sample in samples], np.float64)


def _medians(samples: Sequence[Sample]) -> Array:
    return np.array([statistics.median(sample.seconds) for sample in samples], np.float64)


def _varies(samples: Sequence[Sample]) -> bool:
    return len(samples) > 1 or any(len(sample.seconds) > 1 for sample in samples)


def _draw_questions(random: Any, count: int) -> npt.NDArray[np.intp]:
    drawn: npt.NDArray[np.intp] = random.integers(0, count, (RESAMPLES, count))
    return drawn


def _redrawn(random: Any, samples: Sequence[Sample], drawn: npt.NDArray[np.intp]) -> Array:
    """Median seconds of the questions drawn, over repetitions drawn for each of them."""
    out = np.empty(drawn.shape, np.float64)
    for question, sample in enumerate(samples):
        places = drawn == question
        seconds = np.array(sample.seconds, np.float64)
        picks = random.integers(0, len(seconds), (int(places.sum()), len(seconds)))
        out[places] = np.median(seconds[picks], axis=1)
    return out


def _estimate(value: float, values: Array) -> Estimate:
    rest = (1.0 - COVERAGE) / 2
    low, high = np.quantile(values, [rest, 1.0 - rest])
    return Estimate(value, float(low), float(high))
