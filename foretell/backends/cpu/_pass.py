"""One forward pass over all layers, run by every thread of the pool together.

A layer is a handful of phases. A phase is cut into chunks, threads take chunks from a counter
until none is left, and nobody enters the next phase before all chunks of this one are finished.
So a thread that comes late, or never, delays nothing but its own share, and no result depends on
who computed what. The counters belong to one pass: a straggler from an earlier pass finds all of
them exhausted and leaves without touching anything else.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from foretell.backends.cpu._kernel_cache import Kernel
from foretell.backends.cpu._kernels import (
    BLOCK,
    add_bias,
    add_residual,
    copy_floats,
    exponentials,
    gather_block,
    linear,
    load_row,
    merge_block,
    rms_norm,
    rms_norm_in_place,
    rotate,
    scores,
    silu_times,
    store_key_value,
    weight_row_bytes,
    weighted_values,
)
from foretell.backends.cpu._simd import (
    atomic_add,
    atomic_load,
    div8,
    give_way,
    load8,
    load_f32,
    load_i64,
    pause,
    splat8,
    store8,
    store_f32,
)

# What a pass is told, as positions in one int64 array: sizes, then addresses.
(
    ROWS,  # rows in this pass
    NUM_LAYERS,
    HIDDEN,
    INTERMEDIATE,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    VOCAB,
    EPSILON,  # bits of a float32
    NUM_WANTED,  # rows whose logits are wanted
    NUM_JOBS,  # attention jobs, see below
    PARTS,  # partial results a row and head has room for: 1, or one for every block
    COUNTERS,  # address of two int64 on cache lines of their own for each phase
    LAYERS,  # address of the table of the layers' weights (num_layers, LAYER_WIDTH)
    EMBEDDING,
    EMBEDDING_KIND,
    FINAL_NORM,
    HEAD,
    HEAD_KIND,
    TOKENS,  # (rows,) token ids
    POSITIONS,  # (rows,) logical positions
    SLOTS,  # (rows,) where a row's key and value go
    PREFIXES,  # (rows,) committed positions of the row's session
    PATHS,  # (rows,) address of the slots of positions prefix..own; 0: position = slot
    PAGES,  # (rows,) address of the page addresses of the row's session
    WANTED,  # (num_wanted,) rows whose logits are wanted
    JOBS,  # (num_jobs, 4): first row, last row, first block, last block of one session
    COS,  # (positions, head_dim / 2)
    SIN,
    X,  # (rows, hidden) the residual stream
    NORMED,  # (rows, hidden)
    QKV,  # (rows, q + k + v)
    ATTENTION,  # (rows, heads x head_dim)
    GATE,  # (rows, intermediate)
    UP,  # (rows, intermediate)
    PROJECTED,  # (rows, hidden)
    PARTIALS,  # (rows, heads, parts, padded head_dim + 8)
    LOGITS,  # (num_wanted, vocab)
    HIDDEN_OUT,  # (num_layers,) where to put a layer's output, 0: nowhere
    SCRATCH,  # scratch of thread 0
    SCRATCH_SIZE,  # bytes from one thread's scratch to the next's
    NUM_PARAMETERS,
) = range(42)

# Columns of the table of weights: addresses, and for matrices how they are stored.
(
    NORM_1,
    NORM_2,
    Q_NORM,
    K_NORM,
    Q_W,
    K_W,
    V_W,
    O_W,
    GATE_W,
    UP_W,
    DOWN_W,
    Q_KIND,
    K_KIND,
    V_KIND,
    O_KIND,
    GATE_KIND,
    UP_KIND,
    DOWN_KIND,
    Q_BIAS,
    K_BIAS,
    V_BIAS,
    O_BIAS,
    GATE_BIAS,
    UP_BIAS,
    DOWN_BIAS,
    LAYER_WIDTH,
) = range(26)

PHASES_PER_LAYER = 10
COUNTER_BYTES = 128  # a cache line for taking, one for finishing
JOB_ROWS = 8  # most rows of an attention job
CHUNK_BYTES = 80_000  # weights in a chunk of a linear layer
SPINS = 2000  # looks at a counter before giving way to other threads


@njit
def _take(counter):
    return atomic_add(counter, 1)


@njit
def _finish(counter):
    atomic_add(counter + 64, 1)


@njit
def _wait(counter, chunks):
    """Until all chunks of the phase are finished."""
    spins = 0
    while atomic_load(counter + 64) < chunks:
        spins += 1
        if spins > SPINS:
            give_way()
        else:
            pause()


@njit
def _chunk_outputs(kind, k, outputs):
    """Outputs in a chunk: few enough to share, many enough to be worth taking.

    A multiple of 8, so that no vector of results belongs to two chunks.
    """
    share = max(1, outputs // 8) if outputs < 1024 else outputs // 16
    count = min(CHUNK_BYTES // weight_row_bytes(kind, k), share)
    return max(8, count & -8)


@njit
def _padded(n):
    return (n + 7) & -8


@njit
def _linear_phase(p, counter, x, k, kind, w, bias, n, out, out_stride, scratch, residual):
    """out = x @ w.T + bias, and x_residual += out where ``residual`` is its address."""
    rows = p[ROWS]
    size = _chunk_outputs(kind, k, n)
    chunks = (n + size - 1) // size
    c = _take(counter)
    while c < chunks:
        first = c * size
        last = min(n, first + size)
        linear(rows, x, 4 * _padded(k), kind, w, k, first, last, out, out_stride, scratch)
        add_bias(rows, out, out_stride, bias, first, last)
        if residual != 0:
            add_residual(rows, out, out_stride, residual, 4 * _padded(p[HIDDEN]), first, last)
        _finish(counter)
        c = _take(counter)
    _wait(counter, chunks)


@njit
def _norm_phase(p, counter, weight, epsilon):
    hidden, rows = p[HIDDEN], p[ROWS]
    stride = 4 * _padded(hidden)
    c = _take(counter)
    while c < rows:
        rms_norm(p[X] + c * stride, weight, p[NORMED] + c * stride, hidden, epsilon)
        _finish(counter)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _qkv_phase(p, counter, layer, scratch):
    """Queries, keys and values side by side in one row."""
    rows, hidden = p[ROWS], p[HIDDEN]
    x, x_stride = p[NORMED], 4 * _padded(hidden)
    q_size, kv_size = p[HEADS] * p[HEAD_DIM], p[KV_HEADS] * p[HEAD_DIM]
    out_stride = 4 * (q_size + 2 * kv_size)
    size = _chunk_outputs(load_i64(layer + 8 * Q_KIND), hidden, q_size)
    q_chunks = (q_size + size - 1) // size
    kv_chunks = (kv_size + size - 1) // size
    chunks = q_chunks + 2 * kv_chunks
    c = _take(counter)
    while c < chunks:
        if c < q_chunks:
            which, index, n, out = 0, c, q_size, p[QKV]
        elif c < q_chunks + kv_chunks:
            which, index, n, out = 1, c - q_chunks, kv_size, p[QKV] + 4 * q_size
        else:
            which, index, n = 2, c - q_chunks - kv_chunks, kv_size
            out = p[QKV] + 4 * (q_size + kv_size)
        first = index * size
        last = min(n, first + size)
        w = load_i64(layer + 8 * (Q_W + which))
        kind = load_i64(layer + 8 * (Q_KIND + which))
        linear(rows, x, x_stride, kind, w, hidden, first, last, out, out_stride, scratch)
        bias = load_i64(layer + 8 * (Q_BIAS + which))
        add_bias(rows, out, out_stride, bias, first, last)
        _finish(counter)
        c = _take(counter)
    _wait(counter, chunks)


@njit
def _rotary_phase(p, counter, layer, layer_offset, epsilon):
    """Normalize and rotate queries and keys, and put keys and values into the cache."""
    rows, heads, kv_heads, head_dim = p[ROWS], p[HEADS], p[KV_HEADS], p[HEAD_DIM]
    row_stride = 4 * (heads + 2 * kv_heads) * head_dim
    half = head_dim // 2
    value_stride = 4 * _padded(head_dim)
    key_size = 4 * BLOCK * head_dim
    head_size = key_size + BLOCK * value_stride
    q_norm, k_norm = load_i64(layer + 8 * Q_NORM), load_i64(layer + 8 * K_NORM)
    c = _take(counter)
    while c < rows:
        row = p[QKV] + c * row_stride
        position = load_i64(p[POSITIONS] + 8 * c)
        cos, sin = p[COS] + 4 * half * position, p[SIN] + 4 * half * position
        slot = load_i64(p[SLOTS] + 8 * c)
        page = load_i64(load_i64(p[PAGES] + 8 * c) + 8 * (slot // BLOCK)) + layer_offset
        for head in range(heads + kv_heads):
            x = row + 4 * head * head_dim
            norm = q_norm if head < heads else k_norm
            if norm != 0:
                rms_norm_in_place(x, norm, head_dim, epsilon)
            rotate(x, cos, sin, half)
        for head in range(kv_heads):
            key = row + 4 * (heads + head) * head_dim
            value = row + 4 * (heads + kv_heads + head) * head_dim
            keys = page + head * head_size
            store_key_value(key, value, head_dim, keys, keys + key_size, value_stride, slot % BLOCK)
        _finish(counter)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _attend_block(p, first, last, kv_head, block, keys, values, table, scale):
    """Rows ``first`` to ``last`` of one session against one block, results to ``partials``.

    ``table`` is this thread's scratch: scores of all queries, then one block's result.
    """
    heads, head_dim = p[HEADS], p[HEAD_DIM]
    group = heads // p[KV_HEADS]
    q_stride = 4 * head_dim
    row_stride = 4 * (heads + 2 * p[KV_HEADS]) * head_dim
    value_stride = 4 * _padded(head_dim)
    vectors = value_stride // 32
    part_size = value_stride + 32
    start = block * BLOCK
    rows = last - first
    count = min(BLOCK, load_i64(p[POSITIONS] + 8 * first) + 1 - start)
    for row in range(first + 1, last):
        count = max(count, min(BLOCK, load_i64(p[POSITIONS] + 8 * row) + 1 - start))
    if count <= 0:
        return
    q = p[QKV] + first * row_stride + kv_head * group * q_stride
    score_stride = 4 * BLOCK
    # Batch over rows or over the heads that share these keys, whichever are more.
    if rows > group:
        for g in range(group):
            scores(
                rows,
                q + g * q_stride,
                row_stride,
                keys,
                head_dim,
                count,
                table + g * score_stride,
                group * score_stride,
            )
    else:
        for row in range(rows):
            scores(
                group,
                q + row * row_stride,
                q_stride,
                keys,
                head_dim,
                count,
                table + row * group * score_stride,
                score_stride,
            )
    result = table + rows * group * score_stride
    for row in range(rows):
        own = min(BLOCK, load_i64(p[POSITIONS] + 8 * (first + row)) + 1 - start)
        if own <= 0:
            continue
        for g in range(group):
            weights = table + (row * group + g) * score_stride
            highest, total = exponentials(weights, own, scale)
            head = kv_head * group + g
            slot = ((first + row) * heads + head) * p[PARTS]
            if p[PARTS] > 1:
                slot += block
            state = p[PARTIALS] + slot * part_size
            fold = p[PARTS] == 1 and block > 0
            target = result if fold else state
            weighted_values(weights, values, value_stride, own, target)
            store_f32(target + value_stride, highest)
            store_f32(target + value_stride + 4, total)
            if fold:
                merge_block(state, result, vectors)


@njit
def _attention_phase(p, counter, layer_offset, scratch):
    """Scores and weighted values of every row, block by block.

    A job is some rows of one session and either a single block, whose results are folded later
    in order, or all blocks from the first, folded as they come: the same sums either way.
    """
    kv_heads, head_dim = p[KV_HEADS], p[HEAD_DIM]
    value_stride = 4 * _padded(head_dim)
    key_size = 4 * BLOCK * head_dim
    head_size = key_size + BLOCK * value_stride
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    own_keys, own_values = scratch, scratch + key_size
    table = scratch + head_size
    chunks = p[NUM_JOBS] * kv_heads
    c = _take(counter)
    while c < chunks:
        job = p[JOBS] + 32 * (c // kv_heads)
        kv_head = c % kv_heads
        offset = layer_offset + kv_head * head_size
        first, last = load_i64(job), load_i64(job + 8)
        pages = load_i64(p[PAGES] + 8 * first)
        prefix = load_i64(p[PREFIXES] + 8 * first)
        for block in range(load_i64(job + 16), load_i64(job + 24)):
            in_order = load_i64(p[PATHS] + 8 * first) == 0 or (block + 1) * BLOCK <= prefix
            if in_order:
                keys = load_i64(pages + 8 * block) + offset
                _attend_block(p, first, last, kv_head, block, keys, keys + key_size, table, scale)
            else:  # a tree: each node has its own past
                for row in range(first, last):
                    path = load_i64(p[PATHS] + 8 * row)
                    start = block * BLOCK
                    count = min(BLOCK, load_i64(p[POSITIONS] + 8 * row) + 1 - start)
                    gather_block(
                        start,
                        count,
                        prefix,
                        path,
                        pages,
                        offset,
                        head_dim,
                        value_stride,
                        own_keys,
                        own_values,
                    )
                    _attend_block(
                        p, row, row + 1, kv_head, block, own_keys, own_values, table, scale
                    )
        _finish(counter)
        c = _take(counter)
    _wait(counter, chunks)


@njit
def _combine_phase(p, counter):
    """Fold each row's blocks, left to right, and divide by the sum of the weights."""
    rows, heads, head_dim = p[ROWS], p[HEADS], p[HEAD_DIM]
    value_stride = 4 * _padded(head_dim)
    vectors = value_stride // 32
    part_size = value_stride + 32
    whole = head_dim & -8
    c = _take(counter)
    while c < rows:
        blocks = load_i64(p[POSITIONS] + 8 * c) // BLOCK + 1
        for head in range(heads):
            state = p[PARTIALS] + (c * heads + head) * p[PARTS] * part_size
            if p[PARTS] > 1:
                for block in range(1, blocks):
                    merge_block(state, state + block * part_size, vectors)
            total = load_f32(state + value_stride + 4)
            out = p[ATTENTION] + 4 * (c * _padded(heads * head_dim) + head * head_dim)
            divisor = splat8(total)
            for d in range(0, whole, 8):
                store8(out + 4 * d, div8(load8(state + 4 * d), divisor))
            for d in range(whole, head_dim):
                store_f32(out + 4 * d, load_f32(state + 4 * d) / total)
        _finish(counter)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _gate_up_phase(p, counter, layer, scratch):
    """gate = silu(x @ gate.T) * (x @ up.T)"""
    rows, hidden, n = p[ROWS], p[HIDDEN], p[INTERMEDIATE]
    x, x_stride, stride = p[NORMED], 4 * _padded(hidden), 4 * _padded(n)
    gate_kind, up_kind = load_i64(layer + 8 * GATE_KIND), load_i64(layer + 8 * UP_KIND)
    gate, up = load_i64(layer + 8 * GATE_W), load_i64(layer + 8 * UP_W)
    gate_bias, up_bias = load_i64(layer + 8 * GATE_BIAS), load_i64(layer + 8 * UP_BIAS)
    size = _chunk_outputs(gate_kind, 2 * hidden, n)
    chunks = (n + size - 1) // size
    c = _take(counter)
    while c < chunks:
        first = c * size
        last = min(n, first + size)
        linear(rows, x, x_stride, gate_kind, gate, hidden, first, last, p[GATE], stride, scratch)
        add_bias(rows, p[GATE], stride, gate_bias, first, last)
        linear(rows, x, x_stride, up_kind, up, hidden, first, last, p[UP], stride, scratch)
        add_bias(rows, p[UP], stride, up_bias, first, last)
        for row in range(rows):
            silu_times(p[GATE] + row * stride, p[UP] + row * stride, first, last)
        _finish(counter)
        c = _take(counter)
    _wait(counter, chunks)


