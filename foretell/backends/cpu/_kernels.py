"""The arithmetic of a decoder layer, a row at a time.

Row invariance: nothing here depends on how many rows there are, which thread runs them, or how
they were cut into passes. Every sum has one written order (see ``_simd``), and what a row reads
of the cache it reads in blocks aligned to position 0 of its sequence.

All arguments called ``x``, ``out``, ... are addresses; strides and offsets count bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from foretell.backends.cpu._formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    PLAIN,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
)
from foretell.backends.cpu._ir import has_32_registers
from foretell.backends.cpu._simd import (
    add8,
    div8,
    exp2_integer8,
    float_bits,
    fma8,
    load8,
    load8_some,
    load_f32,
    load_i64,
    load_u16,
    max8,
    maximum8,
    min8,
    mul8,
    round8,
    splat8,
    store8,
    store_f32,
    store_u16,
    sub8,
    sum8,
    zero_below8,
)
from foretell.backends.cpu._tiles import dot_tile, score_tile, unpack_row, value_tile

BLOCK = 64
"""Positions in a block of keys: one page of the cache, and the unit of attention's sums."""
GROUP = 8  # keys side by side in a vector
GROUP_ROWS = 8 if has_32_registers() else 7  # rows that share one reading of stored weights
TILE_OUTPUTS = 4  # outputs whose weights stay in the first-level cache while all rows use them

_zero = np.float32(0.0)
_one = np.float32(1.0)
_lowest = np.float32(-np.inf)

# -- linear layers ---------------------------------------------------------------------------------


