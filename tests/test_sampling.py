"""The target's choice: processors, truncation and noise, against a slow and plain second way."""

from __future__ import annotations

import itertools
import math

import naive_sampling as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import CorruptModelError, Engine, OptionError, SamplingParams
from foretell._noise import TWO_53, bits_of, gumbel, key_of, log, uniforms
from foretell._sampling import KeyedDraws, RequestSampler, completion_seed, draw
from foretell._support import BLOCK, Support, leading
from foretell.backends.table import TableModel

VOCAB = 7
SEEDS = st.integers(0, 2**64 - 1)
LOGITS = st.lists(
    st.floats(-20, 20, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
    min_size=VOCAB,
    max_size=VOCAB,
)


@st.composite
def sampling_params(draw):
    """Every parameter that bears on the choice, each often at its default."""

    def maybe(default, strategy):
        return draw(st.just(default) | strategy)

    ids = st.integers(0, VOCAB - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0, 100.0])),
        top_p=maybe(1.0, st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999])),
        top_k=maybe(0, st.sampled_from([-1, 1, 2, 3, VOCAB, VOCAB + 1, 10**9])),
        min_p=maybe(0.0, st.sampled_from([0.01, 0.3, 1.0])),
        repetition_penalty=maybe(1.0, st.sampled_from([0.5, 1.3, 3.0])),
        presence_penalty=maybe(0.0, st.floats(-2, 2)),
        frequency_penalty=maybe(0.0, st.floats(-2, 2)),
        logit_bias=maybe({}, st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        min_tokens=maybe(0, st.integers(0, 5)),
        stop_token_ids=maybe([], st.lists(ids, max_size=2)),
    )


# --- The whole choice ----------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(
    LOGITS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    sampling_params(),
    st.integers(1, 12),
    SEEDS,
)
def test_distribution_and_choice_are_those_of_the_documentation(
    logits, history, params, prompt_length, seed
):
    prompt_length = min(prompt_length, len(history))
    sampler = RequestSampler(params, seed=seed, prompt_length=prompt_length, eos_token_ids=[0])
    row = np.array(logits, np.float32)
    before = row.copy()
    expected = naive.processed(row, history, params, prompt_length, [0])
    p = sampler.distribution(row, history, len(history))
    wanted = {t: q for t, q in naive.distribution(expected, params).items() if q > 0}
    assert p.sum() == pytest.approx(1, abs=1e-12)
    near_the_edge = set(np.flatnonzero(p)) != set(wanted)
    if near_the_edge:  # a sum within rounding of top_p may fall to either side
        assert 0 < params.top_p < 1
    else:
        assert p[list(wanted)] == pytest.approx(list(wanted.values()), abs=1e-12)
    token = sampler.choose(row, history, len(history))
    assert p[token] > 0
    if params.temperature == 0:
        assert token == next(iter(wanted))
    elif not near_the_edge:
        sums = {t: math.log(q) + naive.gumbel(seed, len(history), t) for t, q in wanted.items()}
        assert sums[token] >= max(sums.values()) - 1e-9
    assert np.array_equal(row, before)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=2, max_size=6),
    sampling_params(),
    SEEDS,
    st.integers(0, 3),
)
def test_the_choice_is_a_function_of_its_arguments_alone(histories, params, seed, prompt_length):
    row = np.random.default_rng(seed % 1000).normal(size=VOCAB).astype(np.float32)
    options = {"seed": seed, "prompt_length": prompt_length, "eos_token_ids": [0]}
    used = RequestSampler(params, **options)
    for history in histories:  # any order, any way back
        fresh = RequestSampler(params, **options)
        if len(history) >= prompt_length:
            position = len(history)
            assert used.choose(row, history, position) == fresh.choose(row, history, position)
            ours = used.distribution(row, tuple(history), position)
            assert np.array_equal(ours, fresh.distribution(row, history, position))


