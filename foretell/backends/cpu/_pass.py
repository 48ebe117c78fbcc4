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

from foretell._kernel_cache import Kernel
from foretell.backends.cpu._kernels import (
    BLOCK,
    add_bias,
    add_residual,
    copy_floats,
    exponentials,
    gather_block,
    item_size,
    linear,
    load_row,
    merge_block,
    padded,
    rms_norm,
    rms_norm_in_place,
    rotate,
    scores,
    silu_times,
    store_key_value,
    vector_padded,
    weight_row_bytes,
    weighted_values,
)
from foretell.backends.cpu._simd import (
    atomic_add,
    atomic_load,
    atomic_replace,
    cycles,
    div8,
    give_way,
    load8,
    load_f32,
    load_i64,
    pause,
    splat8,
    store8,
    store_f32,
    store_i64,
)

# What a pass is told, as positions in one int64 array: sizes, then addresses.
(
    ROWS,  # rows in this pass
    THREADS,
    NUM_LAYERS,
    HIDDEN,
    INTERMEDIATE,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    VOCAB,
    EPSILON,  # bits of a float32
    CACHE_KIND,  # how keys and values are stored
    NUM_WANTED,  # rows whose logits are wanted
    NUM_JOBS,  # attention jobs, see below
    PARTS,  # partial results a row and head has room for: 1, or one for every block
    COUNTERS,  # address of a word that thread 0 sets, then two int64 for each phase
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
    PROFILE,  # (NUM_PARTS,) processor cycles each part of a pass took; 0: not wanted
    SCRATCH,  # scratch of thread 0
    SCRATCH_SIZE,  # bytes from one thread's scratch to the next's
    NUM_PARAMETERS,
) = range(45)

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

# What ``PROFILE`` counts, each with the wait for the other threads.
PARTS_OF_A_PASS = (
    "embedding",
    "norms",
    "queries, keys, values",
    "rotary and cache",
    "attention",
    "combining blocks",
    "attention output",
    "gate and up",
    "down",
    "head",
)
_EMBEDDING, _NORMS, _QKV, _ROTARY, _ATTENTION, _COMBINING, _OUTPUT, _GATE_UP, _DOWN, _HEAD = range(
    len(PARTS_OF_A_PASS)
)

PHASES_PER_LAYER = 10
COUNTER_BYTES = 128  # a cache line for taking, one for finishing
JOB_ROWS = 8  # most rows of an attention job
VALUE_QUERIES = 4  # most queries that share a reading of values
OUTPUTS_AT_LEAST = 16  # a thread's smallest share of a layer; a multiple of 8, so that no vector
# of results belongs to two threads
PATIENCE = 20_000  # looks a helper takes for thread 0 before it leaves
SPINS = 2000  # looks at a counter before giving way to other threads


@njit
def _take(counter):
    """The next chunk of a phase, counted one by one."""
    return atomic_add(counter, 1)


@njit
def _take_share(p, counter, n, least):
    """The next of ``n`` chunks, from .. to; none are left where both are n.

    Large shares first, small ones at the end, all but the last a multiple of ``least``, a power
    of 2: a thread rarely waits for another, and works on long runs, which it fetches ahead.
    """
    first = atomic_load(counter)
    while first < n:
        share = 3 * (n - first) // (4 * p[THREADS]) & -least
        last = min(n, first + max(least, share))
        found = atomic_replace(counter, first, last)
        if found == first:
            return first, last
        first = found
    return n, n


@njit
def _finish(counter, done):
    atomic_add(counter + 64, done)


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
def _linear_phase(p, counter, layer, which, x, k, scratch):
    """Project x back to the residual stream with the layer's ``which``-th matrix, and add it."""
    rows, n = p[ROWS], p[HIDDEN]
    kind, w = load_i64(layer + 8 * (Q_KIND + which)), load_i64(layer + 8 * (Q_W + which))
    bias = load_i64(layer + 8 * (Q_BIAS + which))
    out, stride = p[PROJECTED], 4 * padded(n)
    first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    while first < n:
        linear(rows, x, 4 * padded(k), kind, w, k, first, last, out, stride, scratch, x)
        add_bias(rows, out, stride, bias, first, last)
        add_residual(rows, out, stride, p[X], stride, first, last)
        _finish(counter, last - first)
        first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    _wait(counter, n)


