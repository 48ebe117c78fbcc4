"""What passes cost is learned from their times, and a busy machine does not deceive it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers_core import held_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell._costs import Budget, DrafterCosts, PassCosts

BASE = {1: 10.0, 2: 11.0, 3: 13.0, 4: 14.0, 5: 20.0, 6: 21.0, 8: 24.0, 12: 30.0, 16: 40.0}


def true_seconds(rows: int, context: float, slope: float = 0.0) -> float:
    base = float(np.interp(rows, list(BASE), list(BASE.values())))
    return 1e-3 * base + slope * (rows + 3) * context


def learned(seed=0, passes=400, slope=0.0, noise=0.03, rows=(1, 1, 2, 4, 5, 8), slow=()):
    """Costs after passes of these row counts, at contexts of two requests in turn."""
    rng = np.random.default_rng(seed)
    costs = PassCosts()
    for number in range(passes):
        count = int(rng.choice(rows))
        context = (100 if number // 50 % 2 else 1500) + number % 50
        seconds = true_seconds(count, context, slope) * float(np.exp(abs(rng.normal()) * noise))
        if number in slow:
            seconds *= 2.0
        costs.observe(count, context, seconds)
    return costs


def test_nothing_is_known_at_first():
    assert not PassCosts().known
    assert PassCosts().age(1) == float("inf")


@pytest.mark.parametrize("seed", range(5))
def test_what_was_measured_is_what_is_expected(seed):
    costs = learned(seed)
    for rows in (1, 2, 4, 5, 8):
        assert costs.seconds(rows, 800) == pytest.approx(true_seconds(rows, 800), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_longer_contexts_cost_more(seed):
    costs = learned(seed, passes=2000, slope=8e-7)
    for rows in (1, 4):
        for context in (100, 1500):
            expected = true_seconds(rows, context, 8e-7)
            # What stays a while at one context looks a little like a change of pace.
            assert costs.seconds(rows, context) == pytest.approx(expected, rel=0.18)


def test_row_counts_that_never_were_lie_between_their_neighbours():
    costs = learned(rows=(1, 4, 8))
    curve = costs.curve(1, 8, 800)
    assert curve == sorted(curve)
    assert curve[0] < curve[1] < curve[3]


def test_a_guess_is_given_up_for_the_first_measurements():
    costs = PassCosts()
    for _ in range(5):
        costs.observe(1, 0, 0.010)
    assert costs.seconds(4, 0) < 0.015
    for _ in range(4):
        costs.observe(4, 0, 0.030)
    assert costs.seconds(4, 0) == pytest.approx(0.030, rel=0.1)


def test_a_single_slow_pass_changes_little():
    costs = learned()
    before = costs.curve(1, 8, 800)
    costs.observe(4, 800, 1.0)
    assert np.allclose(costs.curve(1, 8, 800), before, rtol=0.06)


def test_a_busy_spell_slows_everything_alike():
    """Only plain passes happen while the machine takes twice as long: drafts look no better."""
    costs = learned()
    before = costs.seconds(4, 800) / costs.seconds(1, 800)
    for _ in range(40):
        costs.observe(1, 800, 2 * true_seconds(1, 800))
    assert costs.seconds(1, 800) == pytest.approx(2 * true_seconds(1, 800), rel=0.15)
    assert costs.seconds(4, 800) / costs.seconds(1, 800) > 0.75 * before


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_that_it_lasts_makes_seldom_row_counts_no_slower_or_faster_than_the_others(pace):
    costs = learned()
    before = costs.seconds(4, 800) / costs.seconds(1, 800)
    for _ in range(3000):
        costs.observe(1, 800, pace * true_seconds(1, 800))
        assert costs.seconds(4, 800) / costs.seconds(1, 800) == pytest.approx(before, rel=0.15)
    assert costs.seconds(1, 800) == pytest.approx(pace * true_seconds(1, 800), rel=0.1)


@pytest.mark.parametrize("pace", [0.3, 0.5, 2.0, 3.0])
def test_a_profile_from_a_slower_or_faster_moment_keeps_its_shape(pace):
    costs = PassCosts.from_dict(learned(passes=2000, slope=8e-7).to_dict())
    before = costs.seconds(4, 800) / costs.seconds(1, 800)
    for number in range(1, 301):
        costs.observe(1, 800, pace * true_seconds(1, 800, 8e-7))
        assert costs.seconds(4, 800) / costs.seconds(1, 800) == pytest.approx(before, rel=0.15)
        if number >= 8:
            expected = pace * true_seconds(1, 800, 8e-7)
            assert costs.seconds(1, 800) == pytest.approx(expected, rel=0.1)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8000), st.floats(1e-6, 10.0)), min_size=1)
)
def test_any_times_give_positive_costs_that_grow_with_the_rows(passes):
    costs = PassCosts()
    for rows, context, seconds in passes:
        costs.observe(rows, context, seconds)
        curve = costs.curve(1, 41, context)
        assert all(0 < value < float("inf") for value in curve)
        assert curve == sorted(curve)
    again = PassCosts.from_dict(costs.to_dict())
    assert again.known == bool(costs.to_dict()["rows"])


def test_saved_costs_are_expected_again():
    costs = learned(passes=2000, slope=8e-7)
    again = PassCosts.from_dict(costs.to_dict())
    assert np.allclose(again.curve(1, 8, 700), costs.curve(1, 8, 700), rtol=0.01)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"rows": {"1": 0.1}},
        {"rows": {"0": 0.1}, "slope": 0},
        {"rows": {"x": 0.1}, "slope": 0},
        {"rows": {"1": -0.1}, "slope": 0},
        {"rows": {"1": float("nan")}, "slope": 0},
        {"rows": {"1": None}, "slope": 0},
        {"rows": {"1": 0.1}, "slope": -1},
    ],
)
def test_saved_costs_that_are_none_are_refused(saved):
    with pytest.raises((ValueError, TypeError, KeyError)):
        PassCosts.from_dict(saved)


def test_drafters_are_saved_too():
    costs = DrafterCosts()
    assert (costs.each, costs.total, costs.trust) == (0, 0, 1)
    for _ in range(9):
        costs.add(2e-3)
        costs.watch(1e-3)
        costs.chosen(0.9, False)
    costs.worth, costs.catch_up = 0.5, 1e-4
    assert costs.trust < 0.8
    again = DrafterCosts.from_dict(costs.to_dict())
    assert again.to_dict() == pytest.approx(costs.to_dict())
    with pytest.raises((ValueError, TypeError, KeyError)):
        DrafterCosts.from_dict({**costs.to_dict(), "each": "soon"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_goes_on_with_what_was_measured():
    """While another thread is at it; and what slowed the parent down is no news of the child."""
    costs = learned()
    for _ in range(20):
        costs.observe(1, 800, 4 * true_seconds(1, 800))
    assert costs.pace > 1.3
    with held_elsewhere(costs._lock):
        child = os.fork()
        if child == 0:
            known = costs.known and costs.pace == 1.0
            before = costs.num_passes
            costs.observe(4, 800, true_seconds(4, 800))
            os._exit(0 if known and costs.num_passes == before + 1 else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_hundredth_of_the_time_may_be_spent():
    budget = Budget()
    assert not budget.allows(1e-9)
    budget.earn(100.0)
    assert budget.allows(1.0)
    budget.spend(0.6)
    assert not budget.allows(0.5)
    budget.spend(-5.0)
    assert budget.allows(0.4)
