"""The statistics of the kit: tails against known values, and how often they raise alarms."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from foretell.check._statistics import chi_square_tail, fit, fit_two, upper_gamma


@pytest.mark.parametrize(
    ("degrees", "x", "tail"),
    [  # the usual tables of chi-square
        (1, 3.841458820694124, 0.05),
        (1, 10.827566170662733, 0.001),
        (5, 11.070497693516351, 0.05),
        (10, 29.588298445074422, 0.001),
        (30, 43.77297182574219, 0.05),
        (100, 149.4492527790389, 0.001),
    ],
)
def test_tails_are_those_of_the_tables(degrees, x, tail):
    assert chi_square_tail(x, degrees) == pytest.approx(tail, rel=1e-10)


@pytest.mark.parametrize("x", [0.01, 0.5, 2.0, 10.0, 28.0, 100.0, 700.0])
def test_tails_of_even_degrees_have_a_closed_form(x):
    for half in (1, 2, 5, 13, 40):  # the sum of a Poisson distribution
        terms = [-x / 2 + k * math.log(x / 2) - math.lgamma(k + 1) for k in range(half)]
        closed = math.fsum(math.exp(term) for term in terms)
        assert chi_square_tail(x, 2 * half) == pytest.approx(closed, rel=1e-10)


@pytest.mark.parametrize("x", [0.1, 1.0, 9.0, 60.0])
def test_the_tail_of_one_degree_is_that_of_the_normal_distribution(x):
    assert chi_square_tail(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-10)


def test_tails_at_the_ends():
    assert chi_square_tail(0.0, 3) == 1.0
    assert chi_square_tail(math.inf, 3) == 0.0
    assert chi_square_tail(5.0, 0) == 1.0
    assert upper_gamma(2.0, 0.0) == 1.0
    assert upper_gamma(2.0, math.inf) == 0.0


def test_a_sample_of_the_distribution_fits_and_the_chi_square_is_pearson_s():
    p = {"a": 0.5, "b": 0.3, "c": 0.2}
    found = fit({"a": 52, "b": 27, "c": 21}, p, 1e-6)
    assert found.chi_square == pytest.approx(4 / 50 + 9 / 30 + 1 / 20)
    assert found.degrees == 2
    assert found.total_variation == pytest.approx(0.03)
    assert found.fits


def test_the_impossible_is_never_chance():
    found = fit({"a": 999, "b": 1}, {"a": 1.0}, 1e-6)
    assert found.p_value == 0.0
    assert not found.fits
    assert not fit({"a": 999, "b": 1}, {"a": 1.0, "b": 0.0}, 1e-6).fits


def test_rare_outcomes_are_counted_together():
    p = dict.fromkeys(range(100), 0.001) | {"most": 0.9}
    found = fit({"most": 900, 3: 100}, p, 1e-6)
    assert found.degrees == 1
    assert found.total_variation == pytest.approx(0.099)


def test_another_distribution_does_not_fit():
    rng = np.random.default_rng(0)
    p = dict.fromkeys(range(8), 0.125)
    skewed = np.full(8, 0.125) + np.array([0.05, -0.05] * 4)
    assert fit(dict(enumerate(rng.multinomial(4000, list(p.values())).tolist())), p, 1e-6).fits
    assert not fit(dict(enumerate(rng.multinomial(4000, skewed).tolist())), p, 1e-6).fits


def test_false_alarms_are_as_rare_as_stated():
    """p-values below 1e-3 in about one of 1000 samples, and the bound never passed."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(16))
    expected = dict(enumerate(p.tolist()))
    fits = [
        fit(dict(enumerate(counts)), expected, 1e-3)
        for counts in rng.multinomial(1000, p, size=4000).tolist()
    ]
    alarms = sum(one.p_value < 1e-3 for one in fits)
    assert alarms <= 14  # 4 expected; more than that once in 20000
    assert all(one.total_variation <= one.bound for one in fits)
    mean = np.mean([one.total_variation for one in fits])
    assert mean == pytest.approx(fits[0].noise_floor, rel=0.05)


def test_two_samples_of_one_distribution_fit_and_of_two_do_not():
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(30))
    q = np.roll(p, 1)

    def sample(weights, count):
        return Counter(rng.choice(30, size=count, p=weights).tolist())

    assert fit_two(sample(p, 400), sample(p, 300), 1e-6).fits
    assert not fit_two(sample(p, 400), sample(q, 300), 1e-6).fits
    assert fit_two(Counter(a=200), Counter(a=200), 1e-6).fits
    rare = [Counter(range(start, start + 400)) for start in (0, 1000)]
    assert fit_two(*rare, 1e-6).degrees == 7  # nothing came twice, yet there is something to test
    assert not fit_two(Counter(a=200), Counter(b=200), 1e-6).fits