@njit
def _norm_phase(p, counter, weight, epsilon):
    hidden, rows = p[HIDDEN], p[ROWS]
    stride = 4 * padded(hidden)
    c = _take(counter)
    while c < rows:
        rms_norm(p[X] + c * stride, weight, p[NORMED] + c * stride, hidden, epsilon)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _qkv_phase(p, counter, layer, scratch):
    """Queries, keys and values side by side in one row."""
    rows, hidden = p[ROWS], p[HIDDEN]
    x, x_stride = p[NORMED], 4 * padded(hidden)
    q_size, kv_size = p[HEADS] * p[HEAD_DIM], p[KV_HEADS] * p[HEAD_DIM]
    out_stride = 4 * (q_size + 2 * kv_size)
    total = q_size + 2 * kv_size
    first, last = _take_share(p, counter, total, OUTPUTS_AT_LEAST)
    while first < total:
        done = last - first
        start = 0
        for which in range(3):  # the part of the share in each of the three matrices
            n = q_size if which == 0 else kv_size
            low, high = max(first, start) - start, min(last, start + n) - start
            if low < high:
                out = p[QKV] + 4 * start
                w = load_i64(layer + 8 * (Q_W + which))
                kind = load_i64(layer + 8 * (Q_KIND + which))
                bias = load_i64(layer + 8 * (Q_BIAS + which))
                linear(rows, x, x_stride, kind, w, hidden, low, high, out, out_stride, scratch, x)
                add_bias(rows, out, out_stride, bias, low, high)
            start += n
        _finish(counter, done)
        first, last = _take_share(p, counter, total, OUTPUTS_AT_LEAST)
    _wait(counter, total)


@njit
def _head_bytes(p):
    """One key head's share of a page and layer."""
    numbers = p[HEAD_DIM] + vector_padded(p[HEAD_DIM])
    return item_size(p[CACHE_KIND]) * BLOCK * numbers


@njit
def _rotary_phase(p, counter, layer, layer_offset, epsilon):
    """Normalize and rotate queries and keys, and put keys and values into the cache."""
    rows, heads, kv_heads, head_dim = p[ROWS], p[HEADS], p[KV_HEADS], p[HEAD_DIM]
    row_stride = 4 * (heads + 2 * kv_heads) * head_dim
    half = head_dim // 2
    kind = p[CACHE_KIND]
    key_size = item_size(kind) * BLOCK * head_dim
    head_size = _head_bytes(p)
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
            store_key_value(key, value, head_dim, kind, keys, keys + key_size, slot % BLOCK)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _attend_block(p, first, last, kv_head, block, keys, values, next_keys, table, scale):
    """Rows ``first`` to ``last`` of one session against one block, results to ``partials``.

    Each half of the work fetches what the next half reads: the block's values, then the keys
    at ``next_keys``. ``table`` is this thread's scratch: scores of all queries, then results.
    """
    heads, head_dim = p[HEADS], p[HEAD_DIM]
    group = heads // p[KV_HEADS]
    q_stride = 4 * head_dim
    row_stride = 4 * (heads + 2 * p[KV_HEADS]) * head_dim
    kind = p[CACHE_KIND]
    vectors = vector_padded(head_dim) // 8
    tail = 32 * vectors
    part_size = tail + 32
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
                kind,
                keys,
                head_dim,
                count,
                table + g * score_stride,
                group * score_stride,
                values,
                g,
                group,
            )
    else:
        for row in range(rows):
            scores(
                group,
                q + row * row_stride,
                q_stride,
                kind,
                keys,
                head_dim,
                count,
                table + row * group * score_stride,
                score_stride,
                values,
                row,
                rows,
            )
    results = table + rows * group * score_stride
    tiles = (group + VALUE_QUERIES - 1) // VALUE_QUERIES
    share = item_size(kind) * BLOCK * head_dim // (rows * tiles)  # of the next keys
    for row in range(rows):
        own = min(BLOCK, load_i64(p[POSITIONS] + 8 * (first + row)) + 1 - start)
        if own <= 0:
            continue
        for tile in range(tiles):
            g = VALUE_QUERIES * tile
            queries = min(group - g, VALUE_QUERIES)
            weights = table + (row * group + g) * score_stride
            slot = ((first + row) * heads + kv_head * group + g) * p[PARTS]
            if p[PARTS] > 1:
                slot += block
            states, states_stride = p[PARTIALS] + slot * part_size, p[PARTS] * part_size
            fold = p[PARTS] == 1 and block > 0
            target, stride = (results, part_size) if fold else (states, states_stride)
            for query in range(queries):
                highest, total = exponentials(weights + query * score_stride, own, scale)
                store_f32(target + query * stride + tail, highest)
                store_f32(target + query * stride + tail + 4, total)
            weighted_values(
                queries,
                weights,
                score_stride,
                kind,
                values,
                vectors,
                own,
                target,
                stride,
                next_keys + (row * tiles + tile) * share,
                share,
            )
            if fold:
                for query in range(queries):
                    merge_block(
                        states + query * states_stride, results + query * part_size, vectors
                    )


