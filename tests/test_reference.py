"""The reference computes what it says, and a step never changes what the target says.

Tokens and logits are compared with ``==``, random models included: the reference computes
in float64 and gives a row the same bits in a pass of any length (pinned below), so no
near-tie can fall one way in a long pass and the other way in a short one. Only
comparisons with code that adds in another order, the naive model of this file, allow for
rounding.
"""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import reference
from foretell.reference import (
    build_causal_mask,
    full_lm_forward,
    greedy_decode,
    speculative_decode_step,
)

# --- Models -------------------------------------------------------------------------
# A model is the tuple of arguments that the functions share:
# (embedding_table, blocks_params, num_heads, tied, output_weight).


def random_block(rng, d_model, d_ff=5, projections=False, projection_biases=False):
    shapes = {
        "gamma1": (d_model,),
        "beta1": (d_model,),
        "gamma2": (d_model,),
        "beta2": (d_model,),
        "weight_o": (d_model, d_model),
        "bias_o": (d_model,),
        "ffn_weight1": (d_ff, d_model),
        "ffn_bias1": (d_ff,),
        "ffn_weight2": (d_model, d_ff),
        "ffn_bias2": (d_model,),
    }
    if projections:
        shapes |= {f"weight_{name}": (d_model, d_model) for name in "qkv"}
    if projection_biases:
        shapes |= {f"bias_{name}": (d_model,) for name in "qkv"}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def random_model(
    seed, vocab_size=11, d_model=6, num_heads=2, num_blocks=2, tied=True, projections=True
):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(vocab_size, d_model))
    blocks = [
        random_block(rng, d_model, projections=projections, projection_biases=projections)
        for _ in range(num_blocks)
    ]
    return (table, blocks, num_heads, tied, None if tied else rng.normal(size=table.shape))


def successor_model(successors):
    """A model without blocks that always follows token ``t`` by ``successors[t]``."""
    size = len(successors)
    output_weight = np.zeros((size, size))
    output_weight[successors, np.arange(size)] = 1.0
    # Embeddings of length 100 outweigh the position vectors, whose entries are at most 1.
    return (100.0 * np.eye(size), [], 1, False, output_weight)


def with_noise(model, scale, seed):
    """A drafter that resembles ``model``: its embeddings, disturbed."""
    table, *rest = model
    noise = np.random.default_rng(seed).normal(size=table.shape)
    return (table + scale * noise, *rest)


def forward(model, token_ids, mask=None):
    return full_lm_forward(token_ids, *model, mask=mask)


def causal_forward(model, token_ids):
    return forward(model, token_ids, build_causal_mask(np.asarray(token_ids).shape[1]))


def zero_block(d_model, **changes):
    block = {key: np.zeros_like(value) for key, value in a_block(d_model).items()}
    return block | {key: np.asarray(value, dtype=float) for key, value in changes.items()}


def a_block(d_model, **options):
    return random_block(np.random.default_rng(0), d_model, **options)


# --- The mask -----------------------------------------------------------------------


