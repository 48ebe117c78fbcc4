"""How weights are stored, and the code that reads them as float32.

A row of weights is a run of blocks. Reading gives exactly the values that the `gguf` package
computes: every product below is exact in float32 (a half has 11 significant bits, a scale at most
8, a quant at most 6), so that a fused multiply-add rounds where theirs rounds, once. A model
therefore computes the same bits from a file's own blocks as from the float32 they stand for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir

from foretell.backends.cpu._ir import (
    F16_T,
    F32_T,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V8,
    V8I,
    call_v8,
    load,
    splat,
    vector_constant,
)

_BYTES = ir.VectorType(I8, LANES)
_HALVES = ir.VectorType(F16_T, LANES)


class Format(ABC):
    """One way to store weights: blocks of ``elements`` numbers in ``size`` bytes."""

    elements: int
    size: int

    @abstractmethod
    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        """The block's numbers in order, 8 float32 at a time; each is emitted when asked for."""


class Float32(Format):
    """As computed with."""

    elements, size = 16, 64

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        for step in range(2):
            yield load(builder, builder.add(block, I64(32 * step)), V8, 4)


class BFloat16(Format):
    """The upper half of a float32."""

    elements, size = 16, 32

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        for step in range(2):
            address = builder.add(block, I64(16 * step))
            wide = builder.zext(load(builder, address, ir.VectorType(I16, LANES), 2), V8I)
            yield builder.bitcast(builder.shl(wide, vector_constant(V8I, 16)), V8)


class Float16(Format):
    """IEEE half precision."""

    elements, size = 16, 32

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        for step in range(2):
            address = builder.add(block, I64(16 * step))
            yield builder.fpext(load(builder, address, ir.VectorType(F16_T, LANES), 2), V8)


class GgufQ80(Format):
    """32 signed bytes and a scale: d * q. Also what Foretell's own int8 is."""

    elements, size = 32, 34

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        scale = _half_repeated(builder, block, 0)
        for step in range(4):
            quants = load(builder, builder.add(block, I64(2 + 8 * step)), _BYTES, 1)
            yield builder.fmul(builder.sitofp(quants, V8), scale)


class GgufQ40(Format):
    """32 nibbles and a scale: d * (q - 8); the low nibbles of 16 bytes come first."""

    elements, size = 32, 18

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        scale = _half(builder, block, 0)
        for quants in _nibbles(builder, _bytes(builder, block, 2, 16)):
            signed = builder.sub(quants, vector_constant(V8I, 8))
            yield builder.fmul(builder.sitofp(signed, V8), scale)


class GgufQ41(Format):
    """32 nibbles, a scale and a minimum: d * q + m."""

    elements, size = 32, 20

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        scale, minimum = _half(builder, block, 0), _half(builder, block, 2)
        for quants in _nibbles(builder, _bytes(builder, block, 4, 16)):
            yield call_v8(builder, "fma", builder.sitofp(quants, V8), scale, minimum)


class GgufQ4K(Format):
    """8 runs of 32 nibbles, each with a 6-bit scale and minimum: d * sc * q - dmin * mn."""

    elements, size = 256, 144
    _quants_at = 16
    _high_bits_at: int | None = None

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        scales = _scales_and_minima(builder, block)
        high = None
        if self._high_bits_at is not None:
            high = _bytes(builder, block, self._high_bits_at, 32)
        for pair in range(4):
            both = _bytes(builder, block, self._quants_at + 32 * pair, 32)
            for index, quants in enumerate(_nibbles(builder, both)):
                run, part = 2 * pair + index // 4, index % 4
                if part == 0:
                    scale, minimum = scales(run)
                if high is not None:
                    quants = builder.or_(quants, _bits(builder, high[part], run, 1))
                yield call_v8(builder, "fma", builder.sitofp(quants, V8), scale, minimum)


class GgufQ5K(GgufQ4K):
    """Like Q4_K, with a fifth bit of every quant in 32 bytes of their own."""

    elements, size = 256, 176
    _quants_at, _high_bits_at = 48, 16


