"""Vectors of 8 floats, raw memory and atomics for Numba code.

Everything here is written out as LLVM operations in a fixed order: the compiler may schedule
them as it likes but, without fastmath flags, it may not change a single bit of a result. Addresses
are int64 byte addresses; callers answer for what lies there. Vectors are 8 lanes of float32 on
every machine (LLVM splits them where registers are narrower), so results are the same everywhere.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8
F32, BF16 = 0, 1  # how a weight is stored

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f32 = ir.FloatType()
_v8 = ir.VectorType(_f32, LANES)
_v8i = ir.VectorType(_i32, LANES)
_ptr = ir.PointerType()


class _F32x8(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="f32x8")


f32x8 = _F32x8()


@register_model(_F32x8)  # type: ignore[untyped-decorator]
class _F32x8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _v8)


# -- pieces of IR ----------------------------------------------------------------------------------


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _ptr)


def _at(builder: Any, address: Any, offset: Any, size: int) -> Any:
    """address + offset * size"""
    return builder.add(address, builder.mul(offset, _i64(size)))


def _load(builder: Any, address: Any, typ: Any, align: int) -> Any:
    return builder.load(_pointer(builder, address), align=align, typ=typ)


def _call_v8(builder: Any, name: str, *arguments: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_v8, [_v8] * len(arguments)), f"llvm.{name}.v8f32"
    )
    return builder.call(function, arguments)


def _splat(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_v8, ir.Undefined), value, _i32(0))
    return builder.shuffle_vector(
        vector, ir.Constant(_v8, ir.Undefined), ir.Constant(_v8i, [0] * LANES)
    )


def _tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lanes 0+4, 1+5, ..., then 0+2, 1+3, then 0+1: the one order of every horizontal sum."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(_i32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, _i32(0))


def _bf16_to_f32(builder: Any, halves: Any, typ: Any) -> Any:
    wide = builder.zext(halves, typ)
    shift = ir.Constant(typ, 16) if typ is _i32 else ir.Constant(typ, [16] * LANES)
    return builder.bitcast(builder.shl(wide, shift), _f32 if typ is _i32 else _v8)


def _load_weights(builder: Any, address: Any, kind: int) -> Any:
    """8 consecutive weights as float32."""
    if kind == F32:
        return _load(builder, address, _v8, 4)
    return _bf16_to_f32(builder, _load(builder, address, ir.VectorType(_i16, LANES), 2), _v8i)


def _load_weight(builder: Any, address: Any, kind: int) -> Any:
    if kind == F32:
        return _load(builder, address, _f32, 4)
    return _bf16_to_f32(builder, _load(builder, address, _i16, 2), _i32)


def _load_some(builder: Any, address: Any, count: Any, kind: int) -> Any:
    """``count`` < 8 consecutive weights in the first lanes, zeros in the others."""
    slot = cgutils.alloca_once_value(builder, ir.Constant(_v8, None))
    builder.store(ir.Constant(_v8, None), slot)
    base = builder.ptrtoint(slot, _i64)
    size = _ITEM_SIZE[kind]
    with cgutils.for_range(builder, count, intp=_i64) as loop:
        value = _load_weight(builder, _at(builder, address, loop.index, size), kind)
        builder.store(value, _pointer(builder, _at(builder, base, loop.index, 4)), align=4)
    return builder.load(slot, typ=_v8)


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_ptr, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # To the second-level cache: there is no room for it in the first, where the work is.
    read, second_level, data = _i32(0), _i32(2), _i32(1)
    builder.call(function, [_pointer(builder, address), read, second_level, data])


_ITEM_SIZE = {F32: 4, BF16: 2}


# -- vector operations -----------------------------------------------------------------------------


def _vector_operation(
    arguments: int, emit: Callable[..., Any], result: Any = f32x8
) -> Callable[..., Any]:
    """An intrinsic over ``arguments`` vectors whose code ``emit(builder, *vectors)`` writes."""
    names = ["a", "b", "c"][:arguments]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    # intrinsic() reads the parameter names, so the signature has to be spelled out.
    if arguments == 1:

        def one(typingctx: Any, a: Any) -> Any:
            return result(f32x8), codegen

        return intrinsic(one)  # type: ignore[no-any-return]
    if arguments == 2:

        def two(typingctx: Any, a: Any, b: Any) -> Any:
            return result(f32x8, f32x8), codegen

        return intrinsic(two)  # type: ignore[no-any-return]

    def three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return result(f32x8, f32x8, f32x8), codegen

    assert len(names) == 3
    return intrinsic(three)  # type: ignore[no-any-return]


def _emit_exp2_integer(b: Any, v: Any) -> Any:
    exponent = b.add(b.fptosi(v, _v8i), ir.Constant(_v8i, [127] * LANES))
    return b.bitcast(b.shl(exponent, ir.Constant(_v8i, [23] * LANES)), _v8)


def _emit_max(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


add8 = _vector_operation(2, lambda b, x, y: b.fadd(x, y))
sub8 = _vector_operation(2, lambda b, x, y: b.fsub(x, y))
mul8 = _vector_operation(2, lambda b, x, y: b.fmul(x, y))
div8 = _vector_operation(2, lambda b, x, y: b.fdiv(x, y))
fma8 = _vector_operation(3, lambda b, x, y, z: _call_v8(b, "fma", x, y, z))
max8 = _vector_operation(2, _emit_max)
min8 = _vector_operation(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
round8 = _vector_operation(1, lambda b, x: _call_v8(b, "nearbyint", x))
exp2_integer8 = _vector_operation(1, _emit_exp2_integer)
"""2 to the power of whole numbers from -126 to 127."""
zero_below8 = _vector_operation(
    3, lambda b, x, limit, y: b.select(b.fcmp_ordered("<", x, limit), ir.Constant(_v8, None), y)
)
"""0 in the lanes where x < limit, else y."""
sum8 = _vector_operation(1, lambda b, x: _tree(b, x, b.fadd), types.float32)
maximum8 = _vector_operation(
    1, lambda b, x: _tree(b, x, lambda p, q: _emit_max(b, p, q)), types.float32
)


@intrinsic  # type: ignore[untyped-decorator]
def splat8(typingctx: Any, value: Any) -> Any:
    """The same float32 in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return f32x8(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load8(typingctx: Any, address: Any) -> Any:
    """8 float32 from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _v8, 4)

    return f32x8(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load8_some(typingctx: Any, address: Any, count: Any) -> Any:
    """The first ``count`` < 8 float32 from an address, zeros behind them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_some(builder, args[0], args[1], F32)

    return f32x8(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load8_bf16(typingctx: Any, address: Any) -> Any:
    """8 bfloat16 from an address, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_weights(builder, args[0], BF16)

    return f32x8(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store8(typingctx: Any, address: Any, vector: Any) -> Any:
    """8 float32 to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


def _scalar_access(nb_type: Any, ll_type: Any, align: int) -> tuple[Any, Any]:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load(builder, args[0], ll_type, align)

        return nb_type(types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0]), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, nb_type), codegen

    return load, store