def test_the_causal_mask_is_true_on_and_below_the_diagonal():
    assert build_causal_mask(3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert build_causal_mask(3).dtype == np.bool_
    assert build_causal_mask(0).shape == (0, 0)


# --- The parts of the model ---------------------------------------------------------


@pytest.mark.parametrize("d_model", [1, 2, 3, 7, 8])
def test_sinusoidal_positions_follow_the_formula_at_every_width(d_model):
    positions = reference._sinusoidal_positions(5, d_model)
    assert positions.shape == (5, d_model)
    for t in range(5):
        for column in range(d_model):
            angle = t / 10000 ** ((column - column % 2) / d_model)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert positions[t, column] == pytest.approx(expected, abs=1e-12)


def test_layer_norm_of_a_known_vector():
    # Mean 2, variance (4 + 0 + 4) / 3.
    normed = reference._layer_norm(
        np.array([0.0, 2.0, 4.0]), np.array([1.0, 1.0, 2.0]), np.array([0.0, 5.0, 1.0])
    )
    scale = 2.0 / math.sqrt(8.0 / 3.0 + 1e-5)
    assert normed == pytest.approx([-scale, 5.0, 2 * scale + 1], abs=1e-12)


def test_layer_norm_of_a_constant_vector_is_beta_and_not_nan():
    beta = np.arange(4.0)
    assert np.array_equal(reference._layer_norm(np.full(4, 7.0), np.ones(4), beta), beta)


@pytest.mark.parametrize(
    ("x", "expected"),
    # Published values of the tanh form, to five digits.
    [(0.0, 0.0), (1.0, 0.84119), (-1.0, -0.15881), (2.0, 1.95460), (-3.0, -0.00364)],
)
def test_gelu_has_the_values_of_the_tanh_form(x, expected):
    assert reference._gelu(np.array([x]))[0] == pytest.approx(expected, abs=1e-5)


def test_gelu_stays_within_a_thousandth_of_the_exact_form():
    x = np.linspace(-6, 6, 241)
    exact = [0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x]
    assert np.abs(reference._gelu(x) - exact).max() < 1e-3


def test_linear_is_x_times_the_transposed_weight_plus_bias():
    x = np.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    assert reference._linear(x, weight, np.array([0.0, 10.0, 0.0])).tolist() == [
        [[1.0, 12.0, -1.0]],
        [[3.0, 14.0, -1.0]],
    ]


def naive_attention(normed, block, num_heads, visible):
    """Attention the textbook way: one head at a time, whole matrices, masked by -inf."""
    query, key, value = (
        normed @ block[f"weight_{name}"].T + block.get(f"bias_{name}", 0.0)
        if f"weight_{name}" in block
        else normed
        for name in "qkv"
    )
    head_dim = normed.shape[-1] // num_heads
    heads = []
    for h in range(num_heads):
        columns = slice(h * head_dim, (h + 1) * head_dim)
        scores = query[:, columns] @ key[:, columns].T / math.sqrt(head_dim)
        exponentials = np.exp(np.where(visible, scores, -np.inf))
        weights = exponentials / exponentials.sum(axis=1, keepdims=True)
        heads.append(weights @ value[:, columns])
    return np.concatenate(heads, axis=1) @ block["weight_o"].T + block["bias_o"]


def naive_forward(model, ids, visible):
    """The whole model for one sequence, written once more and in matrix products."""
    table, blocks, num_heads, tied, output_weight = model
    seq_len, d_model = len(ids), table.shape[1]
    hidden = np.array(
        [
            [
                table[token, c]
                + (math.cos if c % 2 else math.sin)(t / 10000 ** ((c - c % 2) / d_model))
                for c in range(d_model)
            ]
            for t, token in enumerate(ids)
        ]
    )
    assert hidden.shape == (seq_len, d_model)

    def norm(x, gamma, beta):
        return gamma * (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + 1e-5) + beta

    for block in blocks:
        normed = norm(hidden, block["gamma1"], block["beta1"])
        hidden = hidden + naive_attention(normed, block, num_heads, visible)
        normed = norm(hidden, block["gamma2"], block["beta2"])
        x = normed @ block["ffn_weight1"].T + block["ffn_bias1"]
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        hidden = hidden + x @ block["ffn_weight2"].T + block["ffn_bias2"]
    return hidden @ (table if tied else output_weight).T


@pytest.mark.parametrize("options", [{}, {"projections": True}, {"projection_biases": True}])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 6])
def test_attention_equals_a_loop_over_heads(num_heads, options):
    if options.get("projection_biases"):
        options = {"projections": True, **options}
    block = a_block(6, **options)
    normed = np.random.default_rng(1).normal(size=(1, 5, 6))
    visible = np.random.default_rng(2).random((5, 5)) < 0.5
    np.fill_diagonal(visible, True)
    additive = np.where(visible, 0.0, -np.inf)
    np.testing.assert_allclose(
        reference._multi_head_attention(normed, block, num_heads, additive)[0],
        naive_attention(normed[0], block, num_heads, visible),
        rtol=1e-12,
        atol=1e-12,
    )


# --- The forward pass ---------------------------------------------------------------


