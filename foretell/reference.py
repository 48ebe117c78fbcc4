"""Speculative decoding from first principles, in NumPy, to be read.

This module needs nothing but NumPy. It is slow on purpose: no cache, no tricks, one idea
per function. Read it from top to bottom; each function uses only the ones above it and
the argument checks, which come last.

**The problem.** A language model maps a sequence of token ids to one row of logits per
position: row ``i`` scores every token of the vocabulary as the successor of token ``i``.
Greedy decoding takes the best token of the last row, appends it and starts again
(:func:`greedy_decode`). Every new token costs one forward pass, and the passes cannot
run side by side, because each needs the token that the one before it chose. For a large
model a pass is mostly the time needed to read the weights from memory, and those are
read once per pass, however many positions the pass computes.

**The idea.** Let a small, cheap model, the *drafter*, guess the next few tokens one by
one. Then run the large model, the *target*, once over the whole guess. A transformer
computes all positions of a sequence in one pass, so that single pass tells what the
target would have chosen after every guessed token. Keep the guesses for as long as they
equal the target's own choices; replace the first wrong one by the target's choice (the
*correction*); drop whatever came after it (:func:`speculative_decode_step`).

**Why nothing changes.** A row of logits depends, under a causal mask, on the tokens up
to its own position and on no later one. While all earlier guesses were right, those
tokens are exactly the ones plain decoding would have produced, so the row is exactly the
row plain decoding would have computed, and its argmax the token plain decoding would
have chosen. By induction every token kept is the target's own. The drafter decides how
many tokens a step yields, never which.

**Why "exactly" is meant literally.** Floating-point sums depend on the order of their
terms, and a matrix product is free to pick another order for 8 rows than for 1. Then a
near-tie between two tokens can fall one way in plain decoding and the other way in
verification. This module computes in float64 and writes every sum so that a row's result
depends only on that row and on the positions it attends to (see :func:`_linear` and
:func:`_attend`). So a row has the same bits in a pass of any length, and the argument
above needs no "up to rounding".

Papers: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via
Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model Decoding with
Speculative Sampling". Both also treat sampling; this module treats greedy decoding.

**Shapes.** The batch axis comes first: token ids are ``(batch, seq_len)``, hidden states
``(batch, seq_len, d_model)``, logits ``(batch, seq_len, vocab_size)``.

**A block** is a dict of arrays. Weights are stored ``(out, in)`` and applied as
``x @ weight.T + bias``:

====================================  ==========================================
``gamma1``, ``beta1``                 ``(d_model,)``, the norm before attention
``weight_o``, ``bias_o``              ``(d_model, d_model)``, ``(d_model,)``
``gamma2``, ``beta2``                 ``(d_model,)``, the norm before feed-forward
``ffn_weight1``, ``ffn_bias1``        ``(d_ff, d_model)``, ``(d_ff,)``
``ffn_weight2``, ``ffn_bias2``        ``(d_model, d_ff)``, ``(d_model,)``
``weight_q``, ``weight_k``,           optional, all three or none:
``weight_v``                          ``(d_model, d_model)``
``bias_q``, ``bias_k``, ``bias_v``    optional, each with its weight: ``(d_model,)``
====================================  ==========================================

Without ``weight_q``, ``weight_k`` and ``weight_v``, query, key and value are the normed
input itself. Other keys are ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "build_causal_mask",
    "full_lm_forward",
    "greedy_decode",
    "speculative_decode_step",
]

Block = Mapping[str, ArrayLike]
Floats = NDArray[np.float64]
TokenIds = NDArray[np.int64]

LAYER_NORM_EPSILON = 1e-5

BLOCK_SHAPES = {
    "gamma1": ("d_model",),
    "beta1": ("d_model",),
    "weight_q": ("d_model", "d_model"),
    "bias_q": ("d_model",),
    "weight_k": ("d_model", "d_model"),
    "bias_k": ("d_model",),
    "weight_v": ("d_model", "d_model"),
    "bias_v": ("d_model",),
    "weight_o": ("d_model", "d_model"),
    "bias_o": ("d_model",),
    "gamma2": ("d_model",),
    "beta2": ("d_model",),
    "ffn_weight1": ("d_ff", "d_model"),
    "ffn_bias1": ("d_ff",),
    "ffn_weight2": ("d_model", "d_ff"),
    "ffn_bias2": ("d_model",),
}
QUERY_KEY_VALUE_WEIGHTS = ("weight_q", "weight_k", "weight_v")
QUERY_KEY_VALUE_BIASES = ("bias_q", "bias_k", "bias_v")


# --- The parts of the model ---------------------------------------------------------


def build_causal_mask(seq_len: int) -> NDArray[np.bool_]:
    """Return the ``(seq_len, seq_len)`` mask in which no position sees its future.

    Entry ``[i, j]`` is True where position ``i`` may attend to position ``j``, that is
    where ``j <= i``. This mask is what makes one pass over a draft equal to many passes
    over its prefixes: row ``i`` cannot know whether anything follows it.

    Raises:
        ValueError: if ``seq_len`` is not an integer of at least 0.
    """
    size = _checked_count("seq_len", seq_len)
    return np.tril(np.ones((size, size), dtype=np.bool_))


def _sinusoidal_positions(seq_len: int, d_model: int) -> Floats:
    """Return ``(seq_len, d_model)`` position vectors (Vaswani et al. 2017).

    Columns ``2i`` and ``2i + 1`` hold ``sin(t / w)`` and ``cos(t / w)`` for position
    ``t``, with ``w = 10000 ** (2i / d_model)``. An odd width ends with a sine whose
    cosine is left out.
    """
    even_columns = np.arange(0, d_model, 2)
    angles = np.arange(seq_len)[:, None] / 10000.0 ** (even_columns / d_model)
    positions = np.empty((seq_len, d_model))
    positions[:, 0::2] = np.sin(angles)
    positions[:, 1::2] = np.cos(angles)[:, : d_model // 2]
    return positions


def _layer_norm(x: Floats, gamma: Floats, beta: Floats) -> Floats:
    """Scale each ``(d_model,)`` vector to mean 0 and variance 1, then by gamma and beta.

    ``gamma * (x - mean) / sqrt(variance + 1e-5) + beta``, the variance being the mean
    squared deviation.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered * centered).mean(axis=-1, keepdims=True)
    normed: Floats = gamma * centered / np.sqrt(variance + LAYER_NORM_EPSILON) + beta
    return normed