def test_neither_place_nor_neighbours_of_a_row_matter():
    rows = np.random.default_rng(0).normal(size=(9, 1003)).astype(np.float32)
    sampler = RequestSampler(SamplingParams(temperature=0.8, top_p=0.9), seed=3)
    for i in range(9):
        apart = np.array(rows[i])
        assert sampler.choose(rows[i], [1], 1) == sampler.choose(apart, [1], 1)
        assert np.array_equal(
            sampler.distribution(rows[i], [1], 1), sampler.distribution(apart, [1], 1)
        )


PINNED = [703, 595, 453, 474, 95, 74, 960, 916]


def test_the_choice_is_pinned():
    """A seed gives the same tokens in every version; a change here is a breaking one."""
    row = np.linspace(-1, 1, 1000, dtype=np.float32)
    sampler = RequestSampler(SamplingParams(temperature=1.0), seed=42)
    assert [sampler.choose(row, [], position) for position in range(8)] == PINNED
    assert [naive.choose(row, SamplingParams(temperature=1.0), 42, i) for i in range(8)] == PINNED


# --- Truncation ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 511, 513, 5000, 40_000])
@pytest.mark.parametrize("kind", ["normal", "flat", "equal", "few values", "steep"])
def test_the_leading_entries_are_those_of_a_full_sort(count, kind):
    rng = np.random.default_rng(count)
    scores = {
        "normal": rng.normal(size=count),
        "flat": rng.normal(size=count) / 100,
        "equal": np.zeros(count),
        "few values": rng.integers(0, 4, count).astype(float),
        "steep": -(10.0 ** rng.uniform(-300, 300, count)),
    }[kind]
    scores -= scores.max()
    order = np.argsort(-scores, kind="stable")
    for k in (1, 2, 50, 600, count - 1):
        if k < count:
            assert set(leading(scores, k, np.ones(count))) == set(order[:k])
    weights = np.exp(scores)
    for p in (0.0, 0.1, 0.5, 0.9, 0.99, 0.999999):
        mass = p * weights.sum()
        kept = leading(scores, mass, weights)
        assert np.array_equal(np.sort(order[: len(kept)]), kept)
        assert weights[kept].sum() >= mass * (1 - 1e-9)
        assert len(kept) == 1 or weights[order[: len(kept) - 1]].sum() < mass * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 512, 513, BLOCK, BLOCK + 1, 49_152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 300.0])
def test_the_pruned_argmax_is_the_argmax(count, spread):
    scores = np.random.default_rng(1).normal(size=count) * spread
    scores -= scores.max()
    support = Support(np.arange(count), scores, count)
    for key in range(20):
        noise = gumbel(bits_of(key, np.arange(count)))
        assert support.choose(key) == int((scores + noise).argmax())


def test_the_noise_of_a_token_does_not_depend_on_which_others_are_left():
    ids = np.array([3, 77, 4000, 49_000])
    every = gumbel(bits_of(key_of(1, 2, 3), np.arange(49_152)))
    assert np.array_equal(gumbel(bits_of(key_of(1, 2, 3), ids)), every[ids])
    for token in ids:
        assert every[token] == pytest.approx(naive.gumbel(2, 3, int(token)), abs=1e-13)


# --- Extremes ------------------------------------------------------------------------


def engine_saying(*logits, **options):
    table = np.tile(np.array(logits, np.float32), (len(logits), 1))
    return Engine(TableModel(table, **options))


def test_a_tiny_temperature_takes_the_best_token():
    engine = engine_saying(0, 3, 2.99, -5)
    assert engine.generate([0], temperature=1e-6, max_tokens=50).token_ids == [1] * 50
    assert engine.generate([0], temperature=5e-324, max_tokens=50).token_ids == [1] * 50


def test_a_tiny_temperature_still_draws_between_equals():
    tokens = engine_saying(0, 3, 3, -5).generate([0], temperature=1e-6, max_tokens=200, seed=1)
    assert set(tokens.token_ids) == {1, 2}


def test_a_huge_temperature_is_uniform():
    for temperature in (100, 1e300):
        engine = engine_saying(0, 3, 2, -1)
        tokens = engine.generate([0], temperature=temperature, max_tokens=2000, seed=1).token_ids
        counts = np.bincount(tokens, minlength=4)
        assert counts.min() > 400  # 500 expected, standard deviation 19