def test_without_blocks_the_logits_can_be_computed_by_hand():
    table = [[1, 0], [0, 1], [2, 2]]
    # Positions: (sin 0, cos 0) = (0, 1), then (sin 1, cos 1) = (0.841471, 0.540302).
    # Hidden:    (2, 2) + (0, 1) = (2, 3), then (1, 0) + (...) = (1.841471, 0.540302).
    logits = full_lm_forward([[2, 0]], table, [], 1, True)
    assert logits.shape == (1, 2, 3)
    np.testing.assert_allclose(
        logits[0], [[2, 3, 10], [1.841471, 0.540302, 4.763546]], rtol=0, atol=1e-6
    )


def test_a_block_of_width_one_can_be_computed_by_hand():
    # The norm of a single number is beta. So attention mixes equal values, 2, and adds
    # 3 * 2 + 1 = 7; the feed-forward adds 5 * gelu(1 * 0.5 + 0.5) - 1 = 5 * 0.841192 - 1.
    block = {
        "gamma1": [1.0],
        "beta1": [2.0],
        "weight_o": [[3.0]],
        "bias_o": [1.0],
        "gamma2": [1.0],
        "beta2": [0.5],
        "ffn_weight1": [[1.0]],
        "ffn_bias1": [0.5],
        "ffn_weight2": [[5.0]],
        "ffn_bias2": [-1.0],
    }
    # Embedding 10 and position sin 0 = 0, so hidden = 10 + 7 + 3.205960; output weights 1, -2.
    logits = full_lm_forward([[0]], [[10.0], [20.0]], [block], 1, False, [[1.0], [-2.0]])
    np.testing.assert_allclose(logits, [[[20.205960, -40.411920]]], rtol=0, atol=1e-5)


def test_attention_weights_can_be_computed_by_hand():
    # Values are -1 and 1 in column 0 (normed by hand below), so position 1 mixes them with
    # softmax weights e^-s and e^s, where s is half the difference of its two scores.
    table = np.array([[-3.0, 1.0], [5.0, 1.0]])
    block = zero_block(
        2,
        gamma1=[1, 1],
        weight_q=np.eye(2),
        weight_k=np.eye(2),
        weight_v=np.eye(2),
        weight_o=np.eye(2),
    )
    hidden = table + np.array([[0, 1], [math.sin(1), math.cos(1)]])
    half = (hidden[:, 0] - hidden[:, 1]) / 2  # mean 0, deviations +half and -half
    normed = half / np.sqrt(half**2 + 1e-5)  # about -1 and +1
    scores = normed[1] * normed * 2 / math.sqrt(2)
    weights = np.exp(scores) / np.exp(scores).sum()
    mixed = np.array([normed[0], weights @ normed])
    expected = hidden + np.stack([mixed, -mixed], axis=1)
    logits = full_lm_forward(
        [[0, 1]], table, [block], 1, False, np.eye(2), mask=build_causal_mask(2)
    )
    np.testing.assert_allclose(logits[0], expected, rtol=1e-12)


@pytest.mark.parametrize("projections", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("d_model", "num_heads"), [(6, 2), (7, 7), (5, 1), (1, 1)])
def test_the_forward_pass_equals_a_naive_one(d_model, num_heads, tied, projections):
    model = random_model(
        3, d_model=d_model, num_heads=num_heads, tied=tied, projections=projections
    )
    ids = [4, 0, 10, 4, 7]
    np.testing.assert_allclose(
        causal_forward(model, [ids])[0],
        naive_forward(model, ids, build_causal_mask(5)),
        rtol=1e-9,
        atol=1e-9,
    )


def test_logits_do_not_change_when_later_tokens_change():
    model = random_model(4)
    one = causal_forward(model, [[1, 2, 3, 4, 5]])
    other = causal_forward(model, [[1, 2, 3, 9, 0]])
    assert np.array_equal(one[:, :3], other[:, :3])
    assert not np.array_equal(one[:, 3:], other[:, 3:])