@njit
def _embedding_phase(p, counter):
    rows, hidden = p[ROWS], p[HIDDEN]
    kind = p[EMBEDDING_KIND]
    row_bytes = weight_row_bytes(kind, hidden)
    c = _take(counter)
    while c < rows:
        token = load_i64(p[TOKENS] + 8 * c)
        x = p[X] + 4 * c * _padded(hidden)
        load_row(kind, p[EMBEDDING] + token * row_bytes, hidden, x)
        _finish(counter)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _hidden_phase(p, counter, target):
    """Copy the residual stream out."""
    rows, hidden = p[ROWS], p[HIDDEN]
    c = _take(counter)
    while c < rows:
        copy_floats(p[X] + 4 * c * _padded(hidden), target + 4 * c * hidden, hidden)
        _finish(counter)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _head_phases(p, counter, epsilon, scratch):
    """The final norm of the wanted rows, and their logits."""
    wanted, hidden = p[NUM_WANTED], p[HIDDEN]
    stride = 4 * _padded(hidden)
    c = _take(counter)
    while c < wanted:
        row = load_i64(p[WANTED] + 8 * c)
        rms_norm(p[X] + row * stride, p[FINAL_NORM], p[NORMED] + c * stride, hidden, epsilon)
        _finish(counter)
        c = _take(counter)
    _wait(counter, wanted)
    counter += COUNTER_BYTES
    kind, n = p[HEAD_KIND], p[VOCAB]
    size = _chunk_outputs(kind, hidden, n)
    chunks = (n + size - 1) // size
    c = _take(counter)
    while c < chunks:
        first = c * size
        last = min(n, first + size)
        linear(
            wanted, p[NORMED], stride, kind, p[HEAD], hidden, first, last, p[LOGITS], 4 * n, scratch
        )
        _finish(counter)
        c = _take(counter)
    _wait(counter, chunks)