def _gelu(x: Floats) -> Floats:
    """Apply GELU in its tanh form (Hendrycks and Gimpel 2016; the form GPT-2 uses).

    ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.
    """
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x * x * x)
    activated: Floats = 0.5 * x * (1.0 + np.tanh(inner))
    return activated


def _linear(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """Return ``x @ weight.T + bias``: ``(..., in)`` to ``(..., out)``.

    Written as one weighted sum per row and not as ``@``: a matrix product may add the
    terms in another order when there are more rows, and then the same row would have
    other bits in a longer pass.
    """
    rows = x.reshape(-1, x.shape[-1])
    outputs = np.stack([(weight * row).sum(axis=-1) for row in rows])
    outputs = outputs.reshape(*x.shape[:-1], len(weight))
    return outputs if bias is None else outputs + bias


def _attend(query: Floats, keys: Floats, values: Floats, additive_mask: Floats) -> Floats:
    """Return what ONE position takes from the positions it may see.

    ``query`` is ``(num_heads, head_dim)``, ``keys`` and ``values`` are
    ``(seq_len, num_heads, head_dim)``, ``additive_mask`` is ``(seq_len,)``. For each head:
    ``softmax(query . keys / sqrt(head_dim) + additive_mask)`` weighs the values.

    Masked positions are left out before anything is computed. So the result cannot
    depend on them, not even on how many they are.
    """
    visible = additive_mask > -np.inf
    keys, values = keys[visible], values[visible]
    scores = (keys * query).sum(axis=-1) / np.sqrt(query.shape[-1])
    scores = scores + additive_mask[visible][:, None]
    weights = np.exp(scores - scores.max(axis=0))
    weights = weights / weights.sum(axis=0)
    mixed: Floats = (weights[:, :, None] * values).sum(axis=0)
    return mixed


def _multi_head_attention(
    normed: Floats, block: Mapping[str, Floats], num_heads: int, additive_mask: Floats
) -> Floats:
    """Let every position attend: ``(batch, seq_len, d_model)`` to the same shape.

    Head ``h`` works on columns ``h * head_dim`` to ``(h + 1) * head_dim`` of query, key
    and value; the heads' results are laid side by side again and go through ``weight_o``.
    """
    batch, seq_len, d_model = normed.shape
    query, key, value = (
        _linear(normed, block[f"weight_{name}"], block.get(f"bias_{name}"))
        if f"weight_{name}" in block
        else normed
        for name in "qkv"
    )
    by_head = (batch, seq_len, num_heads, d_model // num_heads)
    query, key, value = query.reshape(by_head), key.reshape(by_head), value.reshape(by_head)
    mixed = np.empty(by_head)
    for row in range(batch):
        for i in range(seq_len):
            mixed[row, i] = _attend(query[row, i], key[row], value[row], additive_mask[i])
    return _linear(mixed.reshape(normed.shape), block["weight_o"], block["bias_o"])


def _feed_forward(normed: Floats, block: Mapping[str, Floats]) -> Floats:
    """Two linear layers with a GELU between them, at each position by itself."""
    inner = _gelu(_linear(normed, block["ffn_weight1"], block["ffn_bias1"]))
    return _linear(inner, block["ffn_weight2"], block["ffn_bias2"])


def _apply_block(
    hidden: Floats, block: Mapping[str, Floats], num_heads: int, additive_mask: Floats
) -> Floats:
    """Run one pre-norm block: each half norms its input and adds its output back."""
    normed = _layer_norm(hidden, block["gamma1"], block["beta1"])
    hidden = hidden + _multi_head_attention(normed, block, num_heads, additive_mask)
    normed = _layer_norm(hidden, block["gamma2"], block["beta2"])
    return hidden + _feed_forward(normed, block)


# --- The model, plain decoding, and one speculative step ----------------------------


def full_lm_forward(
    token_ids: ArrayLike,
    token_embedding_table: ArrayLike,
    blocks_params: Sequence[Block],
    num_heads: int,
    tied: bool,
    output_weight: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Floats:
    """Run the model once over whole sequences and return the logits of every position.

    Token embeddings plus sinusoidal positions go through the blocks; the last hidden
    states are compared with every token's output vector. There is no final norm.

    Args:
        token_ids: integers, ``(batch, seq_len)``, neither axis empty.
        token_embedding_table: ``(vocab_size, d_model)``.
        blocks_params: one dict per block, see the module's text; may be empty.
        num_heads: number of attention heads; must divide ``d_model``.
        tied: if true the embedding table is also the output weight, and
            ``output_weight`` is not used.
        output_weight: ``(vocab_size, d_model)``, needed if ``tied`` is false.
        mask: ``(seq_len, seq_len)``. Boolean: True where row ``i`` may attend to column
            ``j``. Float: added to the attention scores, so 0 to attend and ``-inf`` not
            to; other values must be negative. None lets every position see all the
            others; a decoder passes :func:`build_causal_mask`.

    Returns:
        Logits ``(batch, seq_len, vocab_size)`` in float64; row ``i`` scores the
        successors of token ``i``.

    Raises:
        ValueError: if an argument does not have the shape or type described here, if a
            token id is outside the vocabulary, if a weight is not finite, or if a row of
            the mask forbids every position (there is nothing to take a softmax of).
    """
    table = _checked_matrix("token_embedding_table", token_embedding_table)
    vocab_size, d_model = table.shape
    ids = _checked_token_ids(token_ids, vocab_size)
    seq_len = ids.shape[1]
    heads = _checked_num_heads(num_heads, d_model)
    blocks = [_checked_block(i, block, d_model) for i, block in enumerate(blocks_params)]
    output = table if tied else _checked_output_weight(output_weight, table.shape)
    additive_mask = _checked_additive_mask(mask, seq_len)

    hidden = table[ids] + _sinusoidal_positions(seq_len, d_model)
    for block in blocks:
        hidden = _apply_block(hidden, block, heads, additive_mask)
    return _linear(hidden, output)


def greedy_decode(
    token_ids: ArrayLike,
    token_embedding_table: ArrayLike,
    blocks_params: Sequence[Block],
    num_heads: int,
    tied: bool,
    output_weight: ArrayLike | None,
    num_new_tokens: int,
) -> TokenIds:
    """Append the model's best next token ``num_new_tokens`` times: plain decoding.

    One full forward pass per new token. Ties go to the lowest token id.

    Args:
        token_ids: integers, ``(batch, seq_len)``, neither axis empty; every row is
            continued by itself.
        token_embedding_table, blocks_params, num_heads, tied, output_weight: the model,
            as in :func:`full_lm_forward`.
        num_new_tokens: at least 0.

    Returns:
        ``(batch, seq_len + num_new_tokens)`` token ids, the given ones first.

    Raises:
        ValueError: as in :func:`full_lm_forward`, and if ``num_new_tokens`` is not an
            integer of at least 0.
    """
    table = _checked_matrix("token_embedding_table", token_embedding_table)
    sequence = _checked_token_ids(token_ids, len(table))
    for _ in range(_checked_count("num_new_tokens", num_new_tokens)):
        mask = build_causal_mask(sequence.shape[-1])
        logits = full_lm_forward(
            sequence, table, blocks_params, num_heads, tied, output_weight, mask=mask
        )
        next_tokens = np.argmax(logits[:, -1, :], axis=-1)
        sequence = np.concatenate([sequence, next_tokens[:, None]], axis=-1)
    return sequence


def speculative_decode_step(
    token_ids: ArrayLike,
    draft_embedding_table: ArrayLike,
    draft_blocks_params: Sequence[Block],
    draft_num_heads: int,
    draft_tied: bool,
    draft_output_weight: ArrayLike | None,
    target_embedding_table: ArrayLike,
    target_blocks_params: Sequence[Block],
    target_num_heads: int,
    target_tied: bool,
    target_output_weight: ArrayLike | None,
    num_draft_tokens: int,
) -> tuple[TokenIds, int]:
    """Draft, verify in one target pass, accept the agreeing prefix, correct and stop.

    The result is always a prefix of what the target's own :func:`greedy_decode` gives
    for ``num_draft_tokens`` tokens, and all of it if every draft token was accepted.
    There is no bonus token: the target's last row, which already holds its choice after
    a fully accepted draft, is not used.

    Args:
        token_ids: integers, ``(1, seq_len)`` with ``seq_len`` at least 1. One sequence
            only, since the sequences of a batch would grow by different lengths.
        draft_embedding_table, draft_blocks_params, draft_num_heads, draft_tied,
            draft_output_weight: the drafter, as in :func:`full_lm_forward`.
        target_embedding_table, target_blocks_params, target_num_heads, target_tied,
            target_output_weight: the target. It needs the same number of tokens in its
            vocabulary; width, depth and heads are its own.
        num_draft_tokens: how many tokens to draft; 0 returns the prefix unchanged.

    Returns:
        ``(accepted, num_accepted)``: the token ids ``(1, seq_len + num_accepted)``, or
        one longer if a correction was made, and the number of draft tokens accepted, in
        which the correction is not counted.

    Raises:
        ValueError: as in :func:`greedy_decode`; if there is more than one sequence; if
            the vocabularies differ in size.
    """
    seq_len = _checked_step_arguments(
        token_ids, draft_embedding_table, target_embedding_table, num_draft_tokens
    )

    draft_sequence = greedy_decode(
        token_ids,
        draft_embedding_table,
        draft_blocks_params,
        draft_num_heads,
        draft_tied,
        draft_output_weight,
        num_draft_tokens,
    )
    mask = build_causal_mask(draft_sequence.shape[-1])
    target_logits = full_lm_forward(
        draft_sequence,
        target_embedding_table,
        target_blocks_params,
        target_num_heads,
        target_tied,
        target_output_weight,
        mask=mask,
    )

    accepted = draft_sequence[:, :seq_len]
    num_accepted = 0
    for i in range(num_draft_tokens):
        draft_token = draft_sequence[0, seq_len + i]
        # Row t scores the successors of token t, so the row BEFORE the draft token.
        target_prediction = np.argmax(target_logits[0, seq_len - 1 + i, :])
        if draft_token == target_prediction:
            accepted = np.concatenate([accepted, [[draft_token]]], axis=-1)
            num_accepted += 1
        else:
            accepted = np.concatenate([accepted, [[target_prediction]]], axis=-1)
            break  # corrected; whatever follows was drafted after a wrong token
    return accepted, num_accepted


# --- Checks: what was wrong, why, and what to pass instead --------------------------


def _checked_count(name: str, value: Any) -> int:
    """Return ``value`` as an int of at least 0."""
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise ValueError(f"{name} is {value!r}, but it is a count: pass an int such as 4")
    if count < 0:
        raise ValueError(f"{name} is {count}, but a count cannot be negative: pass 0 or more")
    return count


def _checked_matrix(name: str, value: ArrayLike) -> Floats:
    """Return ``value`` as a two-dimensional float64 array, not empty, in row order."""
    matrix = _as_floats(name, value)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(
            f"{name} has shape {matrix.shape}, but it holds one vector per token: "
            "pass (vocab_size, d_model), neither of them 0"
        )
    return matrix


def _checked_token_ids(token_ids: ArrayLike, vocab_size: int) -> TokenIds:
    """Return a new ``(batch, seq_len)`` int64 array with every id in the vocabulary."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise ValueError(f"token_ids is not a rectangular array of integers: {error}") from error
    if ids.ndim != 2:
        raise ValueError(
            f"token_ids has shape {ids.shape}, but the batch axis comes first: "
            "pass (batch, seq_len), for one sequence [[7, 3, 5]]"
        )
    if ids.size == 0:
        raise ValueError(
            f"token_ids is empty, shape {ids.shape}, but the first new token needs one "
            "before it: pass at least one sequence of at least one token"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"token_ids has dtype {ids.dtype}, but ids are row numbers of the embedding "
            "table: pass integers"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"token_ids contains {bad}, but the vocabulary has {vocab_size} tokens: "
            f"pass ids from 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int64)


def _checked_num_heads(num_heads: int, d_model: int) -> int:
    """Return ``num_heads`` if that many equal heads fit the width."""
    heads = _checked_count("num_heads", num_heads)
    if heads == 0 or d_model % heads != 0:
        raise ValueError(
            f"num_heads is {heads}, but d_model is {d_model} and every head needs the same "
            f"number of columns: pass a divisor of {d_model}"
        )
    return heads


def _checked_block(index: int, block: Block, d_model: int) -> dict[str, Floats]:
    """Return the block's arrays as float64, every one present and of its shape."""
    if not isinstance(block, Mapping):
        raise ValueError(
            f"block {index} is a {type(block).__name__}, but a block's arrays are looked up "
            "by name: pass blocks_params as a list of dicts"
        )
    projected = any(key in block for key in QUERY_KEY_VALUE_WEIGHTS)
    for key in BLOCK_SHAPES:
        optional = key in QUERY_KEY_VALUE_BIASES or (
            key in QUERY_KEY_VALUE_WEIGHTS and not projected
        )
        if key not in block and not optional:
            together = " (weight_q, weight_k and weight_v: all or none)" * (key[-1] in "qkv")
            sizes = " by ".join(BLOCK_SHAPES[key])
            raise ValueError(f"block {index} has no '{key}'{together}: add it, {sizes} numbers")
        if key in block and key in QUERY_KEY_VALUE_BIASES and not projected:
            raise ValueError(
                f"block {index} has '{key}' but no 'weight_{key[-1]}', so there is nothing to "
                "add it to: pass both or neither"
            )
    arrays = {key: _as_floats(key, block[key]) for key in BLOCK_SHAPES if key in block}
    sizes_by_name = {"d_model": d_model, "d_ff": max(arrays["ffn_bias1"].size, 1)}
    for key, array in arrays.items():
        expected = tuple(sizes_by_name[name] for name in BLOCK_SHAPES[key])
        if array.shape != expected:
            raise ValueError(
                f"block {index}: '{key}' has shape {array.shape}, but d_model is {d_model} "
                f"and d_ff, the size of ffn_bias1, {sizes_by_name['d_ff']}: pass {expected}"
            )
    return arrays


def _checked_output_weight(output_weight: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
    """Return the untied output weight, one row per token of the embedding table."""
    if output_weight is None:
        raise ValueError(
            "output_weight is None, but tied is false, so there is nothing to turn hidden "
            f"states into logits: pass output_weight of shape {shape}, or tied=True"
        )
    weight = _checked_matrix("output_weight", output_weight)
    if weight.shape != shape:
        raise ValueError(
            f"output_weight has shape {weight.shape}, but the embedding table has {shape} "
            "and both hold one vector per token: pass the same shape"
        )
    return weight


def _checked_additive_mask(mask: ArrayLike | None, seq_len: int) -> Floats:
    """Return the mask as numbers to add to the scores, ``(seq_len, seq_len)``."""
    shape = (seq_len, seq_len)
    if mask is None:
        return np.zeros(shape)
    given = np.asarray(mask)
    if given.shape != shape:
        raise ValueError(
            f"mask has shape {given.shape}, but there are {seq_len} positions: pass {shape}, "
            f"for instance build_causal_mask({seq_len})"
        )
    if given.dtype == np.bool_:
        additive = np.where(given, 0.0, -np.inf)
    elif np.issubdtype(given.dtype, np.floating):
        additive = given.astype(np.float64)
    else:
        raise ValueError(
            f"mask has dtype {given.dtype}: pass booleans (True where a position may attend) "
            "or floats (0 where it may, -inf where not)"
        )
    if not (additive <= 0.0).all():
        raise ValueError(
            "mask has a float that is positive or NaN, but floats are added to the scores: "
            "pass 0 and -inf; for a mask of ones and zeros pass mask.astype(bool)"
        )
    blind = np.flatnonzero((additive == -np.inf).all(axis=-1))
    if blind.size:
        raise ValueError(
            f"mask lets position {blind[0]} attend to nothing, and a softmax over nothing "
            "is undefined: let every position attend at least to itself"
        )
    return additive


def _checked_step_arguments(
    token_ids: ArrayLike, draft_table: ArrayLike, target_table: ArrayLike, num_draft_tokens: int
) -> int:
    """Refuse what a step cannot do before any pass is paid for; return ``seq_len``."""
    draft_size = len(_checked_matrix("draft_embedding_table", draft_table))
    target_size = len(_checked_matrix("target_embedding_table", target_table))
    if draft_size != target_size:
        raise ValueError(
            f"the drafter's vocabulary has {draft_size} tokens and the target's {target_size}, "
            "but their ids are compared with each other: pass models of one vocabulary"
        )
    batch, seq_len = _checked_token_ids(token_ids, target_size).shape
    if batch != 1:
        raise ValueError(
            f"token_ids has {batch} sequences, but each would accept its own number of "
            "tokens: pass one sequence, shape (1, seq_len), and call once per sequence"
        )
    _checked_count("num_draft_tokens", num_draft_tokens)
    return int(seq_len)


def _as_floats(name: str, value: ArrayLike) -> Floats:
    """Return ``value`` as a float64 array in row order, every number finite."""
    try:
        floats = np.asarray(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if not np.isfinite(floats).all():
        raise ValueError(
            f"{name} contains NaN or infinity, from which no best token follows: pass finite "
            "weights"
        )
    return floats