def test_without_a_mask_every_position_sees_the_later_ones():
    model = random_model(4)
    assert not np.array_equal(forward(model, [[1, 2, 3]])[:, 0], forward(model, [[1, 2, 4]])[:, 0])
    everything = np.ones((3, 3), dtype=bool)
    assert np.array_equal(forward(model, [[1, 2, 3]]), forward(model, [[1, 2, 3]], everything))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    seq_len=st.integers(2, 24),
    d_model=st.sampled_from([1, 2, 3, 4, 7, 9, 16, 24]),
)
def test_a_row_has_the_same_bits_in_a_pass_of_any_length(seed, seq_len, d_model):
    heads = d_model if d_model % 2 else d_model // 2
    model = random_model(seed, vocab_size=19, d_model=d_model, num_heads=heads)
    ids = np.random.default_rng(seed).integers(0, 19, size=(1, seq_len))
    whole = causal_forward(model, ids)
    for length in range(1, seq_len):
        assert np.array_equal(causal_forward(model, ids[:, :length]), whole[:, :length])


def test_rows_of_a_batch_equal_single_runs():
    model = random_model(5)
    batch = np.array([[1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 3, 4]])
    together = causal_forward(model, batch)
    decoded = greedy_decode(batch, *model, 5)
    for row, ids in enumerate(batch):
        assert np.array_equal(together[row], causal_forward(model, [ids])[0])
        assert np.array_equal(decoded[row], greedy_decode([ids], *model, 5)[0])


def test_boolean_and_additive_masks_agree():
    model = random_model(6)
    causal = build_causal_mask(4)
    boolean = forward(model, [[3, 1, 4, 1]], causal)
    additive = forward(model, [[3, 1, 4, 1]], np.where(causal, 0.0, -np.inf))
    large = forward(model, [[3, 1, 4, 1]], np.where(causal, 0.0, -1e9))
    assert np.array_equal(boolean, additive)
    np.testing.assert_allclose(boolean, large, rtol=1e-12)


def test_a_finite_additive_mask_is_added_to_the_scores():
    # All scores are 0 because the queries are, so the mask alone makes the weights.
    block = zero_block(2, gamma1=[1, 1], weight_o=np.eye(2))
    block |= {"weight_q": np.zeros((2, 2)), "weight_k": np.eye(2), "weight_v": np.eye(2)}
    table, bias = np.array([[-3.0, 1.0], [5.0, 1.0]]), -math.log(3)
    weighted = full_lm_forward(
        [[0, 1]], table, [block], 1, False, np.eye(2), mask=[[0.0, bias], [bias, 0.0]]
    )
    hidden = table + reference._sinusoidal_positions(2, 2)
    normed = reference._layer_norm(hidden, np.ones(2), np.zeros(2))
    expected = hidden + np.array([[0.75, 0.25], [0.25, 0.75]]) @ normed
    np.testing.assert_allclose(weighted[0], expected, rtol=1e-12)


def test_tied_logits_compare_hidden_states_with_the_embedding_table():
    table, blocks, heads, _, _ = random_model(7)
    tied = full_lm_forward([[1, 2]], table, blocks, heads, True)
    untied = full_lm_forward([[1, 2]], table, blocks, heads, False, table)
    assert np.array_equal(tied, untied)


def test_weights_of_any_layout_and_precision_give_the_same_logits():
    table, blocks, heads, tied, _ = random_model(8)
    table = table.astype(np.float32)
    fortran = [{key: np.asfortranarray(value) for key, value in b.items()} for b in blocks]
    one = full_lm_forward([[1, 2, 3]], table, blocks, heads, tied)
    other = full_lm_forward([[1, 2, 3]], np.asfortranarray(table), fortran, heads, tied)
    assert one.dtype == np.float64
    assert np.array_equal(one, other)


# --- Greedy decoding ----------------------------------------------------------------


def test_greedy_decoding_follows_the_best_successor():
    assert greedy_decode([[0]], *successor_model([2, 0, 1]), 5).tolist() == [[0, 2, 1, 0, 2, 1]]


