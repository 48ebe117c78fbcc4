"""Enumeration: every course that chance can take, with its exact probability."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from foretell.check._worlds import KeyedNoise, SharedKeyedNoise, WorldNoise, worlds


def probabilities(decide, **options):
    found = Counter()
    for world in worlds():
        found[decide(WorldNoise(world, **options).draws(5))] += world.probability
    return found


def test_independent_decisions_multiply():
    weights = np.array([1.0, 0.0, 3.0])
    found = probabilities(lambda draws: (draws.accept(1, 0.3), draws.recover(1, weights)))
    assert found == pytest.approx(
        {(True, 0): 0.075, (True, 2): 0.225, (False, 0): 0.175, (False, 2): 0.525}
    )


def test_what_is_asked_after_an_answer_may_depend_on_it():
    def decide(draws):
        return draws.accept(1, 0.25) and draws.accept(2, 0.5)

    assert probabilities(decide) == pytest.approx({True: 0.125, False: 0.875})


def test_certain_decisions_make_no_worlds():
    assert len(list(worlds_of(lambda draws: draws.accept(1, 1.0)))) == 1
    assert len(list(worlds_of(lambda draws: draws.recover(0, np.array([0.0, 2.0]))))) == 1


def worlds_of(decide):
    for world in worlds():
        decide(WorldNoise(world).draws(0))
        yield world


def test_shared_noise_is_one_variable():
    def decide(draws):
        return draws.draft(1, np.array([0.5, 0.5])), draws.accept(1, 0.5)

    apart = {(0, True): 0.25, (0, False): 0.25, (1, True): 0.25, (1, False): 0.25}
    assert probabilities(decide) == pytest.approx(apart)
    assert probabilities(decide, shared=True) == pytest.approx({(0, True): 0.5, (1, False): 0.5})


@pytest.mark.parametrize("shared", [False, True])
def test_worlds_have_the_chances_of_the_real_noise(shared):
    q, weights = np.array([0.2, 0.5, 0.3]), np.array([0.0, 0.4, 0.1])

    def decide(draws):
        token = draws.draft(1, q)
        kept = draws.accept(1, 0.6)
        return (token, kept, None if kept else draws.recover(0, weights))

    exact = probabilities(decide, shared=shared)
    source = SharedKeyedNoise if shared else KeyedNoise
    counts = Counter(decide(source(seed).draws(5)) for seed in range(4000))
    assert set(counts) == {key for key, chance in exact.items() if chance > 1e-9}
    for key, count in counts.items():
        assert count / 4000 == pytest.approx(exact[key], abs=0.04)