@pytest.mark.parametrize(
    "options", [{"top_p": 0}, {"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1}], ids=str
)
def test_a_support_of_one_token(options):
    tokens = engine_saying(0, 3, 2, -1).generate([0], temperature=5, max_tokens=50, **options)
    assert tokens.token_ids == [1] * 50


@pytest.mark.parametrize(
    "options", [{"top_p": 1}, {"top_k": 0}, {"top_k": -1}, {"top_k": 4}, {"top_k": 10**12}], ids=str
)
def test_values_that_switch_a_parameter_off(options):
    engine = engine_saying(0, 3, 2, -1)
    plain = engine.generate([0], temperature=3, max_tokens=50, seed=7).token_ids
    assert engine.generate([0], temperature=3, max_tokens=50, seed=7, **options).token_ids == plain
    assert set(plain) == {0, 1, 2, 3}


def test_ties_are_cut_at_the_lowest_ids():
    engine = engine_saying(1, 1, 1, 1, 0)
    for options in ({"top_k": 2}, {"top_p": 0.3}):
        tokens = engine.generate([0], temperature=1, max_tokens=60, seed=1, **options).token_ids
        assert set(tokens) == {0, 1}


def test_infinite_logits_share_everything():
    engine = engine_saying(0, np.inf, -np.inf, np.inf)
    tokens = engine.generate([0], temperature=1, max_tokens=60, seed=1).token_ids
    assert set(tokens) == {1, 3}
    banned = engine.generate(
        [0], temperature=1, max_tokens=60, seed=1, logit_bias={1: float("-inf")}
    )
    assert set(banned.token_ids) == {3}


def test_tokens_at_minus_infinity_are_never_drawn():
    engine = engine_saying(0, -np.inf, 0, -np.inf)
    tokens = engine.generate([0], temperature=100, max_tokens=200, seed=1).token_ids
    assert set(tokens) == {0, 2}


@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_is_an_error_that_names_the_position(verification, temperature):
    engine = engine_saying(0, np.nan, 2)
    with pytest.raises(CorruptModelError, match="NaN for token 1 at position 3"):
        engine.generate([0, 0, 0], temperature=temperature, verification=verification)


def test_a_bias_that_leaves_nothing_is_an_error():
    minus = float("-inf")
    engine = engine_saying(0, 1, -np.inf, eos_token_ids=[1])
    with pytest.raises(OptionError, match="forbids every token"):
        engine.stream([0], logit_bias={0: minus, 1: minus, 2: minus})
    for temperature in (0, 1):
        with pytest.raises(OptionError, match="no token is left to choose at position 2"):
            engine.generate([0, 0], logit_bias={0: minus, 1: minus}, temperature=temperature)
        with pytest.raises(OptionError, match="no token is left to choose at position 1"):
            engine.generate(
                [0], logit_bias={0: minus}, min_tokens=1, max_tokens=9, temperature=temperature
            )


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_ids_the_model_lacks_are_refused_before_any_work(name):
    engine = engine_saying(0, 1)
    for token in (2, -1):
        value = {token: 1.0} if name == "logit_bias" else [token]
        with pytest.raises(OptionError, match=rf"{name} holds {token}, .*\(0\.\.1\)"):
            engine.stream([0], **{name: value})
    assert engine.model.num_passes == 0


# --- Penalties, biases, min_tokens ---------------------------------------------------


def test_the_repetition_penalty_counts_prompt_and_output():
    engine = engine_saying(1, 2, 3)
    assert engine.generate([2], repetition_penalty=4, max_tokens=2).token_ids == [1, 0]


def test_presence_and_frequency_count_the_output_alone():
    engine = engine_saying(1, 2, 3)
    assert engine.generate([2, 2], presence_penalty=1.5, max_tokens=2).token_ids == [2, 1]
    tokens = engine.generate([2, 2], frequency_penalty=0.75, max_tokens=4).token_ids
    assert tokens == [2, 2, 1, 2]  # 3, 2.25, then 1.5 below 2, then 2 - 0.75 below 1.5


def test_a_bias_moves_the_greedy_choice():
    engine = engine_saying(1, 2, 3)
    assert engine.generate([0], logit_bias={0: 2.5}, max_tokens=1).token_ids == [0]
    assert engine.generate([0], logit_bias={2: float("-inf")}, max_tokens=1).token_ids == [1]


def test_no_end_before_min_tokens():
    engine = engine_saying(1, 2, 3, eos_token_ids=[2])
    assert engine.generate([0], min_tokens=3, max_tokens=9).token_ids == [1, 1, 1, 2]
    stopped = engine.generate([0], min_tokens=2, stop_token_ids=[1], max_tokens=9)
    assert stopped.token_ids == [0, 0, 2]
    ignoring = engine.generate([0], min_tokens=2, ignore_eos=True, max_tokens=4)
    assert ignoring.token_ids == [1, 1, 2, 2]


# --- Seeds ---------------------------------------------------------------------------


def test_a_seed_reproduces_and_a_drawn_one_is_reported():
    engine = engine_saying(0, 0.1, 0.2, 0.3)
    first = engine.generate([0], temperature=1, max_tokens=40)
    assert 0 <= first.seed < 2**64
    again = engine.generate([0], temperature=1, max_tokens=40, seed=first.seed)
    assert again.token_ids == first.token_ids
    assert again.seed == first.seed
    assert engine.generate([0], temperature=1, max_tokens=40).token_ids != first.token_ids
    assert engine.generate([0], max_tokens=1).seed is None
    assert engine.generate([0], max_tokens=1, seed=5).seed == 5


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    engine = engine_saying(0, 0.1, 0.2, 0.3)
    tokens = engine.generate([0], temperature=1, max_tokens=40, seed=seed).token_ids
    other = engine.generate([0], temperature=1, max_tokens=40, seed=seed ^ (1 << 63)).token_ids
    assert tokens != other


# --- Noise ---------------------------------------------------------------------------


def test_the_logarithm_is_a_good_one():
    x = np.concatenate([np.random.default_rng(0).random(100_000), 10.0 ** np.arange(-300, 300)])
    x = np.concatenate([x, 1 - np.arange(1, 50) / TWO_53, [2.0**-54, 1.0, 2**0.5]])
    exact = np.array([math.log(value) for value in x])
    assert np.all(np.abs(log(x) - exact) <= 2 * np.spacing(np.abs(exact)))


def test_uniforms_stay_inside_and_noise_is_finite():
    ends = np.array([0, 1, 2**53 - 1], np.uint64)
    assert uniforms(ends).tolist() == [2.0**-54, 2.0**-53, 1 - 2.0**-53]
    assert np.isfinite(gumbel(ends)).all()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_neighbouring_keys_have_unrelated_noise(part):
    parts = np.array([1, 2, 3])
    base = uniforms(bits_of(key_of(*parts.tolist()), np.arange(100_000)))
    parts[part] += 1
    other = uniforms(bits_of(key_of(*parts.tolist()), np.arange(100_000)))
    assert abs(np.corrcoef(base, other)[0, 1]) < 0.02  # six standard deviations
    assert abs(np.corrcoef(base[1:], other[:-1])[0, 1]) < 0.02


def chi_square(counts, chances):
    expected = counts.sum() * chances
    return float(((counts - expected) ** 2 / expected).sum())


def test_choices_over_positions_follow_the_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    row = np.log(p).astype(np.float32)
    sampler = RequestSampler(SamplingParams(temperature=1.0), seed=9)
    tokens = [sampler.choose(row, [], position) for position in range(40_000)]
    # 4 degrees of freedom: 33.4 is passed by chance once in a million.
    assert chi_square(np.bincount(tokens, minlength=5), p) < 33.4
    pairs = np.bincount([5 * a + b for a, b in itertools.pairwise(tokens)], minlength=25)
    assert chi_square(pairs, np.outer(p, p).ravel()) < 79  # 24 degrees, once in 10^7
    wrong = np.roll(p, 1)
    assert chi_square(np.bincount(tokens, minlength=5), wrong) > 1000  # what is wrong is seen


def test_choices_over_seeds_follow_the_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    row = np.log(p).astype(np.float32)
    params = SamplingParams(temperature=1.0)
    tokens = [RequestSampler(params, seed=s).choose(row, [], 3) for s in range(20_000)]
    assert chi_square(np.bincount(tokens, minlength=5), p) < 33.4


def test_draws_of_different_uses_steps_and_nodes_differ():
    weights = np.ones(1 << 20)
    seen = set()
    for step in range(20):
        for node in range(20):
            draws = KeyedDraws(5, step)
            seen |= {draws.recover(node, weights), draws.draft(node, weights)}
    assert len(seen) > 790  # of 800; among a million numbers few meet


def test_acceptance_has_its_probability():
    accepted = sum(KeyedDraws(1, step).accept(2, 0.3) for step in range(20_000))
    assert abs(accepted - 6000) < 6 * 65
    assert all(KeyedDraws(1, step).accept(0, 1.0) for step in range(100))
    assert not any(KeyedDraws(1, step).accept(0, 0.0) for step in range(100))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 2**53 - 1))