@njit
def _attend(p, job, kv_head, block, keys, following, offset, scratch, scale):
    """A job's rows against one block."""
    head_dim, kind = p[HEAD_DIM], p[CACHE_KIND]
    key_size = item_size(kind) * BLOCK * head_dim
    first, last = load_i64(job), load_i64(job + 8)
    prefix = load_i64(p[PREFIXES] + 8 * first)
    own_keys, own_values = scratch, scratch + key_size
    table = scratch + _head_bytes(p)
    if load_i64(p[PATHS] + 8 * first) == 0 or (block + 1) * BLOCK <= prefix:
        values = keys + key_size
        _attend_block(p, first, last, kv_head, block, keys, values, following, table, scale)
        return
    pages = load_i64(p[PAGES] + 8 * first)
    for row in range(first, last):  # a tree: each node has its own past
        path = load_i64(p[PATHS] + 8 * row)
        start = block * BLOCK
        count = min(BLOCK, load_i64(p[POSITIONS] + 8 * row) + 1 - start)
        gather_block(
            start, count, prefix, path, pages, offset, head_dim, kind, own_keys, own_values
        )
        _attend_block(
            p, row, row + 1, kv_head, block, own_keys, own_values, following, table, scale
        )


@njit
def _attention_phase(p, counter, layer_offset, scratch):
    """Scores and weighted values of every row, block by block.

    A job is some rows of one session and either a single block, whose results are folded later
    in order, or all blocks from the first, folded as they come: the same sums either way.
    """
    kv_heads, head_dim = p[KV_HEADS], p[HEAD_DIM]
    head_size = _head_bytes(p)
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    chunks = p[NUM_JOBS] * kv_heads
    begin, end = _take_share(p, counter, chunks, 1)
    while begin < chunks:
        for c in range(begin, end):
            job = p[JOBS] + 32 * (c // kv_heads)
            offset = layer_offset + c % kv_heads * head_size
            first_block, last_block = load_i64(job + 16), load_i64(job + 24)
            pages = load_i64(p[PAGES] + 8 * load_i64(job))
            for block in range(first_block, last_block):
                keys = load_i64(pages + 8 * block) + offset
                if block + 1 < last_block:
                    following = load_i64(pages + 8 * (block + 1)) + offset
                elif c + 1 < end:
                    job_after = p[JOBS] + 32 * ((c + 1) // kv_heads)
                    pages_after = load_i64(p[PAGES] + 8 * load_i64(job_after))
                    following = load_i64(pages_after + 8 * load_i64(job_after + 16))
                    following += layer_offset + (c + 1) % kv_heads * head_size
                else:
                    following = keys
                _attend(p, job, c % kv_heads, block, keys, following, offset, scratch, scale)
        _finish(counter, end - begin)
        begin, end = _take_share(p, counter, chunks, 1)
    _wait(counter, chunks)


@njit
def _combine_phase(p, counter):
    """Fold each row's blocks, left to right, and divide by the sum of the weights."""
    rows, heads, head_dim = p[ROWS], p[HEADS], p[HEAD_DIM]
    vectors = vector_padded(head_dim) // 8
    tail = 32 * vectors
    part_size = tail + 32
    whole = head_dim & -8
    chunks = rows * heads
    c = _take(counter)
    while c < chunks:
        row, head = c // heads, c % heads
        state = p[PARTIALS] + c * p[PARTS] * part_size
        if p[PARTS] > 1:
            blocks = load_i64(p[POSITIONS] + 8 * row) // BLOCK + 1
            for block in range(1, blocks):
                merge_block(state, state + block * part_size, vectors)
        total = load_f32(state + tail + 4)
        out = p[ATTENTION] + 4 * (row * padded(heads * head_dim) + head * head_dim)
        divisor = splat8(total)
        for d in range(0, whole, 8):
            store8(out + 4 * d, div8(load8(state + 4 * d), divisor))
        for d in range(whole, head_dim):
            store_f32(out + 4 * d, load_f32(state + 4 * d) / total)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, chunks)


@njit
def _gate_up_phase(p, counter, layer, scratch):
    """gate = silu(x @ gate.T) * (x @ up.T)"""
    rows, hidden, n = p[ROWS], p[HIDDEN], p[INTERMEDIATE]
    x, x_stride, stride = p[NORMED], 4 * padded(hidden), 4 * padded(n)
    gate_kind, up_kind = load_i64(layer + 8 * GATE_KIND), load_i64(layer + 8 * UP_KIND)
    gate, up = load_i64(layer + 8 * GATE_W), load_i64(layer + 8 * UP_W)
    gate_bias, up_bias = load_i64(layer + 8 * GATE_BIAS), load_i64(layer + 8 * UP_BIAS)
    first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    while first < n:
        then = up + first * weight_row_bytes(up_kind, hidden)
        linear(
            rows, x, x_stride, gate_kind, gate, hidden, first, last, p[GATE], stride, scratch, then
        )
        add_bias(rows, p[GATE], stride, gate_bias, first, last)
        linear(rows, x, x_stride, up_kind, up, hidden, first, last, p[UP], stride, scratch, x)
        add_bias(rows, p[UP], stride, up_bias, first, last)
        for row in range(rows):
            silu_times(p[GATE] + row * stride, p[UP] + row * stride, first, last)
        _finish(counter, last - first)
        first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    _wait(counter, n)


@njit
def _embedding_phase(p, counter):
    rows, hidden = p[ROWS], p[HIDDEN]
    kind = p[EMBEDDING_KIND]
    row_bytes = weight_row_bytes(kind, hidden)
    c = _take(counter)
    while c < rows:
        token = load_i64(p[TOKENS] + 8 * c)
        x = p[X] + 4 * c * padded(hidden)
        load_row(kind, p[EMBEDDING] + token * row_bytes, hidden, x)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _hidden_phase(p, counter, target):
    """Copy the residual stream out."""
    rows, hidden = p[ROWS], p[HIDDEN]
    c = _take(counter)
    while c < rows:
        copy_floats(p[X] + 4 * c * padded(hidden), target + 4 * c * hidden, hidden)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, rows)


