"""How far a sample may lie from what was expected, and still be chance."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

import numpy as np

LEAST_EXPECTED = 10.0
"""Outcomes expected less often than that are counted together."""
BUCKETS = 8

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True)
class Fit:
    """A sample held against a distribution, or against a second sample.

    ``p_value`` is the chance of a chi-square as large as ``chi_square`` or larger if nothing is
    wrong (for many samples; see ``LEAST_EXPECTED``). ``total_variation`` is that of the sample;
    ``noise_floor`` is about what chance alone makes of it, and ``bound`` is what it exceeds with
    a probability below ``false_alarm`` whatever the distribution.
    """

    samples: int
    chi_square: float
    degrees: int
    p_value: float
    total_variation: float
    noise_floor: float
    bound: float
    false_alarm: float

    @property
    def fits(self) -> bool:
        """Whether chance explains it: both tests, each with half of the false-alarm probability."""
        return self.p_value >= self.false_alarm / 2 and self.total_variation <= self.bound


def fit(
    counts: Mapping[Outcome, int], expected: Mapping[Outcome, float], false_alarm: float
) -> Fit:
    """Counts against exact probabilities (Pearson's chi-square, and the total variation).

    The bound on the total variation is that of Bretagnolle, Huber and Carol: for k outcomes and
    N samples, P(2 TV >= e) <= 2^k exp(-N e^2 / 2). Outcomes of probability 0 that were seen
    make the chi-square infinite.
    """
    total = sum(counts.values())
    seen = np.array([counts.get(outcome, 0) for outcome in expected], np.float64)
    wanted = np.array(list(expected.values()), np.float64)
    impossible = total - float(seen.sum()) + float(seen[wanted == 0].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    variation = (float(np.abs(seen / total - wanted).sum()) + impossible / total) / 2
    floor = float(np.sqrt(wanted * (1 - np.minimum(wanted, 1.0)) / (2 * math.pi * total)).sum())
    bound = math.sqrt(2 / total * (len(wanted) * math.log(2) + math.log(2 / false_alarm))) / 2
    cells, means = _pooled(seen, wanted * total)
    chi_square = math.inf if impossible else float(((cells - means) ** 2 / means).sum())
    degrees = len(cells) - 1
    p_value = chi_square_tail(chi_square, degrees)
    return Fit(total, chi_square, degrees, p_value, variation, floor, bound, false_alarm)


def fit_two(first: Mapping[Outcome, int], second: Mapping[Outcome, int], false_alarm: float) -> Fit:
    """Two samples of one unknown distribution (chi-square test of homogeneity).

    Rare outcomes are counted together in up to BUCKETS groups, by a hash of their repr.
    Half of the false-alarm probability goes to the bound on the total variation, a quarter to
    each sample's distance from the truth.
    """
    sizes = sum(first.values()), sum(second.values())
    outcomes = list(dict.fromkeys((*first, *second)))
    a = np.array([first.get(outcome, 0) for outcome in outcomes], np.float64)
    b = np.array([second.get(outcome, 0) for outcome in outcomes], np.float64)
    variation = float(np.abs(a / sizes[0] - b / sizes[1]).sum()) / 2
    shares = (a + b) / sum(sizes)
    spread = np.sqrt(shares * (1 - shares) / (2 * math.pi) * (1 / sizes[0] + 1 / sizes[1]))
    bound = sum(
        math.sqrt(2 / size * (len(outcomes) * math.log(2) + math.log(4 / false_alarm))) / 2
        for size in sizes
    )
    order = np.argsort(-(a + b), kind="stable")
    smaller = min(sizes)
    large = order[shares[order] * smaller >= LEAST_EXPECTED]
    small = order[shares[order] * smaller < LEAST_EXPECTED]
    count = max(1, min(BUCKETS, int(shares[small].sum() * smaller / LEAST_EXPECTED)))
    groups = np.array([crc32(repr(outcomes[i]).encode()) % count for i in small], np.int64)
    table = np.array(
        [np.append(x[large], np.bincount(groups, x[small], minlength=count)) for x in (a, b)]
    )
    table = table[:, table.sum(axis=0) > 0]
    means = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    chi_square = float(((table - means) ** 2 / means).sum())
    degrees = table.shape[1] - 1
    p_value = chi_square_tail(chi_square, degrees)
    floor = float(spread.sum())
    return Fit(sum(sizes), chi_square, degrees, p_value, variation, floor, bound, false_alarm)


def chi_square_tail(x: float, degrees: int) -> float:
    """P(chi-square with ``degrees`` degrees of freedom >= x); 1 where there are none."""
    if degrees < 1 or x <= 0:
        return 0.0 if x == math.inf else 1.0
    return upper_gamma(degrees / 2, x / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularized upper incomplete gamma function Q(a, x), for a > 0 and x >= 0.

    By its series below a + 1, by Lentz's continued fraction above (Abramowitz and Stegun 6.5.29
    and 6.5.31); relative error below 1e-11 down to the smallest tails.
    """
    if x == math.inf:
        return 0.0
    if x <= 0:
        return 1.0
    log_factor = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1.0
            term *= x / n
            total += term
        return 1.0 - total * math.exp(log_factor)
    tiny = 1e-300
    b = x + 1.0 - a
    c = 1.0 / tiny
    d = 1.0 / b
    fraction = d
    for i in range(1, 100_000):
        factor = -i * (i - a)
        b += 2.0
        d = factor * d + b
        d = 1.0 / (d if abs(d) > tiny else tiny)
        c = b + factor / c
        c = c if abs(c) > tiny else tiny
        change = c * d
        fraction *= change
        if abs(change - 1.0) < 1e-15:
            break
    return fraction * math.exp(log_factor)


def _pooled(
    seen: np.ndarray[tuple[int], np.dtype[np.float64]],
    means: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Cells with the rare ones, and if need be the rarest of the others, put together."""
    order = np.argsort(means, kind="stable")
    seen, means = seen[order], means[order]
    sums = means.cumsum()
    count = int(np.count_nonzero(means < LEAST_EXPECTED))
    if count and sums[count - 1] < LEAST_EXPECTED:
        count = min(count + 1, len(means))
    if count < 2:
        return seen, means
    return (
        np.concatenate(([seen[:count].sum()], seen[count:])),
        np.concatenate(([means[:count].sum()], means[count:])),
    )