def test_greedy_decoding_appends_one_argmax_at_a_time():
    model = random_model(9)
    sequence = [3, 1]
    for _ in range(6):
        logits = naive_forward(model, sequence, build_causal_mask(len(sequence)))[-1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-6  # far from a tie, so rounding cannot matter
        sequence.append(int(np.argmax(logits)))
    assert greedy_decode([[3, 1]], *model, 6).tolist() == [sequence]


def test_zero_new_tokens_returns_a_copy_of_the_prefix():
    prefix = np.array([[1, 2]])
    result = greedy_decode(prefix, *random_model(0), 0)
    assert result.tolist() == [[1, 2]]
    assert not np.shares_memory(result, prefix)


def test_ties_go_to_the_lowest_id():
    # Tokens 1, 5 and 8 share one embedding, hence one logit to the last bit.
    table = np.random.default_rng(10).normal(size=(9, 13))
    table[[1, 5, 8]] = 3.0
    model = (table, [], 1, True, None)
    logits = causal_forward(model, [[5]])[0, 0]
    assert logits[1] == logits[5] == logits[8] == logits.max()
    assert greedy_decode([[5]], *model, 2).tolist() == [[5, 1, 1]]
    assert greedy_decode([[3]], np.zeros((4, 2)), [], 1, True, None, 2).tolist() == [[3, 0, 0]]


# --- One speculative step -----------------------------------------------------------

CYCLE = [1, 2, 3, 4, 5, 0]  # 0 1 2 3 4 5 0 1 ...


@pytest.mark.parametrize(
    ("wrong_at", "expected", "num_accepted"),
    [
        (None, [0, 1, 2, 3, 4], 4),
        (3, [0, 1, 2, 3, 4], 3),  # corrected at the last draft token
        (1, [0, 1, 2], 1),
        (0, [0, 1], 0),
    ],
)
def test_the_agreeing_prefix_is_kept_and_the_first_disagreement_corrected(
    wrong_at, expected, num_accepted
):
    drafter = list(CYCLE)
    if wrong_at is not None:
        drafter[wrong_at] = wrong_at  # instead of wrong_at + 1
    accepted, count = speculative_decode_step(
        [[0]], *successor_model(drafter), *successor_model(CYCLE), 4
    )
    assert accepted.tolist() == [expected]
    assert count == num_accepted
    assert type(count) is int


def test_nothing_after_a_disagreement_is_kept_though_it_agrees_again():
    # The drafter skips 2: it drafts 1 3 4 5, the target wants 1 2 and, after 3, 4 again.
    drafter = [1, 3, 3, 4, 5, 0]
    accepted, count = speculative_decode_step(
        [[0]], *successor_model(drafter), *successor_model(CYCLE), 4
    )
    assert (accepted.tolist(), count) == ([[0, 1, 2]], 1)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_an_always_wrong_draft_still_gives_one_token(num_draft_tokens):
    drafter = [5, 0, 1, 2, 3, 4]
    accepted, count = speculative_decode_step(
        [[3]], *successor_model(drafter), *successor_model(CYCLE), num_draft_tokens
    )
    assert (accepted.tolist(), count) == ([[3, 4]], 0)


def test_zero_draft_tokens_return_the_prefix():
    accepted, count = speculative_decode_step(
        [[3, 4]], *successor_model(CYCLE), *successor_model(CYCLE), 0
    )
    assert (accepted.tolist(), count) == ([[3, 4]], 0)


def test_a_tie_in_the_target_goes_to_the_lowest_id_as_in_greedy_decoding():
    indifferent = (np.zeros((6, 2)), [], 1, True, None)
    agreeing = speculative_decode_step([[3]], *indifferent, *indifferent, 2)
    corrected = speculative_decode_step([[3]], *successor_model(CYCLE), *indifferent, 2)
    assert (agreeing[0].tolist(), agreeing[1]) == ([[3, 0, 0]], 2)
    assert (corrected[0].tolist(), corrected[1]) == ([[3, 0]], 0)


def test_the_prefix_is_not_modified():
    prefix = np.array([[0, 1]])
    speculative_decode_step(prefix, *successor_model(CYCLE), *successor_model(CYCLE), 3)
    assert prefix.tolist() == [[0, 1]]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
def test_the_target_runs_exactly_once_on_the_whole_draft_with_a_causal_mask(
    monkeypatch, num_draft_tokens
):
    target, drafter = random_model(1, d_model=6), random_model(2, d_model=4)
    passes = []

    def counting_forward(token_ids, table, *args, mask=None, **kwargs):
        passes.append((np.shape(table)[1], np.shape(token_ids), mask))
        return full_lm_forward(token_ids, table, *args, mask=mask, **kwargs)

    monkeypatch.setattr(reference, "full_lm_forward", counting_forward)
    speculative_decode_step([[1, 2]], *drafter, *target, num_draft_tokens)
    target_passes = [each for each in passes if each[0] == 6]
    assert len(passes) == num_draft_tokens + 1
    assert len(target_passes) == 1
    _, shape, mask = target_passes[0]
    assert shape == (1, 2 + num_draft_tokens)
    assert np.array_equal(mask, build_causal_mask(2 + num_draft_tokens))


def models(vocab_size=7):
    """Random models of one vocabulary, all other sizes free."""
    return st.builds(
        lambda seed, size, blocks, tied, projections: random_model(
            seed, vocab_size, *size, blocks, tied, projections
        ),
        seed=st.integers(0, 2**32 - 1),
        size=st.sampled_from([(1, 1), (3, 1), (4, 2), (5, 5), (6, 3)]),
        blocks=st.integers(0, 2),
        tied=st.booleans(),
        projections=st.booleans(),
    )


prefixes = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(lambda ids: np.array([ids]))


@settings(max_examples=60, deadline=None)
@given(prefix=prefixes, target=models(), num_draft_tokens=st.integers(0, 6))
def test_a_target_that_drafts_for_itself_accepts_everything(prefix, target, num_draft_tokens):
    accepted, count = speculative_decode_step(prefix, *target, *target, num_draft_tokens)
    assert count == num_draft_tokens
    assert np.array_equal(accepted, greedy_decode(prefix, *target, num_draft_tokens))


@settings(max_examples=100, deadline=None)
@given(
    prefix=prefixes,
    target=models(),
    stranger=models(),
    resembles=st.sampled_from([None, 0.1, 0.5, 1.0]),
    num_draft_tokens=st.integers(1, 6),
)
def test_any_drafter_yields_a_prefix_of_the_targets_greedy_decoding(
    prefix, target, stranger, resembles, num_draft_tokens
):
    drafter = stranger if resembles is None else with_noise(target, resembles, seed=0)
    accepted, count = speculative_decode_step(prefix, *drafter, *target, num_draft_tokens)
    greedy = greedy_decode(prefix, *target, num_draft_tokens)
    draft = greedy_decode(prefix, *drafter, num_draft_tokens)

    assert np.array_equal(accepted, greedy[:, : accepted.shape[1]])
    agrees = (draft == greedy)[0, prefix.shape[1] :].tolist()
    first_disagreement = agrees.index(False) if False in agrees else num_draft_tokens
    assert count == first_disagreement
    corrected = first_disagreement < num_draft_tokens
    assert accepted.shape == (1, prefix.shape[1] + count + corrected)


@settings(max_examples=25, deadline=None)
@given(
    prefix=prefixes,
    target=models(),
    noise=st.sampled_from([0.1, 0.5, 2.0]),
    num_draft_tokens=st.integers(1, 5),
)
def test_repeated_steps_equal_greedy_decoding(prefix, target, noise, num_draft_tokens):
    drafter = with_noise(target, noise, seed=1)
    length = prefix.shape[1] + 12
    sequence = prefix
    while sequence.shape[1] < length:
        longer, _ = speculative_decode_step(sequence, *drafter, *target, num_draft_tokens)
        assert longer.shape[1] > sequence.shape[1]
        sequence = longer
    assert np.array_equal(sequence[:, :length], greedy_decode(prefix, *target, 12))


# --- What is refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "batch axis comes first"),
        ([1, 2], r"shape \(2,\), but the batch axis comes first"),
        ([[[1]]], "batch axis comes first"),
        (3, "batch axis comes first"),
        ([[]], "empty"),
        (np.zeros((0, 4), dtype=int), "empty"),
        ([[1.0, 2.0]], "dtype float64"),
        ([[True, False]], "dtype bool"),
        ([["a"]], "pass integers"),
        ([[None]], "pass integers"),
        ([[1, 2], [3]], "rectangular"),
        ([[1, -1]], "contains -1.*from 0 to 10"),
        ([[11]], "contains 11.*from 0 to 10"),
    ],
)
def test_token_ids_that_are_not_ids_are_refused_everywhere(token_ids, message):
    model = random_model(0)
    with pytest.raises(ValueError, match=message):
        forward(model, token_ids)
    with pytest.raises(ValueError, match=message):
        greedy_decode(token_ids, *model, 0)
    with pytest.raises(ValueError, match=message):
        speculative_decode_step(token_ids, *model, *model, 2)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (-1, "cannot be negative"),
        (2.0, "is a count"),
        ("2", "is a count"),
        (None, "is a count"),
        (True, "is a count"),
        (np.True_, "is a count"),
    ],
)
def test_counts_that_are_not_counts_are_refused(count, message):
    model = random_model(0)
    with pytest.raises(ValueError, match=f"seq_len .*{message}"):
        build_causal_mask(count)
    with pytest.raises(ValueError, match=f"num_new_tokens .*{message}"):
        greedy_decode([[1]], *model, count)
    with pytest.raises(ValueError, match=f"num_draft_tokens .*{message}"):
        speculative_decode_step([[1]], *model, *model, count)


