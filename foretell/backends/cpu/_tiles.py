"""The loops where the time goes, as intrinsics of a given shape.

All arguments are int64: addresses, counts, and strides in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from foretell.backends.cpu._formats import FORMATS, ITEM_SIZE, PLAIN
from foretell.backends.cpu._ir import (
    F32_T,
    I8,
    I64,
    LANES,
    V8,
    accumulators,
    at,
    fma_into,
    load,
    pointer,
    prefetch,
    splat,
    tree,
)


def whole_blocks(builder: Any, k: Any, kind: int) -> Any:
    """Blocks in a row of k weights that can be read as they are."""
    elements = FORMATS[kind].elements
    if kind not in PLAIN:  # the last block is padded
        k = builder.add(k, I64(elements - 1))
    return builder.udiv(k, I64(elements))


def block_address(builder: Any, row: Any, element: Any, block: Any, kind: int) -> Any:
    """Where a block of a row lies; told twice which, since either may be the cheaper product."""
    if kind in PLAIN:
        return at(builder, row, element, ITEM_SIZE[kind])
    return at(builder, row, block, FORMATS[kind].size)


@contextmanager
def rest_of_row(
    builder: Any, k: Any, kind: int, whole: Any, rows: Sequence[Any]
) -> Iterator[list[Any]]:
    """Code that runs where numbers are left behind the whole blocks of some rows.

    Gives the addresses of copies that are padded with zeros.
    """
    stored = FORMATS[kind]
    left = builder.sub(k, builder.mul(whole, I64(stored.elements)))
    with builder.if_then(builder.icmp_signed(">", left, I64(0)), likely=False):
        size = builder.mul(left, I64(stored.size // stored.elements))
        copies = []
        for row in rows:
            kind_of_copy = ir.ArrayType(I8, stored.size)
            copy = cgutils.alloca_once_value(builder, ir.Constant(kind_of_copy, None))
            builder.store(ir.Constant(kind_of_copy, None), copy)
            base = builder.ptrtoint(copy, I64)
            source = at(builder, row, whole, stored.size)
            with cgutils.for_range(builder, size, intp=I64) as loop:
                byte = load(builder, builder.add(source, loop.index), I8, 1)
                builder.store(byte, pointer(builder, builder.add(base, loop.index)), align=1)
            copies.append(base)
        yield copies


def unpack_row(kind: int) -> Any:
    """``unpack(w, k, out)``: a row of stored weights as float32, zeros up to the block's end."""
    stored = FORMATS[kind]

    @intrinsic  # type: ignore[untyped-decorator]
    def unpack(typingctx: Any, w: Any, k: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, k, out = args

            def write(n: Any, block: Any) -> None:
                base = at(b, out, n, 4 * stored.elements)
                for step, vector in enumerate(stored.vectors(b, block)):
                    b.store(vector, pointer(b, b.add(base, I64(4 * LANES * step))), align=4)

            whole = whole_blocks(b, k, kind)
            with cgutils.for_range(b, whole, intp=I64) as loop:
                write(loop.index, at(b, w, loop.index, stored.size))
            with rest_of_row(b, k, kind, whole, [w]) as addresses:
                write(whole, addresses[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return unpack


def dot_tile(rows: int, outputs: int, kind: int) -> Any:
    """A kernel for ``rows`` x ``outputs`` dot products of length k, each weight read once.

    ``tile(x, x_stride, w, w_stride, k, out, out_stride, ahead, ahead_stride, pace)``. Each product
    is one chain: 8 lanes of fused multiply-add over k in steps of 8, then the tree over the lanes.
    The chain is the same for every tile shape, so are its bits. x holds zeros behind k up to the
    end of a block. With every block, a cache line for each output is fetched ``pace`` bytes
    further on from ``ahead``: what the next tiles need arrives while this one computes.
    """
    stored = FORMATS[kind]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        k: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
        ahead_stride: Any,
        pace: Any,
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, x_stride, w, w_stride, k, out, out_stride, ahead, ahead_stride, pace = args
            xs = [b.add(x, b.mul(x_stride, I64(row))) for row in range(rows)]
            ws = [b.add(w, b.mul(w_stride, I64(output))) for output in range(outputs)]
            fetched = [b.add(ahead, b.mul(ahead_stride, I64(output))) for output in range(outputs)]
            sums = accumulators(b, rows, outputs)

            def multiply(element: Any, addresses: list[Any]) -> None:
                """Add the products of the block at ``element`` of x with those at ``addresses``."""
                blocks = [stored.vectors(b, address) for address in addresses]
                for step, vectors in enumerate(zip(*blocks, strict=True)):
                    here = b.add(element, I64(step * LANES))
                    x_vectors = [load(b, at(b, p, here, 4), V8, 4) for p in xs]
                    for output, vector in enumerate(vectors):
                        for row in range(rows):
                            fma_into(b, sums[row][output], x_vectors[row], vector)

            whole = whole_blocks(b, k, kind)
            end = b.mul(whole, I64(stored.elements))
            with cgutils.for_range_slice(b, I64(0), end, I64(stored.elements), intp=I64) as (i, n):
                for p in fetched:
                    prefetch(b, b.add(p, b.mul(n, pace)))
                multiply(i, [block_address(b, p, i, n, kind) for p in ws])
            with rest_of_row(b, k, kind, whole, ws) as addresses:
                multiply(end, addresses)
            for row in range(rows):
                base = b.add(out, b.mul(out_stride, I64(row)))
                for output in range(outputs):
                    total = tree(b, b.load(sums[row][output], typ=V8), b.fadd)
                    b.store(total, pointer(b, b.add(base, I64(4 * output))), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


def _cached(builder: Any, address: Any, kind: int) -> Any:
    """8 numbers of the cache as float32."""
    return next(FORMATS[kind].vectors(builder, address))


def score_tile(queries: int, groups: int, kind: int) -> Any:
    """Dot products of ``queries`` vectors with 8 x ``groups`` keys.

    ``tile(q, q_stride, keys, head_dim, out, out_stride, ahead, pace)``: keys lie as (groups,
    head_dim, 8), one key a lane, so that a score is one chain of fused multiply-adds over
    head_dim. With every element of it, as many bytes as are read are fetched ``pace`` bytes
    further on from ``ahead``.
    """
    size = LANES * ITEM_SIZE[kind]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any,
        q: Any,
        q_stride: Any,
        keys: Any,
        head_dim: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, q_stride, keys, head_dim, out, out_stride, ahead, pace = args
            qs = [b.add(q, b.mul(q_stride, I64(query))) for query in range(queries)]
            ks = [b.add(keys, b.mul(head_dim, I64(size * group))) for group in range(groups)]
            sums = accumulators(b, queries, groups)
            with cgutils.for_range(b, head_dim, intp=I64) as loop:
                _fetch(b, b.add(ahead, b.mul(loop.index, pace)), groups * size)
                values = [splat(b, load(b, at(b, p, loop.index, 4), F32_T, 4)) for p in qs]
                for group, keys_of_group in enumerate(ks):
                    k = _cached(b, at(b, keys_of_group, loop.index, size), kind)
                    for query, value in enumerate(values):
                        fma_into(b, sums[query][group], value, k)
            for query in range(queries):
                base = b.add(out, b.mul(out_stride, I64(query)))
                for group in range(groups):
                    total = b.load(sums[query][group], typ=V8)
                    b.store(total, pointer(b, b.add(base, I64(4 * LANES * group))), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


def value_tile(queries: int, vectors: int, kind: int) -> Any:
    """For each of ``queries`` rows of weights the weighted sum of ``count`` rows of values.

    ``tile(weights, weight_stride, values, value_stride, count, out, out_stride, ahead, pace)``:
    8 x ``vectors`` numbers of each row of values, added in the order of the rows. With every
    row, as many bytes as are read are fetched ``pace`` bytes further on from ``ahead``.
    """
    size = LANES * ITEM_SIZE[kind]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            weights, weight_stride, values, stride, count, out, out_stride, ahead, pace = args
            ws = [b.add(weights, b.mul(weight_stride, I64(query))) for query in range(queries)]
            sums = accumulators(b, queries, vectors)
            with cgutils.for_range(b, count, intp=I64) as loop:
                _fetch(b, b.add(ahead, b.mul(loop.index, pace)), vectors * size)
                own = [splat(b, load(b, at(b, p, loop.index, 4), F32_T, 4)) for p in ws]
                row = b.add(values, b.mul(stride, loop.index))
                for part in range(vectors):
                    v = _cached(b, b.add(row, I64(size * part)), kind)
                    for query, weight in enumerate(own):
                        fma_into(b, sums[query][part], weight, v)
            for query in range(queries):
                base = b.add(out, b.mul(out_stride, I64(query)))
                for part in range(vectors):
                    target = pointer(b, b.add(base, I64(4 * LANES * part)))
                    b.store(b.load(sums[query][part], typ=V8), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


def _fetch(builder: Any, address: Any, size: int) -> None:
    """Bring what a loop will read later closer, by whole cache lines."""
    for line in range(0, size, 64):
        prefetch(builder, builder.add(address, I64(line)))
