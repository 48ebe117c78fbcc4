"""The n-gram drafter has a distribution, learns from the request, and forgets it after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell import Engine, OptionError
from foretell._sampling import DraftSampler, RequestSampler, SamplingParams
from foretell.backends.table import TableModel
from foretell.drafters import Ngram


def started(context, vocab_size=5, **settings):
    drafter = Ngram(**settings)
    greedy = RequestSampler(SamplingParams())
    drafter.sample_with(DraftSampler(greedy, vocab_size, shares_noise=True))
    drafter.start(context)
    drafter.propose(context, 1)
    return drafter


def naive(counted, context, token, length, concentration, vocab_size):
    """The recursion as it is written down."""
    if length == 0:
        times = sum(t == token for t in counted)
        return (times + concentration / vocab_size) / (len(counted) + concentration)
    shorter = naive(counted, context, token, length - 1, concentration, vocab_size)
    history = list(context[-length:]) if length <= len(context) else None
    follows = [
        counted[i + length]
        for i in range(len(counted) - length)
        if list(counted[i : i + length]) == history
    ]
    chance = follows.count(token) + concentration * shorter
    return chance / (len(follows) + concentration)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 4))
def test_the_distribution_is_the_recursion(context, max_ngram):
    p = started(context, max_ngram=max_ngram).distribution(context)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    for token in range(5):
        assert p[token] == pytest.approx(naive(context, context, token, max_ngram - 1, 0.5, 5))


def test_it_counts_as_the_text_grows():
    text = np.random.default_rng(0).integers(0, 5, 60).tolist()
    growing = started(text[:10])
    for end in (11, 15, 40, 60):
        growing.propose(text[:end], 1)
    whole = started(text)
    assert np.array_equal(growing.distribution(text), whole.distribution(text))


def test_it_drafts_what_followed_before():
    assert started([1, 2, 3, 1, 2]).propose([1, 2, 3, 1, 2], 3).tokens == (3, 1, 2)


def test_a_new_request_starts_from_nothing():
    engine = Engine(TableModel.random(5, 2, seed=1), drafters=["ngram"])
    first = engine.generate([1, 2, 3], max_tokens=30, temperature=1, seed=1)
    engine.generate([4, 4, 4], max_tokens=30)
    again = engine.generate([1, 2, 3], max_tokens=30, temperature=1, seed=1)
    assert again.origins == first.origins


@pytest.mark.parametrize("settings", [{"max_ngram": 0}, {"concentration": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(OptionError, match="max_ngram from 1"):
        Ngram(**settings)