def _make_tiles(kind):
    """``tiles(rows, outputs, ...)``: some rows against any number of outputs of one kind.

    Shapes are what the vector registers hold: of 4 rows at most, or, for weights that take
    much work to read, of up to GROUP_ROWS.
    """
    tile_1x4, tile_2x4, tile_3x4, tile_4x3 = (
        dot_tile(rows, outputs, kind) for rows, outputs in ((1, 4), (2, 4), (3, 4), (4, 3))
    )
    tile_1x1, tile_2x1, tile_3x1, tile_4x1 = (dot_tile(rows, 1, kind) for rows in (1, 2, 3, 4))

    @njit
    def up_to_4(rows, outputs, x, xs, w, ws, k, out, outs, ahead, aheads, pace, stop, then):
        n = 0
        while n < outputs:
            fetched = ahead if ahead < stop else then
            if rows == 4 and n + 3 <= outputs:
                tile_4x3(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                step = 3
            elif rows < 4 and n + 4 <= outputs:
                if rows == 3:
                    tile_3x4(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                elif rows == 2:
                    tile_2x4(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                else:
                    tile_1x4(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                step = 4
            else:
                if rows == 4:
                    tile_4x1(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                elif rows == 3:
                    tile_3x1(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                elif rows == 2:
                    tile_2x1(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                else:
                    tile_1x1(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
                step = 1
            n, w, out, ahead = n + step, w + step * ws, out + 4 * step, ahead + step * aheads

    if kind in PLAIN:
        return up_to_4

    tile_5x2, tile_6x2, tile_7x2, tile_8x2 = (dot_tile(rows, 2, kind) for rows in (5, 6, 7, 8))

    @njit
    def tiles(rows, outputs, x, xs, w, ws, k, out, outs, ahead, aheads, pace, stop, then):
        if rows <= 4:
            up_to_4(rows, outputs, x, xs, w, ws, k, out, outs, ahead, aheads, pace, stop, then)
            return
        for _ in range(outputs // 2):
            fetched = ahead if ahead < stop else then
            if rows == 5:
                tile_5x2(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
            elif rows == 6:
                tile_6x2(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
            elif rows == 7:
                tile_7x2(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
            else:
                tile_8x2(x, xs, w, ws, k, out, outs, fetched, aheads, pace)
            w, out, ahead = w + 2 * ws, out + 8, ahead + 2 * aheads
        if outputs % 2:
            up_to_4(4, 1, x, xs, w, ws, k, out, outs, then, 0, 0, stop, then)
            x, out = x + 4 * xs, out + 4 * outs
            up_to_4(rows - 4, 1, x, xs, w, ws, k, out, outs, then, 0, 0, stop, then)

    return tiles


_tiles_f32, _tiles_bf16, _tiles_f16 = (_make_tiles(kind) for kind in (F32, BF16, F16))
_tiles_q8_0, _tiles_q4_0, _tiles_q4_1 = (_make_tiles(kind) for kind in (Q8_0, Q4_0, Q4_1))
_unpack_f32, _unpack_bf16, _unpack_f16 = (unpack_row(kind) for kind in (F32, BF16, F16))
_unpack_q8_0, _unpack_q4_0, _unpack_q4_1 = (unpack_row(kind) for kind in (Q8_0, Q4_0, Q4_1))
_unpack_q4_k, _unpack_q5_k, _unpack_q6_k = (unpack_row(kind) for kind in (Q4_K, Q5_K, Q6_K))

_ELEMENTS = np.array([stored.elements for stored in FORMATS])
_SIZES = np.array([stored.size for stored in FORMATS])
_IS_PLAIN = np.array([kind in PLAIN for kind in range(len(FORMATS))])
# Up to how many rows a format is multiplied as it lies; more rows share one conversion.
_DIRECT_ROWS = np.array([1 << 60, 8, 8, 8, 8, 8, 0, 0, 0])


@njit
def padded(n):
    """Activations are padded with zeros to whole blocks of 32."""
    return (n + 31) & -32


@njit
def weight_row_bytes(kind, k):
    """Size of one output's weights."""
    if _IS_PLAIN[kind]:
        return k * _SIZES[kind] // _ELEMENTS[kind]
    return (k + _ELEMENTS[kind] - 1) // _ELEMENTS[kind] * _SIZES[kind]


@njit
def load_row(kind, source, k, out):
    """``k`` stored weights as float32, and zeros up to the end of a block of at most 256."""
    if kind == F32:
        _unpack_f32(source, k, out)
    elif kind == BF16:
        _unpack_bf16(source, k, out)
    elif kind == F16:
        _unpack_f16(source, k, out)
    elif kind == Q8_0:
        _unpack_q8_0(source, k, out)
    elif kind == Q4_0:
        _unpack_q4_0(source, k, out)
    elif kind == Q4_1:
        _unpack_q4_1(source, k, out)
    elif kind == Q4_K:
        _unpack_q4_k(source, k, out)
    elif kind == Q5_K:
        _unpack_q5_k(source, k, out)
    else:
        _unpack_q6_k(source, k, out)


@njit
def linear(rows, x, x_stride, kind, w, k, first, last, out, out_stride, scratch, then):
    """Outputs ``first`` to ``last`` of x @ w.T for every row; ``out`` is where output 0 goes.

    A few outputs at a time stay in the first-level cache while all rows use them, so memory is
    read once; meanwhile the next few are fetched, spread evenly over the work.
    ``scratch`` holds TILE_OUTPUTS rows of k floats.
    """
    row_bytes = weight_row_bytes(kind, k)
    convert = rows > _DIRECT_ROWS[kind]
    most = 4 if convert or _IS_PLAIN[kind] else GROUP_ROWS
    groups = (rows + most - 1) // most
    fewest, larger = rows // groups, rows % groups  # groups of nearly the same size
    if groups > 1 or convert:
        size = distance = 3 if fewest == 4 else TILE_OUTPUTS
    else:  # no weight is used twice: straight through, a tile ahead
        size, distance = last - first, 2 if rows > 4 else 3 if rows == 4 else 4
    stride = 4 * padded(k) if convert else row_bytes
    # Bytes of the next outputs' weights to fetch with every block of these.
    elements = 16 if convert else _ELEMENTS[kind]
    pace = elements * row_bytes // k // groups
    stop = w + last * row_bytes
    for begin in range(first, last, size):
        outputs = min(size, last - begin)
        weights = w + begin * row_bytes
        ahead = weights + distance * row_bytes
        if convert:
            for n in range(outputs):
                load_row(kind, weights + n * row_bytes, k, scratch + n * stride)
            weights = scratch
        row = 0
        for group in range(groups):
            count = fewest + (1 if group < larger else 0)
            xs, target = x + row * x_stride, out + row * out_stride + 4 * begin
            if convert or kind == F32:
                _tiles_f32(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            elif kind == BF16:
                _tiles_bf16(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            elif kind == F16:
                _tiles_f16(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            elif kind == Q8_0:
                _tiles_q8_0(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            elif kind == Q4_0:
                _tiles_q4_0(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            else:
                _tiles_q4_1(
                    count, outputs, xs, x_stride, weights, stride, k, target, out_stride,
                    ahead, row_bytes, pace, stop, then,
                )  # fmt: skip
            row += count
            ahead += row_bytes // groups


@njit
def add_bias(rows, out, out_stride, bias, first, last):
    """Add ``bias`` (0: none) to the outputs of every row."""
    if bias != 0:
        for row in range(rows):
            base = out + row * out_stride
            for n in range(first, last):
                store_f32(base + 4 * n, load_f32(base + 4 * n) + load_f32(bias + 4 * n))


@njit
def add_residual(rows, out, out_stride, x, x_stride, first, last):
    """x += out over the outputs ``first`` to ``last``."""
    for row in range(rows):
        for n in range(first, last):
            target = x + row * x_stride + 4 * n
            store_f32(target, load_f32(target) + load_f32(out + row * out_stride + 4 * n))


# -- functions of one row --------------------------------------------------------------------------


@njit
def exp8(v):
    """e to the power of 8 floats, within 2 units in the last place; 0 below -87.

    Range reduction by multiples of ln 2 and a polynomial of degree 6 (Cephes, Moshier).
    """
    x = max8(min8(v, splat8(np.float32(88.0))), splat8(np.float32(-87.0)))
    n = round8(mul8(x, splat8(np.float32(1.4426950408889634))))
    r = fma8(n, splat8(np.float32(-0.693359375)), x)
    r = fma8(n, splat8(np.float32(2.12194440e-4)), r)
    p = splat8(np.float32(1.9875691500e-4))
    p = fma8(p, r, splat8(np.float32(1.3981999507e-3)))
    p = fma8(p, r, splat8(np.float32(8.3334519073e-3)))
    p = fma8(p, r, splat8(np.float32(4.1665795894e-2)))
    p = fma8(p, r, splat8(np.float32(1.6666665459e-1)))
    p = fma8(p, r, splat8(np.float32(5.0000001201e-1)))
    p = add8(fma8(p, mul8(r, r), r), splat8(_one))
    return zero_below8(v, splat8(np.float32(-87.0)), mul8(p, exp2_integer8(n)))


@njit
def silu_times(gate, up, first, last):
    """gate = silu(gate) * up over the floats ``first`` to ``last``, whole vectors of 8."""
    for n in range(first, last, 8):
        g = load8(gate + 4 * n)
        sigmoid = div8(splat8(_one), add8(splat8(_one), exp8(sub8(splat8(_zero), g))))
        store8(gate + 4 * n, mul8(mul8(g, sigmoid), load8(up + 4 * n)))


@njit
def inverse_rms(x, n, epsilon):
    """1 / sqrt(mean(x^2) + epsilon)"""
    squares = splat8(_zero)
    whole = n & -8
    for i in range(0, whole, 8):
        v = load8(x + 4 * i)
        squares = fma8(v, v, squares)
    if whole < n:
        v = load8_some(x + 4 * whole, n - whole)
        squares = fma8(v, v, squares)
    return _one / np.sqrt(sum8(squares) / np.float32(n) + epsilon)


@njit
def rms_norm(x, weight, out, n, epsilon):
    """out = x / sqrt(mean(x^2) + epsilon) * weight; rows are padded to whole vectors of 8."""
    whole = n & -8
    scale = splat8(inverse_rms(x, n, epsilon))
    for i in range(0, whole, 8):
        store8(out + 4 * i, mul8(mul8(load8(x + 4 * i), scale), load8(weight + 4 * i)))
    if whole < n:
        v = mul8(mul8(load8_some(x + 4 * whole, n - whole), scale), load8(weight + 4 * whole))
        store8(out + 4 * whole, v)


@njit
def rms_norm_in_place(x, weight, n, epsilon):
    """Like rms_norm, where other data lies right behind the row."""
    scale = inverse_rms(x, n, epsilon)
    for i in range(n):
        store_f32(x + 4 * i, load_f32(x + 4 * i) * scale * load_f32(weight + 4 * i))


@njit
def rotate(x, cos, sin, half):
    """Rotary embedding in place: element i of the first half pairs with i of the second."""
    for i in range(half):
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        a, b = load_f32(x + 4 * i), load_f32(x + 4 * (half + i))
        store_f32(x + 4 * i, a * c - b * s)
        store_f32(x + 4 * (half + i), b * c + a * s)


@njit
def nearest_bfloat16(value):
    """The bits of the nearest bfloat16, ties to even; the value must be finite."""
    bits = np.uint32(float_bits(value))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


# -- attention -------------------------------------------------------------------------------------
#
# A page holds BLOCK positions: for each layer and key head, the keys as (BLOCK / 8, head_dim, 8),
# so that one vector is the same element of 8 keys, then the values as (BLOCK, padded head_dim).

# Numbers of the cache are float32 or bfloat16 (``kind``), rounded once when they are stored.

# Shapes of tiles are what 16 vector registers hold.


def _make_scores(kind):
    """``scores`` for one kind of cache."""
    tile_1x8, tile_2x4, tile_3x4, tile_4x2 = (
        score_tile(queries, groups, kind) for queries, groups in ((1, 8), (2, 4), (3, 4), (4, 2))
    )

    @njit
    def scores(queries, q, q_stride, keys, head_dim, groups, out, out_stride, ahead, turn, turns):
        size = item_size(kind) * GROUP * head_dim  # of 8 keys
        tiles = (queries + 3) // 4
        for tile in range(tiles):
            left = min(queries - 4 * tile, 4)
            step = 8 if left == 1 else 2 if left == 4 else 4
            source, to = q + 4 * tile * q_stride, out + 4 * tile * out_stride
            pace = step * item_size(kind) * GROUP // (tiles * turns)
            fetched = ahead + (turn * tiles + tile) * pace * head_dim
            for group in range(0, groups, step):
                k, target = keys + group * size, to + 4 * GROUP * group
                ahead_of_group = fetched + group * size
                if left == 1:
                    tile_1x8(
                        source, q_stride, k, head_dim, target, out_stride, ahead_of_group, pace
                    )
                elif left == 2:
                    tile_2x4(
                        source, q_stride, k, head_dim, target, out_stride, ahead_of_group, pace
                    )
                elif left == 3:
                    tile_3x4(
                        source, q_stride, k, head_dim, target, out_stride, ahead_of_group, pace
                    )
                else:
                    tile_4x2(
                        source, q_stride, k, head_dim, target, out_stride, ahead_of_group, pace
                    )

    return scores


def _make_weighted_values(kind):
    """``weighted_values`` for one kind of cache."""
    tile_1x8, tile_2x4, tile_3x4, tile_4x2 = (
        value_tile(queries, vectors, kind) for queries, vectors in ((1, 8), (2, 4), (3, 4), (4, 2))
    )
    tile_1x1, tile_2x1, tile_3x1, tile_4x1 = (
        value_tile(queries, 1, kind) for queries in (1, 2, 3, 4)
    )

    @njit
    def weighted_values(
        queries, weights, weight_stride, values, vectors, count, out, out_stride, ahead, size
    ):
        vector = GROUP * item_size(kind)
        stride = vectors * vector
        step = 8 if queries == 1 else 2 if queries == 4 else 4
        pace = size // (vectors * count)  # for each vector of a row
        part = 0
        while part < vectors:
            at, to, fetched = values + part * vector, out + 32 * part, ahead + part * pace * count
            if part + step > vectors:
                if queries == 1:
                    tile_1x1(
                        weights, weight_stride, at, stride, count, to, out_stride, fetched, pace
                    )
                elif queries == 2:
                    tile_2x1(
                        weights, weight_stride, at, stride, count, to, out_stride, fetched, pace
                    )
                elif queries == 3:
                    tile_3x1(
                        weights, weight_stride, at, stride, count, to, out_stride, fetched, pace
                    )
                else:
                    tile_4x1(
                        weights, weight_stride, at, stride, count, to, out_stride, fetched, pace
                    )
                part += 1
                continue
            paces = step * pace
            if queries == 1:
                tile_1x8(weights, weight_stride, at, stride, count, to, out_stride, fetched, paces)
            elif queries == 2:
                tile_2x4(weights, weight_stride, at, stride, count, to, out_stride, fetched, paces)
            elif queries == 3:
                tile_3x4(weights, weight_stride, at, stride, count, to, out_stride, fetched, paces)
            else:
                tile_4x2(weights, weight_stride, at, stride, count, to, out_stride, fetched, paces)
            part += step

    return weighted_values


@njit
def item_size(kind):
    """Bytes of a number in the cache."""
    return 2 if kind == BF16 else 4


@njit
def vector_padded(n):
    """Numbers in whole vectors of 8."""
    return (n + 7) & -8


@njit
def _key_address(keys, kind, head_dim, slot):
    """Where the first element of a key lies; the next is GROUP numbers further on."""
    return keys + item_size(kind) * ((slot // GROUP) * GROUP * head_dim + slot % GROUP)


@njit
def store_key_value(key, value, head_dim, kind, keys, values, slot):
    """Put one position's float32 key and value into a page's arrays."""
    target = _key_address(keys, kind, head_dim, slot)
    row = values + slot * item_size(kind) * vector_padded(head_dim)
    for d in range(head_dim):
        if kind == BF16:
            store_u16(target + 2 * GROUP * d, nearest_bfloat16(load_f32(key + 4 * d)))
            store_u16(row + 2 * d, nearest_bfloat16(load_f32(value + 4 * d)))
        else:
            store_f32(target + 4 * GROUP * d, load_f32(key + 4 * d))
            store_f32(row + 4 * d, load_f32(value + 4 * d))


@njit
def copy_key_value(keys, values, slot, to_keys, to_values, to_slot, head_dim, kind):
    """Copy one position from a page's arrays to another's, or to another slot."""
    size = item_size(kind)
    source = _key_address(keys, kind, head_dim, slot)
    target = _key_address(to_keys, kind, head_dim, to_slot)
    stride = size * vector_padded(head_dim)
    row, to_row = values + slot * stride, to_values + to_slot * stride
    for d in range(head_dim):
        if kind == BF16:
            store_u16(target + 2 * GROUP * d, load_u16(source + 2 * GROUP * d))
            store_u16(to_row + 2 * d, load_u16(row + 2 * d))
        else:
            store_f32(target + 4 * GROUP * d, load_f32(source + 4 * GROUP * d))
            store_f32(to_row + 4 * d, load_f32(row + 4 * d))


_scores_f32, _scores_bf16 = _make_scores(F32), _make_scores(BF16)
_weighted_values_f32, _weighted_values_bf16 = (
    _make_weighted_values(F32),
    _make_weighted_values(BF16),
)


@njit
def scores(queries, q, q_stride, kind, keys, head_dim, count, out, out_stride, ahead, turn, turns):
    """Unscaled scores of all queries with the first ``count`` keys of a block.

    Meanwhile what lies at ``ahead`` is fetched, as many bytes as the keys have: an equal part in
    each of the ``turns`` calls for a block.
    """
    groups = (count + GROUP - 1) // GROUP
    if kind == BF16:
        _scores_bf16(
            queries, q, q_stride, keys, head_dim, groups, out, out_stride, ahead, turn, turns
        )
    else:
        _scores_f32(
            queries, q, q_stride, keys, head_dim, groups, out, out_stride, ahead, turn, turns
        )


@njit
def exponentials(row, count, scale):
    """row = exp(row * scale - max) over ``count`` scores; returns the maximum and the sum."""
    whole = count & -8
    factor = splat8(scale)
    top = splat8(_lowest)
    for i in range(0, whole, 8):
        v = mul8(load8(row + 4 * i), factor)
        store8(row + 4 * i, v)
        top = max8(top, v)
    highest = maximum8(top)
    for i in range(whole, count):
        v = load_f32(row + 4 * i) * scale
        store_f32(row + 4 * i, v)
        highest = max(highest, v)
    total = splat8(_zero)
    peak = splat8(highest)
    for i in range(0, whole, 8):
        v = exp8(sub8(load8(row + 4 * i), peak))
        store8(row + 4 * i, v)
        total = add8(total, v)
    if whole < count:
        store8(row + 4 * whole, exp8(sub8(load8(row + 4 * whole), peak)))
        total = add8(total, load8_some(row + 4 * whole, count - whole))
    return highest, sum8(total)


@njit
def weighted_values(
    queries, weights, weight_stride, kind, values, vectors, count, out, out_stride, ahead, size
):
    """For up to 4 queries the sum of ``count`` rows of 8 x ``vectors`` values, each weighted.

    Meanwhile ``size`` bytes at ``ahead`` are fetched.
    """
    if kind == BF16:
        _weighted_values_bf16(
            queries, weights, weight_stride, values, vectors, count, out, out_stride, ahead, size
        )
    else:
        _weighted_values_f32(
            queries, weights, weight_stride, values, vectors, count, out, out_stride, ahead, size
        )


@njit
def merge_block(state, block, vectors):
    """Fold a block's (sum of values, maximum, sum of weights) into a row's, left to right.

    Both are ``vectors`` x 8 floats, then the maximum, then the sum.
    """
    tail = 32 * vectors
    old, new = load_f32(state + tail), load_f32(block + tail)
    highest = max(old, new)
    keep = exp8(splat8(old - highest))
    take = exp8(splat8(new - highest))
    for part in range(vectors):
        at = 32 * part
        v = mul8(load8(state + at), keep)
        store8(state + at, fma8(load8(block + at), take, v))
    total = mul8(splat8(load_f32(state + tail + 4)), keep)
    total = fma8(splat8(load_f32(block + tail + 4)), take, total)
    store_f32(state + tail, highest)
    store_f32(state + tail + 4, maximum8(total))


@njit
def copy_floats(source, target, count):
    """``count`` floats from one address to another."""
    for i in range(count):
        store_f32(target + 4 * i, load_f32(source + 4 * i))


@njit
def gather_block(first, count, prefix, path, pages, offset, head_dim, kind, out_keys, out_values):
    """Lay out the keys and values of a tree node's positions as in a page.

    Positions below ``prefix`` lie in their own slot, position prefix + i in slot ``path[i]``.
    """
    size = item_size(kind) * BLOCK * head_dim
    for i in range(count):
        position = first + i
        slot = position if position < prefix else load_i64(path + 8 * (position - prefix))
        keys = load_i64(pages + 8 * (slot // BLOCK)) + offset
        copy_key_value(keys, keys + size, slot % BLOCK, out_keys, out_values, i, head_dim, kind)