def test_numpy_integers_are_counts():
    model = random_model(0)
    accepted, count = speculative_decode_step([[1]], *model, *model, np.int64(2))
    assert (accepted.shape, count) == ((1, 3), 2)


def test_a_step_refuses_more_than_one_sequence():
    model = random_model(0)
    with pytest.raises(ValueError, match=r"2 sequences.*one sequence"):
        speculative_decode_step([[1], [2]], *model, *model, 2)


def test_a_step_refuses_models_of_different_vocabularies():
    drafter, target = random_model(0, vocab_size=5), random_model(0, vocab_size=6)
    with pytest.raises(ValueError, match=r"drafter's vocabulary has 5 .* target's 6"):
        speculative_decode_step([[1]], *drafter, *target, 2)


def test_a_step_refuses_before_any_pass_is_paid_for(monkeypatch):
    def no_pass(*args, **kwargs):
        raise AssertionError("a pass was run")

    monkeypatch.setattr(reference, "full_lm_forward", no_pass)
    drafter, target = random_model(0, vocab_size=5), random_model(0, vocab_size=6)
    with pytest.raises(ValueError, match="vocabulary"):
        speculative_decode_step([[1]], *drafter, *target, 2)


@pytest.mark.parametrize("num_heads", [4, 7, 0, -2, 2.0, True])
def test_heads_that_do_not_divide_the_width_are_refused(num_heads):
    table, blocks, _, tied, _ = random_model(0, d_model=6)
    with pytest.raises(ValueError, match="num_heads"):
        full_lm_forward([[1]], table, blocks, num_heads, tied)


