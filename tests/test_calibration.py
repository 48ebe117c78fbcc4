"""Calibration: what a drafter says, against what became of it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell._calibration import LEAST, MOST, Calibration

estimates = st.floats(0, 1)
histories = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), estimates, st.booleans()), max_size=60
)


def taught(history, **options):
    calibration = Calibration(**options)
    for drafter, kind, estimate, right in history:
        calibration.observe(drafter, kind, estimate, right)
    return calibration


@given(estimates)
def test_without_experience_an_estimate_stands(estimate):
    chance = Calibration().probability("a", "x", estimate)
    assert chance == min(max(estimate, LEAST), MOST)


@given(histories, estimates)
def test_it_is_always_a_probability(history, estimate):
    calibration = Calibration(taught(history))
    for drafter, kind, guess, right in history:
        calibration.observe(drafter, kind, guess, right)
        assert LEAST <= calibration.probability(drafter, kind, estimate) <= MOST


def test_always_wrong_at_99_percent_is_found_out_within_a_few_steps():
    chances = []
    calibration = Calibration()
    for _ in range(30):
        chances.append(calibration.probability("liar", "sure", 0.99))
        calibration.observe("liar", "sure", 0.99, False)
    assert chances == sorted(chances, reverse=True)
    assert chances[3] < 0.4
    assert chances[8] < 0.12
    assert chances[29] < 0.02


def test_a_liar_is_not_saved_by_ever_new_kinds_of_evidence():
    calibration = Calibration()
    for step in range(20):
        calibration.observe("liar", f"kind {step}", 0.99, False)
    assert calibration.probability("liar", "yet another kind", 0.99) < 0.2


def test_one_drafter_does_not_pay_for_another():
    calibration = taught([("liar", "x", 0.99, False)] * 20)
    assert calibration.probability("honest", "x", 0.7) == pytest.approx(0.7)


def test_a_kind_is_found_out_apart_from_its_drafter():
    history = [("a", "good", 0.5, True), ("a", "bad", 0.5, False)] * 30
    calibration = taught(history)
    assert calibration.probability("a", "good", 0.5) > 0.9
    assert calibration.probability("a", "bad", 0.5) < 0.1
    assert calibration.probability("a", "new", 0.5) == pytest.approx(0.5, abs=0.02)


def test_modesty_is_found_out_too():
    calibration = taught([("a", "x", 0.2, True)] * 20)
    assert calibration.probability("a", "x", 0.2) > 0.8
    assert calibration.probability("a", "new", 0.2) > 0.7


@given(histories, st.sampled_from("ab"), st.sampled_from("xyz"), estimates)
def test_being_right_never_lowers_and_being_wrong_never_raises(history, drafter, kind, estimate):
    # To forget is left out: what fades may be a failure or a success.
    def after(right):
        more = [*history, (drafter, kind, estimate, right)]
        return taught(more, memory=math.inf).probability(drafter, kind, estimate)

    before = taught(history, memory=math.inf).probability(drafter, kind, estimate)
    assert after(True) >= before - 1e-9
    assert after(False) <= before + 1e-9


def test_old_times_are_forgotten():
    calibration = taught([("a", "x", 0.5, True)] * 1000)
    for _ in range(100):
        calibration.observe("a", "x", 0.5, False)
    assert calibration.probability("a", "x", 0.5) < 0.45
    for _ in range(400):
        calibration.observe("a", "x", 0.5, False)
    assert calibration.probability("a", "x", 0.5) < 0.03


def test_rates_are_learned_whatever_was_claimed():
    rng = random.Random(0)
    rates = {"x": 0.1, "y": 0.5, "z": 0.9}
    calibration = Calibration(memory=1000)
    for _ in range(1000):
        for kind, rate in rates.items():
            calibration.observe("a", kind, 0.3, rng.random() < rate)
    for kind, rate in rates.items():
        assert calibration.probability("a", kind, 0.3) == pytest.approx(rate, abs=0.06)


def test_a_new_request_begins_with_what_earlier_ones_taught():
    engine = Calibration(memory=1000)
    first = Calibration(engine)
    for _ in range(50):
        first.observe("a", "x", 0.9, False)
    second = Calibration(engine)
    assert second.probability("a", "x", 0.9) < 0.1
    for _ in range(8):
        second.observe("a", "x", 0.9, True)
    assert second.probability("a", "x", 0.9) > 0.5 > engine.probability("a", "x", 0.9)