def test_drawing_never_takes_a_weight_of_zero(weights, bits):
    weights = np.array(weights)
    if weights.sum() > 1e-300:
        number = float(uniforms(np.array([bits], np.uint64))[0])
        assert weights[draw(weights, number)] > 0


# --- Several completions -------------------------------------------------------------


@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_completion_is_the_same_whatever_n_is(verification, num_draft_tokens):
    model = TableModel.random(6, 2, seed=1)
    engine = Engine(model, draft=TableModel.random(6, 2, seed=1))
    options = {
        "max_tokens": 30,
        "temperature": 1.0,
        "verification": verification,
        "num_draft_tokens": num_draft_tokens,
    }
    alone = engine.generate([1, 2], seed=5, **options)
    many = engine.generate([1, 2], seed=5, n=8, **options)
    few = engine.generate([1, 2], seed=5, n=3, **options)
    assert alone.completions == (alone,)
    assert len(many.completions) == 8
    assert many.token_ids == alone.token_ids
    assert [c.token_ids for c in few.completions] == [c.token_ids for c in many.completions[:3]]
    assert len({tuple(c.token_ids) for c in many.completions}) == 8
    for index, completion in enumerate(many.completions):
        assert completion.seed == completion_seed(5, index)
        again = engine.generate([1, 2], seed=completion.seed, **options)
        assert again.token_ids == completion.token_ids
    assert [c["token_ids"] for c in many.to_dict()["others"]] == [c.token_ids for c in many.others]


