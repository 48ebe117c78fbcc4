"""Pieces of LLVM code that the kernels' intrinsics are written with."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

LANES = 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16_T, F32_T = ir.HalfType(), ir.FloatType()
V8, V8I = ir.VectorType(F32_T, LANES), ir.VectorType(I32, LANES)
PTR = ir.PointerType()
ZERO8 = ir.Constant(V8, None)


def has_32_registers() -> bool:
    """Whether this machine has 32 vector registers, twice as many as most x86-64 processors."""
    machine = platform.machine().lower()
    return machine in ("arm64", "aarch64") or "+avx512vl" in get_host_cpu_features()


def pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, PTR)


def at(builder: Any, address: Any, offset: Any, size: int) -> Any:
    """address + offset * size"""
    return builder.add(address, builder.mul(offset, I64(size)))


def load(builder: Any, address: Any, typ: Any, align: int) -> Any:
    return builder.load(pointer(builder, address), align=align, typ=typ)


def call_v8(builder: Any, name: str, *arguments: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(V8, [V8] * len(arguments)), f"llvm.{name}.v8f32"
    )
    return builder.call(function, arguments)


def splat(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(V8, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(
        vector, ir.Constant(V8, ir.Undefined), ir.Constant(V8I, [0] * LANES)
    )


def tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lanes 0+4, 1+5, ..., then 0+2, 1+3, then 0+1: the one order of every horizontal sum."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, I32(0))


def prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # To the second-level cache: there is no room for it in the first, where the work is.
    read, second_level, data = I32(0), I32(2), I32(1)
    builder.call(function, [pointer(builder, address), read, second_level, data])


def vector_constant(typ: Any, value: float) -> Any:
    """The same number in all lanes."""
    return ir.Constant(typ, [value] * typ.count)


def accumulators(builder: Any, rows: int, columns: int) -> list[list[Any]]:
    """Vectors that start at zero on every run of the code; LLVM keeps them in registers."""
    cells = [
        [cgutils.alloca_once_value(builder, ZERO8) for _ in range(columns)] for _ in range(rows)
    ]
    for row in cells:
        for cell in row:
            builder.store(ZERO8, cell)
    return cells


def fma_into(builder: Any, cell: Any, a: Any, b: Any) -> None:
    """cell += a * b, rounded once."""
    builder.store(call_v8(builder, "fma", a, b, builder.load(cell, typ=V8)), cell)