@njit
def _head_phases(p, counter, epsilon, scratch):
    """The final norm of the wanted rows, and their logits."""
    wanted, hidden = p[NUM_WANTED], p[HIDDEN]
    stride = 4 * padded(hidden)
    c = _take(counter)
    while c < wanted:
        row = load_i64(p[WANTED] + 8 * c)
        rms_norm(p[X] + row * stride, p[FINAL_NORM], p[NORMED] + c * stride, hidden, epsilon)
        _finish(counter, 1)
        c = _take(counter)
    _wait(counter, wanted)
    counter += COUNTER_BYTES
    kind, n = p[HEAD_KIND], p[VOCAB]
    first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    while first < n:
        linear(
            wanted,
            p[NORMED],
            stride,
            kind,
            p[HEAD],
            hidden,
            first,
            last,
            p[LOGITS],
            4 * n,
            scratch,
            p[NORMED],
        )
        _finish(counter, last - first)
        first, last = _take_share(p, counter, n, OUTPUTS_AT_LEAST)
    _wait(counter, n)


@njit
def _lap(p, thread, part, since):
    """Count the cycles since ``since`` for a part of the pass; returns the time now."""
    if p[PROFILE] == 0 or thread != 0:
        return since
    now = cycles()
    at = p[PROFILE] + 8 * part
    store_i64(at, load_i64(at) + now - since)
    return now