def test_the_prompt_of_several_completions_is_read_once():
    class Counting(TableModel):
        num_rows = 0

        def forward(self, rows):
            self.num_rows += sum(len(part.tokens) for part in rows)
            return super().forward(rows)

    model = Counting(TableModel.random(6, 2, seed=1).table)
    engine = Engine(model, drafters=[])
    engine.generate([1] * 100, n=5, max_tokens=3, temperature=1)
    assert model.num_rows == 100 + 5 * 2
    assert model.num_passes == 1 + 2


def test_events_of_several_completions_carry_their_index():
    engine = Engine(TableModel.random(6, 2, seed=1, max_length=60))
    whole = engine.generate([1, 2], seed=5, n=4, max_tokens=25, temperature=1)
    events = list(engine.stream([1, 2], seed=5, n=4, max_tokens=25, temperature=1))
    for index, completion in enumerate(whole.completions):
        own = [event for event in events if event.index == index]
        assert [event.token_id for event in own[:-1]] == completion.token_ids
        assert own[-1].result.token_ids == completion.token_ids
        assert own[-1].result.others == ()


def test_greedy_completions_are_equal():
    engine = Engine(TableModel.random(6, 2, seed=1))
    result = engine.generate([1, 2], n=3, max_tokens=9)
    assert [c.token_ids for c in result.others] == [result.token_ids] * 2


def test_cancelling_ends_all_completions():
    engine = Engine(TableModel.random(6, 2, seed=1))
    results = [
        event.result
        for event in engine.stream([1], n=3, temperature=1, is_cancelled=lambda: True)
        if event.result
    ]
    assert [result.finish_reason for result in results] == ["cancelled"] * 3