def test_an_untied_model_needs_its_output_weight():
    table, blocks, heads, _, _ = random_model(0)
    with pytest.raises(ValueError, match="output_weight is None, but tied is false"):
        full_lm_forward([[1]], table, blocks, heads, False)


@pytest.mark.parametrize("shape", [(11, 5), (10, 6), (6, 11), (66,)])
def test_an_output_weight_of_another_shape_is_refused(shape):
    table, blocks, heads, _, _ = random_model(0)
    with pytest.raises(ValueError, match="output_weight has shape"):
        full_lm_forward([[1]], table, blocks, heads, False, np.ones(shape))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.ones(6), "shape"),
        (np.ones((0, 6)), "shape"),
        (np.ones((6, 0)), "shape"),
        (np.ones((1, 6, 6)), "shape"),
        ([["a", "b"]], "not an array of numbers"),
        ([[1.0], [np.nan]], "NaN or infinity"),
        ([[1.0], [np.inf]], "NaN or infinity"),
    ],
)
def test_an_embedding_table_that_is_not_one_is_refused(table, message):
    with pytest.raises(ValueError, match=f"token_embedding_table .*{message}"):
        full_lm_forward([[0]], table, [], 1, True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((2, 2), dtype=bool), r"shape \(2, 2\).*pass \(3, 3\)"),
        (np.ones((1, 3, 3), dtype=bool), "shape"),
        (np.ones(3, dtype=bool), "shape"),
        (np.tril(np.ones((3, 3), dtype=int)), "dtype int"),
        (np.tril(np.ones((3, 3))), r"pass mask.astype\(bool\)"),
        (np.full((3, 3), np.nan), "NaN"),
    ],
)
def test_a_mask_of_another_shape_or_meaning_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        forward(random_model(0), [[1, 2, 3]], mask)


