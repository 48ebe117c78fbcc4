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

from foretell.backends.cpu._ir import (
    F32_T,
    I16,
    I32,
    I64,
    LANES,
    V8,
    V8I,
    at,
    call_v8,
    load,
    pointer,
    splat,
    tree,
)


class _F32x8(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="f32x8")


f32x8 = _F32x8()


@register_model(_F32x8)  # type: ignore[untyped-decorator]
class _F32x8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V8)


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
    exponent = b.add(b.fptosi(v, V8I), ir.Constant(V8I, [127] * LANES))
    return b.bitcast(b.shl(exponent, ir.Constant(V8I, [23] * LANES)), V8)


def _emit_max(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


add8 = _vector_operation(2, lambda b, x, y: b.fadd(x, y))
sub8 = _vector_operation(2, lambda b, x, y: b.fsub(x, y))
mul8 = _vector_operation(2, lambda b, x, y: b.fmul(x, y))
div8 = _vector_operation(2, lambda b, x, y: b.fdiv(x, y))
fma8 = _vector_operation(3, lambda b, x, y, z: call_v8(b, "fma", x, y, z))
max8 = _vector_operation(2, _emit_max)
min8 = _vector_operation(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
round8 = _vector_operation(1, lambda b, x: call_v8(b, "nearbyint", x))
exp2_integer8 = _vector_operation(1, _emit_exp2_integer)
"""2 to the power of whole numbers from -126 to 127."""
zero_below8 = _vector_operation(
    3, lambda b, x, limit, y: b.select(b.fcmp_ordered("<", x, limit), ir.Constant(V8, None), y)
)
"""0 in the lanes where x < limit, else y."""
sum8 = _vector_operation(1, lambda b, x: tree(b, x, b.fadd), types.float32)
maximum8 = _vector_operation(
    1, lambda b, x: tree(b, x, lambda p, q: _emit_max(b, p, q)), types.float32
)


@intrinsic  # type: ignore[untyped-decorator]
def splat8(typingctx: Any, value: Any) -> Any:
    """The same float32 in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return f32x8(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load8(typingctx: Any, address: Any) -> Any:
    """8 float32 from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], V8, 4)

    return f32x8(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load8_some(typingctx: Any, address: Any, count: Any) -> Any:
    """The first ``count`` < 8 float32 from an address, zeros behind them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, count = args
        slot = cgutils.alloca_once_value(builder, ir.Constant(V8, None))
        builder.store(ir.Constant(V8, None), slot)
        base = builder.ptrtoint(slot, I64)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            value = load(builder, at(builder, address, loop.index, 4), F32_T, 4)
            builder.store(value, pointer(builder, at(builder, base, loop.index, 4)), align=4)
        return builder.load(slot, typ=V8)

    return f32x8(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store8(typingctx: Any, address: Any, vector: Any) -> Any:
    """8 float32 to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


def _scalar_access(nb_type: Any, ll_type: Any, align: int) -> tuple[Any, Any]:
    @intrinsic  # type: ignore[untyped-decorator]
    def load_it(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return load(builder, args[0], ll_type, align)

        return nb_type(types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def store_it(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], pointer(builder, args[0]), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, nb_type), codegen

    return load_it, store_it


load_f32, store_f32 = _scalar_access(types.float32, F32_T, 4)
load_i64, store_i64 = _scalar_access(types.int64, I64, 8)
load_u16, store_u16 = _scalar_access(types.uint16, I16, 2)


@intrinsic  # type: ignore[untyped-decorator]
def float_bits(typingctx: Any, value: Any) -> Any:
    """The bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


# -- threads ---------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was; ordered both ways."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typingctx: Any, address: Any) -> Any:
    """Read an int64 that other threads write; ordered before what follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0]), "acquire", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_replace(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace an int64 if it is still ``old``; says what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, old, new = args
        result = builder.cmpxchg(pointer(builder, address), old, new, "acq_rel", "acquire")
        return builder.extract_value(result, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            name, arguments = "llvm.x86.sse2.pause", []
        elif machine in ("arm64", "aarch64"):
            name, arguments = "llvm.aarch64.hint", [I32(1)]  # yield
        else:
            return context.get_dummy_value()
        kind = ir.FunctionType(ir.VoidType(), [I32] * len(arguments))
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def give_way(typingctx: Any) -> Any:
    """Let another thread run on this core; a pause where the system has no such call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(I32, []), "sched_yield"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def cycles(typingctx: Any) -> Any:
    """The processor's cycle counter."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter")
        return builder.call(function, [])

    return types.int64(), codegen
