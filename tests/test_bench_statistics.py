"""Rates, speedups and their intervals."""

from __future__ import annotations

import random

import pytest

from foretell.bench._statistics import Estimate, Sample, number, rate, speedup


def test_a_rate_is_all_tokens_over_all_median_seconds():
    samples = [Sample(10, (1.0, 2.0, 9.0)), Sample(30, (2.0,))]
    assert rate(samples).value == pytest.approx(40 / 4)


def test_a_speedup_is_the_ratio_of_rates_of_the_same_questions():
    fast = [Sample(10, (1.0,)), Sample(10, (2.0,))]
    slow = [Sample(10, (2.0,)), Sample(10, (4.0,))]
    found = speedup(fast, slow)
    assert found.value == pytest.approx(2.0)
    # Every question says 2, so every resample does: questions are drawn in pairs.
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_one_measurement_has_no_interval():
    assert rate([Sample(10, (1.0,))]) == Estimate(10.0)
    assert speedup([Sample(10, (1.0,))], [Sample(10, (2.0,))]) == Estimate(2.0)


def test_repetitions_alone_give_an_interval_too():
    found = rate([Sample(10, (1.0, 1.1, 0.9, 1.2))])
    assert found.low < found.value < found.high


def test_intervals_are_the_same_every_time():
    samples = [Sample(10, (1.0 + i, 2.0)) for i in range(5)]
    assert rate(samples) == rate(samples)


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    """200 samples of 20 questions, each of 1 s on average: 95% of intervals should hold 1.

    The bootstrap of so few questions is somewhat narrow, 90 to 95% in practice. Under 0.85 or
    above 0.99 something else is wrong: each has a chance below 1e-3 at a true rate of 0.92.
    """
    draw = random.Random(7)
    held = 0
    for _ in range(200):
        samples = [Sample(1, (draw.uniform(0.5, 1.5),)) for _ in range(20)]
        found = rate(samples)
        held += found.low <= 1.0 <= found.high
    assert 0.85 <= held / 200 <= 0.99


def test_sides_of_different_questions_are_refused():
    with pytest.raises(ValueError, match="same questions"):
        speedup([Sample(1, (1.0,))], [])


def test_numbers_have_as_many_digits_as_can_be_read():
    assert [number(x) for x in (1.0, 0.957, 12.34, 123.4)] == ["1.00", "0.96", "12.3", "123"]
    assert str(Estimate(1.5, 1.0, 2.0)) == "1.50 (1.00 to 2.00)"
    assert str(Estimate(1.5)) == "1.50"
