"""Single operations on arrays of others, row-invariant, shared with helper threads.

Where a whole pass is one compiled function (``_pass``), a phase can be handed from thread to thread
in a microsecond. Here the caller is code in Python that asks for one operation after another, so
the helpers stay in compiled code between two of them and look at a *mailbox*: an array of int64
that says which operation is on, and a *ticket*, its generation and the next share of it, which
threads advance by compare and exchange. A helper reads an operation's parameters only after it has
taken a share; until that share is reported done, the caller stays with the operation. So a thread
that comes late finds nothing to take, and touches nothing that may be gone.

Everything is float32. Addresses and strides in bytes. Results never depend on the number of rows
or threads: each element is one written chain of operations of its own row.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from foretell._kernel_cache import Kernel
from foretell.backends.cpu._formats import F32
from foretell.backends.cpu._kernels import (
    BLOCK,
    TILE_OUTPUTS,
    _tiles_f32,
    exp8,
    exponentials,
    inverse_rms,
    merge_block,
    weighted_values,
)
from foretell.backends.cpu._simd import (
    add8,
    atomic_add,
    atomic_load,
    atomic_replace,
    div8,
    fma8,
    give_way,
    load8,
    load8_some,
    load_f32,
    load_i64,
    max8,
    mul8,
    pause,
    splat8,
    store8,
    store_f32,
    sub8,
    sum8,
)
from foretell.backends.cpu._tiles import value_tile

_value_1x8, _value_1x1 = value_tile(1, 8, F32), value_tile(1, 1, F32)

# The mailbox, in int64 words; the first three have cache lines of their own.
TICKET, DONE, ENDED = 0, 16, 32
THREADS, GENERATION, SCRATCH, SCRATCH_SIZE = 48, 49, 50, 51
ACTIVE = 64
STAGED = 128
MAILBOX_WORDS = 192
# An operation: which, its units, the fewest units of a share, then its own parameters.
OPERATION, TOTAL, GRAIN, FIRST_PARAMETER = range(4)
NUM_PARAMETERS = 40

(LINEAR, COLUMNS, RMS_NORM, LAYER_NORM, SOFTMAX, UNARY, ROW_SUM, ATTENTION, COS_SIN) = range(9)
(SILU, GELU, GELU_TANH, SIGMOID, TANH, EXP, QUICK_GELU) = range(7)

ELEMENTS = 1024  # of a unit of an elementwise operation
STRIP = 64  # columns of a unit of COLUMNS
ROWS_AT_ONCE = 128  # activations that stay in the second-level cache
JOB_WIDTH = 8
_CLOSED = 1 << 31
_LOW = (1 << 32) - 1
_SPINS = 4000
_PATIENCE = 2_000_000  # looks at the mailbox before a helper leaves; the next pass calls it again

_zero = np.float32(0.0)
_one = np.float32(1.0)
_half = np.float32(0.5)
_two = np.float32(2.0)
_lowest = np.float32(-np.inf)


# -- rows ------------------------------------------------------------------------------------------


@njit
def _linear(first, last, rows, x, xs, w, ws, k, out, outs, bias):
    """Outputs ``first`` to ``last`` of x @ w.T + bias; x has zeros behind k to the end of a block.

    The weights of a few outputs stay in the first-level cache while all rows use them, and the
    next ones are fetched meanwhile.
    """
    groups = (rows + 3) // 4
    fewest, larger = rows // groups, rows % groups
    if groups > 1:
        size = distance = 3 if fewest == 4 else TILE_OUTPUTS
    else:
        size, distance = last - first, 3 if rows == 4 else 4
    pace = 64 // groups
    for begin in range(first, last, size):
        outputs = min(size, last - begin)
        weights = w + begin * ws
        ahead = weights + distance * ws
        row = 0
        for group in range(groups):
            count = fewest + (1 if group < larger else 0)
            _tiles_f32(
                count, outputs, x + row * xs, xs, weights, ws, k, out + row * outs + 4 * begin,
                outs, ahead, ws, pace, w + last * ws, x,
            )  # fmt: skip
            row += count
            ahead += ws // groups
    if bias != 0:
        for row in range(rows):
            base = out + row * outs
            for n in range(first, last):
                store_f32(base + 4 * n, load_f32(base + 4 * n) + load_f32(bias + 4 * n))


@njit
def _columns(strip, rows, x, xs, w, ws, k, n, out, outs, bias):
    """A strip of columns of x @ w + bias, with w (k, n): each output is one chain over k."""
    begin = strip * STRIP
    end = min(n, begin + STRIP)
    for row in range(rows):
        xr, to = x + row * xs, out + row * outs
        at = begin
        while at + 64 <= end:
            _value_1x8(xr, 0, w + 4 * at, ws, k, to + 4 * at, 0, xr, 0)
            at += 64
        while at + 8 <= end:
            _value_1x1(xr, 0, w + 4 * at, ws, k, to + 4 * at, 0, xr, 0)
            at += 8
        while at < end:
            total = _zero
            for i in range(k):
                total += load_f32(xr + 4 * i) * load_f32(w + i * ws + 4 * at)
            store_f32(to + 4 * at, total)
            at += 1
        if bias != 0:
            for i in range(begin, end):
                store_f32(to + 4 * i, load_f32(to + 4 * i) + load_f32(bias + 4 * i))


@njit
def _row_sum(x, n):
    total = splat8(_zero)
    whole = n & -8
    for i in range(0, whole, 8):
        total = add8(total, load8(x + 4 * i))
    if whole < n:
        total = add8(total, load8_some(x + 4 * whole, n - whole))
    return sum8(total)


@njit
def _rms_norm(x, weight, out, n, epsilon, offset):
    """out = x / sqrt(mean(x^2) + epsilon) * (offset + weight); weight 0: none."""
    whole = n & -8
    scale = inverse_rms(x, n, epsilon)
    scales, offsets = splat8(scale), splat8(offset)
    if weight == 0:
        for i in range(n):
            store_f32(out + 4 * i, load_f32(x + 4 * i) * scale)
        return
    for i in range(0, whole, 8):
        v = mul8(load8(x + 4 * i), scales)
        store8(out + 4 * i, mul8(v, add8(offsets, load8(weight + 4 * i))))
    for i in range(whole, n):
        v = load_f32(x + 4 * i) * scale
        store_f32(out + 4 * i, v * (offset + load_f32(weight + 4 * i)))


@njit
def _layer_norm(x, weight, bias, out, n, epsilon):
    """out = (x - mean) / sqrt(variance + epsilon) * weight + bias; 0 for either: none."""
    mean = _row_sum(x, n) / np.float32(n)
    squares = splat8(_zero)
    whole = n & -8
    means = splat8(mean)
    for i in range(0, whole, 8):
        v = sub8(load8(x + 4 * i), means)
        squares = fma8(v, v, squares)
    total = sum8(squares)
    for i in range(whole, n):
        v = load_f32(x + 4 * i) - mean
        total += v * v
    scale = _one / np.sqrt(total / np.float32(n) + epsilon)
    for i in range(n):
        v = (load_f32(x + 4 * i) - mean) * scale
        if weight != 0:
            v = v * load_f32(weight + 4 * i)
        if bias != 0:
            v = v + load_f32(bias + 4 * i)
        store_f32(out + 4 * i, v)


@njit
def _softmax(x, out, n, scratch):
    """exp(x - max) / sum; scratch holds n + 8 floats."""
    for i in range(n):
        store_f32(scratch + 4 * i, load_f32(x + 4 * i))
    _, total = exponentials(scratch, n, _one)
    for i in range(n):
        store_f32(out + 4 * i, load_f32(scratch + 4 * i) / total)


# -- functions of one element ----------------------------------------------------------------------


@njit
def _sigmoid8(v):
    return div8(splat8(_one), add8(splat8(_one), exp8(sub8(splat8(_zero), v))))


@njit
def _tanh8(v):
    """2 sigmoid(2 v) - 1"""
    return sub8(mul8(splat8(_two), _sigmoid8(mul8(splat8(_two), v))), splat8(_one))


@njit
def _gelu8(v):
    """v times the normal distribution function (Abramowitz and Stegun 7.1.26)."""
    size = max8(v, sub8(splat8(_zero), v))
    z = mul8(size, splat8(np.float32(0.7071067811865476)))
    t = div8(splat8(_one), fma8(splat8(np.float32(0.3275911)), z, splat8(_one)))
    p = splat8(np.float32(1.061405429))
    p = fma8(p, t, splat8(np.float32(-1.453152027)))
    p = fma8(p, t, splat8(np.float32(1.421413741)))
    p = fma8(p, t, splat8(np.float32(-0.284496736)))
    p = fma8(p, t, splat8(np.float32(0.254829592)))
    tail = mul8(mul8(p, t), exp8(sub8(splat8(_zero), mul8(z, z))))
    return sub8(max8(v, splat8(_zero)), mul8(mul8(size, splat8(_half)), tail))


@njit
def _gelu_tanh8(v):
    """v sigmoid(2 sqrt(2 / pi) (v + 0.044715 v^3)), which is gelu's approximation by tanh."""
    cube = mul8(mul8(v, v), v)
    u = fma8(splat8(np.float32(0.044715)), cube, v)
    return mul8(v, _sigmoid8(mul8(u, splat8(np.float32(1.5957691216057308)))))