def _run_pass(p, thread):
    """The whole pass as one ``thread`` sees it; all threads call this with the same p."""
    scratch = p[SCRATCH] + thread * p[SCRATCH_SIZE]
    epsilon = load_f32(p.ctypes.data + 8 * EPSILON)
    counter = p[COUNTERS]
    value_stride = 4 * _padded(p[HEAD_DIM])
    layer_size = p[KV_HEADS] * BLOCK * (4 * p[HEAD_DIM] + value_stride)
    hidden, hidden_stride = p[HIDDEN], 4 * _padded(p[HIDDEN])
    q_size = p[HEADS] * p[HEAD_DIM]
    _embedding_phase(p, counter)
    counter += COUNTER_BYTES
    for index in range(p[NUM_LAYERS]):
        layer = p[LAYERS] + index * 8 * LAYER_WIDTH
        _norm_phase(p, counter, load_i64(layer + 8 * NORM_1), epsilon)
        _qkv_phase(p, counter + COUNTER_BYTES, layer, scratch)
        _rotary_phase(p, counter + 2 * COUNTER_BYTES, layer, index * layer_size, epsilon)
        _attention_phase(p, counter + 3 * COUNTER_BYTES, index * layer_size, scratch)
        _combine_phase(p, counter + 4 * COUNTER_BYTES)
        _linear_phase(
            p,
            counter + 5 * COUNTER_BYTES,
            p[ATTENTION],
            q_size,
            load_i64(layer + 8 * O_KIND),
            load_i64(layer + 8 * O_W),
            load_i64(layer + 8 * O_BIAS),
            hidden,
            p[PROJECTED],
            hidden_stride,
            scratch,
            p[X],
        )
        _norm_phase(p, counter + 6 * COUNTER_BYTES, load_i64(layer + 8 * NORM_2), epsilon)
        _gate_up_phase(p, counter + 7 * COUNTER_BYTES, layer, scratch)
        _linear_phase(
            p,
            counter + 8 * COUNTER_BYTES,
            p[GATE],
            p[INTERMEDIATE],
            load_i64(layer + 8 * DOWN_KIND),
            load_i64(layer + 8 * DOWN_W),
            load_i64(layer + 8 * DOWN_BIAS),
            hidden,
            p[PROJECTED],
            hidden_stride,
            scratch,
            p[X],
        )
        hidden_out = load_i64(p[HIDDEN_OUT] + 8 * index)
        if hidden_out != 0:
            _hidden_phase(p, counter + 9 * COUNTER_BYTES, hidden_out)
        counter += PHASES_PER_LAYER * COUNTER_BYTES
    _head_phases(p, counter, epsilon, scratch)


run_pass = Kernel(_run_pass, types.void(types.int64[::1], types.int64))