@njit
def _has_begun(word, thread):
    """Whether thread 0 is here; helpers wait for it a little.

    Thread 0 may never come: it was interrupted before it could, and what the pass works on is no
    more. It cannot be interrupted in here.
    """
    if thread == 0:
        atomic_add(word, 1)
        return True
    for look in range(PATIENCE):
        if atomic_load(word) != 0:
            return True
        if look > SPINS:
            give_way()
        else:
            pause()
    return False


def _run_pass(p, thread):
    """The whole pass as one ``thread`` sees it; all threads call this with the same p."""
    if not _has_begun(p[COUNTERS], thread):
        return
    scratch = p[SCRATCH] + thread * p[SCRATCH_SIZE]
    epsilon = load_f32(p.ctypes.data + 8 * EPSILON)
    counter = p[COUNTERS] + COUNTER_BYTES
    layer_size = p[KV_HEADS] * _head_bytes(p)
    time = cycles()
    _embedding_phase(p, counter)
    time = _lap(p, thread, _EMBEDDING, time)
    counter += COUNTER_BYTES
    for index in range(p[NUM_LAYERS]):
        layer = p[LAYERS] + index * 8 * LAYER_WIDTH
        _norm_phase(p, counter, load_i64(layer + 8 * NORM_1), epsilon)
        time = _lap(p, thread, _NORMS, time)
        _qkv_phase(p, counter + COUNTER_BYTES, layer, scratch)
        time = _lap(p, thread, _QKV, time)
        _rotary_phase(p, counter + 2 * COUNTER_BYTES, layer, index * layer_size, epsilon)
        time = _lap(p, thread, _ROTARY, time)
        _attention_phase(p, counter + 3 * COUNTER_BYTES, index * layer_size, scratch)
        time = _lap(p, thread, _ATTENTION, time)
        _combine_phase(p, counter + 4 * COUNTER_BYTES)
        time = _lap(p, thread, _COMBINING, time)
        attention_width = p[HEADS] * p[HEAD_DIM]
        _linear_phase(
            p, counter + 5 * COUNTER_BYTES, layer, 3, p[ATTENTION], attention_width, scratch
        )
        time = _lap(p, thread, _OUTPUT, time)
        _norm_phase(p, counter + 6 * COUNTER_BYTES, load_i64(layer + 8 * NORM_2), epsilon)
        time = _lap(p, thread, _NORMS, time)
        _gate_up_phase(p, counter + 7 * COUNTER_BYTES, layer, scratch)
        time = _lap(p, thread, _GATE_UP, time)
        _linear_phase(p, counter + 8 * COUNTER_BYTES, layer, 6, p[GATE], p[INTERMEDIATE], scratch)
        time = _lap(p, thread, _DOWN, time)
        hidden_out = load_i64(p[HIDDEN_OUT] + 8 * index)
        if hidden_out != 0:
            _hidden_phase(p, counter + 9 * COUNTER_BYTES, hidden_out)
        counter += PHASES_PER_LAYER * COUNTER_BYTES
    time = cycles()
    _head_phases(p, counter, epsilon, scratch)
    _lap(p, thread, _HEAD, time)


run_pass = Kernel(_run_pass, types.void(types.int64[::1], types.int64))