load_f32, store_f32 = _scalar_access(types.float32, _f32, 4)
load_i64, store_i64 = _scalar_access(types.int64, _i64, 8)


@intrinsic  # type: ignore[untyped-decorator]
def load_bf16(typingctx: Any, address: Any) -> Any:
    """One bfloat16 from an address, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_weight(builder, args[0], BF16)

    return types.float32(types.int64), codegen


# -- tiles: the loops where the time goes ----------------------------------------------------------


def dot_tile(rows: int, outputs: int, kind: int) -> Any:
    """A kernel for ``rows`` x ``outputs`` dot products of length k, each weight loaded once.

    ``tile(x, x_stride, w, w_stride, k, out, out_stride, ahead, ahead_stride, pace)``, strides in
    bytes. Each product is one chain: 8 lanes of fused multiply-add over k in steps of 8, a last
    step padded with zeros, then the tree over the lanes. The chain is the same for every tile
    shape, so are its bits. With every 16 elements, one cache line for each output is fetched
    ``pace`` bytes further on from ``ahead``: what the next tiles need arrives while this one
    computes.
    """

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
            fetched = [b.add(ahead, b.mul(ahead_stride, _i64(output))) for output in range(outputs)]
            xs = [b.add(x, b.mul(x_stride, _i64(row))) for row in range(rows)]
            ws = [b.add(w, b.mul(w_stride, _i64(output))) for output in range(outputs)]
            zero = ir.Constant(_v8, None)
            sums = [
                [cgutils.alloca_once_value(b, zero) for _ in range(outputs)] for _ in range(rows)
            ]
            for cells in sums:
                for cell in cells:
                    b.store(zero, cell)
            size = _ITEM_SIZE[kind]

            def accumulate(x_vectors: list[Any], w_vectors: list[Any]) -> None:
                for output in range(outputs):
                    for row in range(rows):
                        cell = sums[row][output]
                        total = b.load(cell, typ=_v8)
                        b.store(_call_v8(b, "fma", x_vectors[row], w_vectors[output], total), cell)

            def step(i: Any) -> None:
                accumulate(
                    [_load(b, _at(b, p, i, 4), _v8, 4) for p in xs],
                    [_load_weights(b, _at(b, p, i, size), kind) for p in ws],
                )

            paired = b.and_(k, _i64(-2 * LANES))
            with cgutils.for_range_slice(b, _i64(0), paired, _i64(2 * LANES), intp=_i64) as (i, n):
                for p in fetched:
                    _prefetch(b, b.add(p, b.mul(n, pace)))
                step(i)
                step(b.add(i, _i64(LANES)))
            whole = b.and_(k, _i64(-LANES))
            with b.if_then(b.icmp_signed("<", paired, whole)):
                step(paired)
            rest = b.sub(k, whole)
            with b.if_then(b.icmp_signed(">", rest, _i64(0)), likely=False):
                accumulate(
                    [_load_some(b, _at(b, p, whole, 4), rest, F32) for p in xs],
                    [_load_some(b, _at(b, p, whole, size), rest, kind) for p in ws],
                )
            for row in range(rows):
                base = b.add(out, b.mul(out_stride, _i64(row)))
                for output in range(outputs):
                    total = _tree(b, b.load(sums[row][output], typ=_v8), b.fadd)
                    b.store(total, _pointer(b, b.add(base, _i64(4 * output))), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


def score_tile(queries: int, groups: int) -> Any:
    """Dot products of ``queries`` vectors with 8 x ``groups`` keys.

    ``tile(q, q_stride, keys, head_dim, out, out_stride)``: keys lie as (groups, head_dim, 8), one
    key a lane, so that a score is one chain of fused multiply-adds over head_dim.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any, q: Any, q_stride: Any, keys: Any, head_dim: Any, out: Any, stride: Any
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, q_stride, keys, head_dim, out, out_stride = args
            qs = [b.add(q, b.mul(q_stride, _i64(query))) for query in range(queries)]
            group_size = b.mul(head_dim, _i64(4 * LANES))
            ks = [b.add(keys, b.mul(group_size, _i64(group))) for group in range(groups)]
            zero = ir.Constant(_v8, None)
            sums = [
                [cgutils.alloca_once_value(b, zero) for _ in range(groups)] for _ in range(queries)
            ]
            for cells in sums:
                for cell in cells:
                    b.store(zero, cell)
            with cgutils.for_range(b, head_dim, intp=_i64) as loop:
                k_vectors = [_load(b, _at(b, p, loop.index, 4 * LANES), _v8, 4) for p in ks]
                for query in range(queries):
                    value = _splat(b, _load(b, _at(b, qs[query], loop.index, 4), _f32, 4))
                    for group in range(groups):
                        cell = sums[query][group]
                        total = b.load(cell, typ=_v8)
                        b.store(_call_v8(b, "fma", value, k_vectors[group], total), cell)
            for query in range(queries):
                base = b.add(out, b.mul(out_stride, _i64(query)))
                for group in range(groups):
                    total = b.load(sums[query][group], typ=_v8)
                    target = b.add(base, _i64(4 * LANES * group))
                    b.store(total, _pointer(b, target), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def value_tile(vectors: int) -> Any:
    """The sum of ``count`` rows of 8 x ``vectors`` values, weighted.

    ``tile(weights, values, value_stride, count, out)``: added in the order of the rows.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typingctx: Any, weights: Any, values: Any, stride: Any, count: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            weights, values, stride, count, out = args
            zero = ir.Constant(_v8, None)
            sums = [cgutils.alloca_once_value(b, zero) for _ in range(vectors)]
            for cell in sums:
                b.store(zero, cell)
            with cgutils.for_range(b, count, intp=_i64) as loop:
                weight = _splat(b, _load(b, _at(b, weights, loop.index, 4), _f32, 4))
                row = b.add(values, b.mul(stride, loop.index))
                for part, cell in enumerate(sums):
                    vector = _load(b, b.add(row, _i64(4 * LANES * part)), _v8, 4)
                    b.store(_call_v8(b, "fma", weight, vector, b.load(cell, typ=_v8)), cell)
            for part, cell in enumerate(sums):
                target = _pointer(b, b.add(out, _i64(4 * LANES * part)))
                b.store(b.load(cell, typ=_v8), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return tile


# -- threads ---------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was; ordered both ways."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typingctx: Any, address: Any) -> Any:
    """Read an int64 that other threads write; ordered before what follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8, typ=_i64)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            name, arguments = "llvm.x86.sse2.pause", []
        elif machine in ("arm64", "aarch64"):
            name, arguments = "llvm.aarch64.hint", [_i32(1)]  # yield
        else:
            return context.get_dummy_value()
        kind = ir.FunctionType(ir.VoidType(), [_i32] * len(arguments))
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def give_way(typingctx: Any) -> Any:
    """Let another thread run on this core; a pause where the system has no such call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_i32, []), "sched_yield"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