@njit
def _apply8(kind, v):
    if kind == SILU:
        return mul8(v, _sigmoid8(v))
    if kind == GELU:
        return _gelu8(v)
    if kind == GELU_TANH:
        return _gelu_tanh8(v)
    if kind == SIGMOID:
        return _sigmoid8(v)
    if kind == TANH:
        return _tanh8(v)
    if kind == QUICK_GELU:
        return mul8(v, _sigmoid8(mul8(v, splat8(np.float32(1.702)))))
    return exp8(v)


@njit
def _unary(kind, x, out, count, scratch):
    whole = count & -8
    for i in range(0, whole, 8):
        store8(out + 4 * i, _apply8(kind, load8(x + 4 * i)))
    if whole < count:
        store8(scratch, _apply8(kind, load8_some(x + 4 * whole, count - whole)))
        for i in range(count - whole):
            store_f32(out + 4 * (whole + i), load_f32(scratch + 4 * i))


@njit
def _cos_sin(x, out, count, is_sin):
    """The cosine or sine of each, in double precision, so that it is right to the last bit."""
    for i in range(count):
        v = np.float64(load_f32(x + 4 * i))
        value = np.sin(v) if is_sin else np.cos(v)
        store_f32(out + 4 * i, np.float32(value))


# -- attention -------------------------------------------------------------------------------------
#
# Keys are (kv_heads, capacity, head_dim), values (kv_heads, capacity, value_dim padded to 8). A job
# is some rows of one session: first row, last row, keys, values, bytes from one head's keys to the
# next one's, the same of values, committed positions.