@pytest.mark.parametrize("additive", [True, False])
def test_a_position_that_may_attend_to_nothing_is_refused(additive):
    mask = build_causal_mask(3)
    mask[1] = False
    with pytest.raises(ValueError, match="position 1 attend to nothing"):
        forward(random_model(0), [[1, 2, 3]], np.where(mask, 0.0, -np.inf) if additive else mask)


REQUIRED = sorted(set(reference.BLOCK_SHAPES) - set(reference.QUERY_KEY_VALUE_BIASES))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_array_of_a_block_is_named(key):
    table, blocks, heads, tied, _ = random_model(0, num_blocks=2)
    for name in "qkv":
        del blocks[1][f"bias_{name}"]
    del blocks[1][key]
    with pytest.raises(ValueError, match=f"block 1 has no '{key}'"):
        full_lm_forward([[1]], table, blocks, heads, tied)


@pytest.mark.parametrize("key", sorted(reference.BLOCK_SHAPES))
def test_an_array_of_another_shape_is_named(key):
    table, blocks, heads, tied, _ = random_model(0)
    blocks[1][key] = np.ones((3, 3, 3))
    with pytest.raises(ValueError, match="block 1: "):
        full_lm_forward([[1]], table, blocks, heads, tied)


def test_a_projection_bias_without_its_weight_is_refused():
    table, blocks, heads, tied, _ = random_model(0, projections=False)
    blocks[0]["bias_k"] = np.zeros(6)
    with pytest.raises(ValueError, match="'bias_k' but no 'weight_k'"):
        full_lm_forward([[1]], table, blocks, heads, tied)


def test_projection_biases_are_optional():
    table, blocks, heads, tied, _ = random_model(0)
    without = [
        {
            key: value
            for key, value in block.items()
            if not key.startswith("bias_") or key[-1] == "o"
        }
        for block in blocks
    ]
    zeros = [block | {f"bias_{name}": np.zeros(6) for name in "qkv"} for block in without]
    assert np.array_equal(
        full_lm_forward([[1, 2]], table, without, heads, tied),
        full_lm_forward([[1, 2]], table, zeros, heads, tied),
    )


def test_one_block_in_place_of_a_list_of_blocks_is_refused():
    table, blocks, heads, tied, _ = random_model(0)
    with pytest.raises(ValueError, match="list of dicts"):
        full_lm_forward([[1]], table, blocks[0], heads, tied)


# --- The surface --------------------------------------------------------------------


def test_the_public_names_and_signatures_are_these():
    assert reference.__all__ == [
        "build_causal_mask",
        "full_lm_forward",
        "greedy_decode",
        "speculative_decode_step",
    ]
    model = ["embedding_table", "blocks_params", "num_heads", "tied", "output_weight"]
    plain = ["token_embedding_table", *model[1:]]
    expected = {
        build_causal_mask: ["seq_len"],
        full_lm_forward: ["token_ids", *plain, "mask"],
        greedy_decode: ["token_ids", *plain, "num_new_tokens"],
        speculative_decode_step: [
            "token_ids",
            *(f"{role}_{name}" for role in ("draft", "target") for name in model),
            "num_draft_tokens",
        ],
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names


def test_the_reference_imports_nothing_but_numpy_and_the_standard_library():
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    assert imported == {"__future__", "collections", "numpy", "operator", "typing"}