class GgufQ6K(Format):
    """16 runs of 16 six-bit quants, each with a signed 8-bit scale: d * sc * (q - 32)."""

    elements, size = 256, 210

    def vectors(self, builder: Any, block: Any) -> Iterator[Any]:
        scale = _half_scalar(builder, block, 208)
        for half in range(2):
            high = _bytes(builder, block, 128 + 32 * half, 32)
            low = [_bytes(builder, block, 64 * half + 32 * part, 32) for part in range(2)]
            nibbles = [list(_nibbles(builder, part)) for part in low]
            for run in range(4):  # low nibbles of both parts, then the high ones
                for part in range(4):
                    quants = nibbles[run % 2][4 * (run // 2) + part]
                    quants = builder.or_(quants, _bits(builder, high[part], 2 * run, 3))
                    signed = builder.sub(quants, vector_constant(V8I, 32))
                    if part % 2 == 0:
                        at = 192 + 8 * half + 2 * run + part // 2
                        own = load(builder, builder.add(block, I64(at)), I8, 1)
                        product = builder.fmul(scale, builder.sitofp(own, F32_T))
                        factor = splat(builder, product)
                    yield builder.fmul(builder.sitofp(signed, V8), factor)


FORMATS: tuple[Format, ...] = (
    Float32(),
    BFloat16(),
    Float16(),
    GgufQ80(),
    GgufQ40(),
    GgufQ41(),
    GgufQ4K(),
    GgufQ5K(),
    GgufQ6K(),
)
F32, BF16, F16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K = range(9)
"""A format's number: its place in FORMATS, and what kernels are told."""

PLAIN = (F32, BF16, F16)
"""Formats without blocks: a row is as long as its numbers."""
ITEM_SIZE = {F32: 4, BF16: 2, F16: 2}


def row_bytes(kind: int, elements: int) -> int:
    """Bytes of a row of ``elements`` weights."""
    stored = FORMATS[kind]
    if kind in PLAIN:
        return elements * ITEM_SIZE[kind]
    return -(-elements // stored.elements) * stored.size


def _half_scalar(builder: Any, block: Any, offset: int) -> Any:
    return builder.fpext(load(builder, builder.add(block, I64(offset)), F16_T, 1), F32_T)


def _half(builder: Any, block: Any, offset: int) -> Any:
    return splat(builder, _half_scalar(builder, block, offset))


def _half_repeated(builder: Any, block: Any, offset: int) -> Any:
    """The same, copied before it is widened: faster where it stands alone."""
    bits = load(builder, builder.add(block, I64(offset)), I16, 1)
    kind = ir.VectorType(I16, LANES)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), bits, I32(0))
    zeros = ir.Constant(V8I, [0] * LANES)
    repeated = builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), zeros)
    return builder.fpext(builder.bitcast(repeated, _HALVES), V8)


def _bytes(builder: Any, block: Any, offset: int, count: int) -> list[Any]:
    """Unsigned bytes as 32-bit lanes, 8 at a time."""
    return [
        builder.zext(load(builder, builder.add(block, I64(at)), _BYTES, 1), V8I)
        for at in range(offset, offset + count, LANES)
    ]


def _nibbles(builder: Any, parts: list[Any]) -> Iterator[Any]:
    """The low halves of all bytes, then the high ones."""
    for part in parts:
        yield builder.and_(part, vector_constant(V8I, 15))
    for part in parts:
        yield builder.lshr(part, vector_constant(V8I, 4))


def _bits(builder: Any, lanes: Any, start: int, mask: int) -> Any:
    """The bits of every lane from ``start`` on under ``mask``, moved to bit 4."""
    if start <= 4:
        moved = builder.shl(lanes, vector_constant(V8I, 4 - start))
    else:
        moved = builder.lshr(lanes, vector_constant(V8I, start - 4))
    return builder.and_(moved, vector_constant(V8I, mask << 4))


def _scales_and_minima(builder: Any, block: Any) -> Any:
    """Q4_K's and Q5_K's 8 scales and minima, 6 bits each, from 12 bytes."""
    scale, minimum = _half_scalar(builder, block, 0), _half_scalar(builder, block, 2)

    def byte(index: int) -> Any:
        return builder.zext(load(builder, builder.add(block, I64(4 + index)), I8, 1), I32)

    def low6(value: Any) -> Any:
        return builder.and_(value, I32(63))

    def top2(value: Any) -> Any:
        return builder.shl(builder.lshr(value, I32(6)), I32(4))

    def of_run(run: int) -> tuple[Any, Any]:
        if run < 4:
            own, least = low6(byte(run)), low6(byte(run + 4))
        else:
            own = builder.or_(builder.and_(byte(run + 4), I32(15)), top2(byte(run - 4)))
            least = builder.or_(builder.lshr(byte(run + 4), I32(4)), top2(byte(run)))
        factor = builder.fmul(scale, builder.sitofp(own, F32_T))
        offset = builder.fmul(minimum, builder.sitofp(least, F32_T))
        return splat(builder, factor), splat(builder, builder.fneg(offset))

    return of_run