@njit
def _copy(source, target, count):
    for i in range(count):
        store_f32(target + 4 * i, load_f32(source + 4 * i))


@njit
def _attention(p, unit, scratch):
    """All heads that share a key head, for the rows of one job."""
    jobs, q, q_row, q_head, out = p[0], p[1], p[2], p[3], p[4]
    heads, kv_heads, dim, value_dim = p[5], p[6], p[7], p[8]
    positions, paths, window, sinks = p[9], p[10], p[11], p[12]
    floats = p[13]
    scale, cap = load_f32(floats), load_f32(floats + 4)
    job = jobs + 8 * JOB_WIDTH * (unit // kv_heads)
    kv_head = unit % kv_heads
    group = heads // kv_heads
    first, last = load_i64(job), load_i64(job + 8)
    keys = load_i64(job + 16) + kv_head * load_i64(job + 32)
    values = load_i64(job + 24) + kv_head * load_i64(job + 40)
    prefix = load_i64(job + 48)
    rows = last - first
    vectors = (value_dim + 7) // 8
    padded = (dim + 15) & -16
    tail = 32 * vectors
    state_size = tail + 32
    # This thread's memory: queries, states, scores, one block's result, a row's own keys, values.
    queries = scratch
    states = queries + 4 * rows * group * padded
    table = states + rows * group * state_size
    result = table + 4 * rows * group * BLOCK
    own_keys = result + state_size
    own_values = own_keys + 4 * BLOCK * dim
    lowest, highest = load_i64(positions + 8 * first), load_i64(positions + 8 * first)
    for row in range(rows):
        position = load_i64(positions + 8 * (first + row))
        lowest, highest = min(lowest, position), max(highest, position)
        for g in range(group):
            at = queries + 4 * (row * group + g) * padded
            _copy(q + (first + row) * q_row + (kv_head * group + g) * q_head, at, dim)
            for i in range(dim, padded):
                store_f32(at + 4 * i, _zero)
            state = states + (row * group + g) * state_size
            for i in range(8 * vectors):
                store_f32(state + 4 * i, _zero)
            store_f32(state + tail, _lowest)
            store_f32(state + tail + 4, _zero)
    begin = 0
    if window > 0:
        begin = max(0, lowest - window + 1) // BLOCK
    for block in range(begin, highest // BLOCK + 1):
        start = block * BLOCK
        together = load_i64(paths + 8 * first) == 0 or start + BLOCK <= prefix
        for part in range(1 if together else rows):
            low, high = (0, rows) if together else (part, part + 1)
            if together:
                k, v = keys + 4 * start * dim, values + start * tail
            else:
                own = min(BLOCK, load_i64(positions + 8 * (first + low)) + 1 - start)
                path = load_i64(paths + 8 * (first + low))
                for i in range(own):
                    slot = start + i
                    if slot >= prefix:
                        slot = load_i64(path + 8 * (slot - prefix))
                    _copy(keys + 4 * slot * dim, own_keys + 4 * i * dim, dim)
                    _copy(values + slot * tail, own_values + i * tail, 8 * vectors)
                k, v = own_keys, own_values
            count = 0
            for row in range(low, high):
                count = max(count, min(BLOCK, load_i64(positions + 8 * (first + row)) + 1 - start))
            if count <= 0:
                continue
            todo = (high - low) * group
            source, to = queries + 4 * low * group * padded, table + 4 * low * group * BLOCK
            done = 0
            while done < todo:
                some = min(4, todo - done)
                _tiles_f32(
                    some, count, source + 4 * done * padded, 4 * padded, k, 4 * dim, dim,
                    to + 4 * done * BLOCK, 4 * BLOCK, k, 4 * dim, 0, 0, k,
                )  # fmt: skip
                done += some
            for row in range(low, high):
                position = load_i64(positions + 8 * (first + row))
                own = min(BLOCK, position + 1 - start)
                hidden = max(0, position - window + 1 - start) if window > 0 else 0
                if own <= 0 or hidden >= own:
                    continue
                for g in range(group):
                    weights = table + 4 * (row * group + g) * BLOCK
                    factor = scale
                    if cap > 0:
                        _cap_scores(weights, own, scale, cap)
                        factor = _one
                    for i in range(hidden):
                        store_f32(weights + 4 * i, _lowest)
                    top, total = exponentials(weights, own, factor)
                    weighted_values(1, weights, 0, F32, v, vectors, own, result, 0, v, 0)
                    store_f32(result + tail, top)
                    store_f32(result + tail + 4, total)
                    state = states + (row * group + g) * state_size
                    if load_f32(state + tail) == _lowest:
                        _copy(result, state, state_size // 4)
                    else:
                        merge_block(state, result, vectors)
    for row in range(rows):
        for g in range(group):
            head = kv_head * group + g
            state = states + (row * group + g) * state_size
            total = load_f32(state + tail + 4)
            if sinks != 0:  # a score without a value, which every row sees last
                for i in range(8 * vectors):
                    store_f32(result + 4 * i, _zero)
                store_f32(result + tail, load_f32(sinks + 4 * head))
                store_f32(result + tail + 4, _one)
                merge_block(state, result, vectors)
                total = load_f32(state + tail + 4)
            to = out + 4 * ((first + row) * heads + head) * value_dim
            for i in range(value_dim):
                store_f32(to + 4 * i, load_f32(state + 4 * i) / total)


@njit
def _cap_scores(row, count, scale, cap):
    """row = cap tanh(row scale / cap); the row has room for whole vectors."""
    factor = splat8(scale / cap)
    for i in range(0, count, 8):
        store8(row + 4 * i, mul8(_tanh8(mul8(load8(row + 4 * i), factor)), splat8(cap)))


def attention_scratch(rows: int, group: int, dim: int, value_dim: int) -> int:
    """Floats of a thread's scratch that an attention job of ``rows`` rows needs."""
    padded, values = (dim + 15) // 16 * 16, (value_dim + 7) // 8 * 8
    state = values + 8
    return rows * group * (padded + state + BLOCK) + state + BLOCK * (dim + values) + 16


# -- the mailbox -----------------------------------------------------------------------------------


@njit
def _execute(m, thread, first, last):
    """The units ``first`` to ``last`` of the operation that is on."""
    p = m[ACTIVE + FIRST_PARAMETER : ACTIVE + NUM_PARAMETERS]
    operation = m[ACTIVE + OPERATION]
    scratch = m[SCRATCH] + thread * m[SCRATCH_SIZE]
    if operation == LINEAR or operation == COLUMNS:  # noqa: SIM109 - a tuple would be made
        rows, x, xs, w, ws, k, n = p[0], p[1], p[2], p[3], p[4], p[5], p[6]
        out, outs, bias, x_batch, w_batch, out_batch = p[7], p[8], p[9], p[10], p[11], p[12]
        units = n if operation == LINEAR else (n + STRIP - 1) // STRIP
        at = first
        while at < last:
            batch, begin = at // units, at % units
            end = min(units, begin + last - at)
            for row in range(0, rows, ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, rows - row)
                xr, to = x + batch * x_batch + row * xs, out + batch * out_batch + row * outs
                weights = w + batch * w_batch
                if operation == LINEAR:
                    _linear(begin, end, count, xr, xs, weights, ws, k, to, outs, bias)
                else:
                    for strip in range(begin, end):
                        _columns(strip, count, xr, xs, weights, ws, k, n, to, outs, bias)
            at += end - begin
    elif operation == ATTENTION:
        for unit in range(first, last):
            _attention(p, unit, scratch)
    elif operation == UNARY or operation == COS_SIN:  # noqa: SIM109
        kind, x, out, count = p[0], p[1], p[2], p[3]
        start, stop = first * ELEMENTS, min(count, last * ELEMENTS)
        if operation == UNARY:
            _unary(kind, x + 4 * start, out + 4 * start, stop - start, scratch)
        else:
            _cos_sin(x + 4 * start, out + 4 * start, stop - start, kind == 1)
    else:
        x, xs, out, outs, n, weight, bias, floats = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]
        for row in range(first, last):
            source, target = x + row * xs, out + row * outs
            if operation == RMS_NORM:
                _rms_norm(source, weight, target, n, load_f32(floats), load_f32(floats + 4))
            elif operation == LAYER_NORM:
                _layer_norm(source, weight, bias, target, n, load_f32(floats))
            elif operation == SOFTMAX:
                _softmax(source, target, n, scratch)
            else:
                store_f32(target, _row_sum(source, n))


@njit
def _work(m, address, thread):
    """Take shares of the operation that is on until none is left; whether there was any."""
    ticket = address + 8 * TICKET
    worked = False
    while True:
        found = atomic_load(ticket)
        at = found & _LOW
        total, grain = m[ACTIVE + TOTAL], max(1, m[ACTIVE + GRAIN])
        if at >= total or at >= _CLOSED:
            return worked
        share = min(total - at, max(grain, (total - at) // (2 * m[THREADS]) // grain * grain))
        if atomic_replace(ticket, found, found + share) == found:
            _execute(m, thread, at, at + share)
            atomic_add(address + 8 * DONE, share)
            worked = True


def _run_operation(m):
    """Thread 0: put the staged operation on, and return when all of it is done."""
    address = m.ctypes.data
    ticket = address + 8 * TICKET
    m[GENERATION] = (m[GENERATION] + 1) & 0x3FFFFFFF
    generation = m[GENERATION] << 32
    atomic_replace(ticket, atomic_load(ticket), generation | _CLOSED)
    for i in range(NUM_PARAMETERS):
        m[ACTIVE + i] = m[STAGED + i]
    atomic_replace(address + 8 * DONE, atomic_load(address + 8 * DONE), 0)
    atomic_replace(ticket, generation | _CLOSED, generation)
    _work(m, address, 0)
    spins = 0
    while atomic_load(address + 8 * DONE) < m[ACTIVE + TOTAL]:
        spins += 1
        if spins > _SPINS:
            give_way()
        else:
            pause()


def _serve(m, thread):
    """A helper: work on whatever is on until the caller ends the pass."""
    address = m.ctypes.data
    idle = 0
    while atomic_load(address + 8 * ENDED) == 0 and idle < _PATIENCE:
        if _work(m, address, thread):
            idle = 0
            continue
        idle += 1
        if idle > _SPINS:
            give_way()
        else:
            pause()


run_operation = Kernel(_run_operation, types.void(types.int64[::1]))
serve = Kernel(_serve, types.void(types.int64[::1], types.int64))
