"""The weights in memory: one aligned, C-ordered array a tensor, and the table that points there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError, InsufficientMemoryError
from foretell._memory import available_memory
from foretell.backends.cpu import _pass as at
from foretell.backends.cpu._checkpoint import Checkpoint
from foretell.backends.cpu._formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    row_bytes,
)
from foretell.backends.cpu._layout import EMBEDDING, HEAD
from foretell.backends.cpu._tensor import TensorSource

DTYPES = ("float32", "bfloat16", "int8", "native")
_WORTH_A_NOTE = 2_000_000_000  # bytes that take seconds to read
_ROWS_AT_ONCE = 1024  # rows decoded at a time, which bounds what loading needs above the weights
_ALIGNMENT = 64  # a cache line: vectors then never straddle two

_MATRICES = (
    ("self_attn.q_proj", at.Q_W, at.Q_KIND, at.Q_BIAS),
    ("self_attn.k_proj", at.K_W, at.K_KIND, at.K_BIAS),
    ("self_attn.v_proj", at.V_W, at.V_KIND, at.V_BIAS),
    ("self_attn.o_proj", at.O_W, at.O_KIND, at.O_BIAS),
    ("mlp.gate_proj", at.GATE_W, at.GATE_KIND, at.GATE_BIAS),
    ("mlp.up_proj", at.UP_W, at.UP_KIND, at.UP_BIAS),
    ("mlp.down_proj", at.DOWN_W, at.DOWN_KIND, at.DOWN_BIAS),
)
_VECTORS = (
    ("input_layernorm", at.NORM_1),
    ("post_attention_layernorm", at.NORM_2),
    ("self_attn.q_norm", at.Q_NORM),
    ("self_attn.k_norm", at.K_NORM),
)


class Weights:
    """All tensors of a decoder; vectors (norms, biases) stay in float32.

    ``dtype``: "float32"; "bfloat16", rounded to nearest; "int8", groups of 32 with a scale of
    their own (GGUF's Q8_0, made here); or "native", each matrix in its file's own format.

    Raises InsufficientMemoryError before reading anything.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, progress: Callable[[str], None] | None = None
    ) -> None:
        plans = {name: _plan(source, dtype) for name, source in checkpoint.tensors.items()}
        self.num_bytes = sum(plan.size for plan in plans.values())
        _check_memory(self.num_bytes, dtype, checkpoint.source)
        if progress is not None and self.num_bytes > _WORTH_A_NOTE:
            progress(f"reading {self.num_bytes / 1e6:.0f} MB of {dtype} weights")
        self._arrays = _read_all(plans)
        self._kinds = {name: plan.kind for name, plan in plans.items()}
        self.layers = np.zeros((checkpoint.config.num_layers, at.LAYER_WIDTH), dtype=np.int64)
        for index, row in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name, column in _VECTORS:
                row[column] = self.address(f"{prefix}{name}.weight")
            for name, column, kind, bias in _MATRICES:
                row[column] = self.address(f"{prefix}{name}.weight")
                row[kind] = self._kinds[f"{prefix}{name}.weight"]
                row[bias] = self.address(f"{prefix}{name}.bias")
        head = HEAD if HEAD in self._arrays else EMBEDDING
        self.embedding, self.embedding_kind = self.address(EMBEDDING), self._kinds[EMBEDDING]
        self.head, self.head_kind = self.address(head), self._kinds[head]
        self.final_norm = self.address("model.norm.weight")

    def fingerprint(self) -> str:
        """Tells models apart by shapes, formats and the beginning of every tensor."""
        digest = hashlib.sha256()
        for name in sorted(self._arrays):
            array = self._arrays[name]
            digest.update(f"{name} {self._kinds[name]} {array.shape}".encode())
            digest.update(array.reshape(-1)[:256].tobytes())
        return digest.hexdigest()[:16]

    def address(self, name: str) -> int:
        """Where a tensor lies, 0 if there is none."""
        array = self._arrays.get(name)
        return 0 if array is None else int(array.ctypes.data)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialized C-ordered array that starts on a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; the values must be finite."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def to_q8_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows as GGUF's Q8_0: groups of 32 signed bytes, each with its scale, the largest / 127.

    The scale is rounded to half precision first and the numbers divided by what it became. A
    last group is filled up with zeros; a group of zeros has the scale 0.
    """
    rows, width = values.shape
    groups = -(-width // 32)
    if width % 32:
        values = np.pad(values, ((0, 0), (0, groups * 32 - width)))
    values = values.reshape(rows, groups, 32)
    scale = (np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    divisor = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        quants = np.where(divisor > 0, np.rint(values / divisor), 0).clip(-127, 127)
    blocks = np.empty((rows, groups, 34), np.uint8)
    blocks[..., :2] = scale.view(np.uint8)
    blocks[..., 2:] = quants.astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, groups * 34)


@dataclass(frozen=True)
class _Plan:
    """How a tensor will lie in memory."""

    source: TensorSource
    kind: int
    dtype: npt.DTypeLike
    shape: tuple[int, ...]
    convert: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]] | None
    """From float32 rows; None takes the stored bytes as they are."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


_STORED_KINDS = {
    "F16": F16,
    "BF16": BF16,
    "Q8_0": Q8_0,
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
}
_HALF_AT = {  # where a block's half-precision numbers lie
    Q8_0: slice(0, 2),
    Q4_0: slice(0, 2),
    Q4_1: slice(0, 4),
    Q4_K: slice(0, 4),
    Q5_K: slice(0, 4),
    Q6_K: slice(208, 210),
}


def _plan(source: TensorSource, dtype: str) -> _Plan:
    if len(source.shape) == 1:  # padded with zeros to whole vectors of 8
        return _Plan(source, F32, np.float32, ((source.shape[0] + 7) // 8 * 8,), _same)
    rows, width = source.shape
    if dtype == "bfloat16":
        return _Plan(source, BF16, np.uint16, source.shape, to_bfloat16)
    if dtype == "int8":
        shape = (rows, row_bytes(Q8_0, width))
        return _Plan(source, Q8_0, np.uint8, shape, to_q8_0)
    kind = _STORED_KINDS.get(source.dtype_name) if dtype == "native" else None
    if kind is None:  # also where there is no kernel for a format: exact, only larger
        return _Plan(source, F32, np.float32, source.shape, _same)
    return _Plan(source, kind, np.uint8, (rows, row_bytes(kind, width)), None)


def _same(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return values


def _read_all(plans: Mapping[str, _Plan]) -> dict[str, npt.NDArray[Any]]:
    """Every tensor, one behind the other in one block of memory.

    One large block, because the system backs it with large pages; in many small ones a step
    spends a third of its time looking up addresses.
    """
    places: dict[str, int] = {}
    end = 0
    for name, plan in plans.items():
        places[name] = end
        end = (end + plan.size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    block = aligned_empty((end + _ALIGNMENT,), np.uint8)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, plan in plans.items():
        raw = block[places[name] : places[name] + plan.size]
        array = raw.view(plan.dtype).reshape(plan.shape)
        if array.ndim == 1:
            array[:] = 0
        length = plan.source.shape[0]
        for row in range(0, length, _ROWS_AT_ONCE):
            rows = slice(row, min(row + _ROWS_AT_ONCE, length))
            if plan.convert is None:
                array[rows] = _stored(plan, rows)
            else:
                array[rows] = plan.convert(plan.source.read(rows))
        arrays[name] = array
    return arrays


def _stored(plan: _Plan, rows: slice) -> npt.NDArray[np.uint8]:
    """Rows of a tensor as their file has them, checked for numbers that are none."""
    raw = np.ascontiguousarray(plan.source.raw(rows))
    raw = raw.view(np.uint8).reshape(raw.shape[0], -1)
    if plan.kind == BF16:
        finite = (raw.view(np.uint16) & 0x7F80) != 0x7F80
    elif plan.kind == F16:
        finite = np.isfinite(raw.view(np.float16))
    else:
        blocks = raw.reshape(len(raw), -1, FORMATS[plan.kind].size)[..., _HALF_AT[plan.kind]]
        finite = np.isfinite(np.ascontiguousarray(blocks).view(np.float16))
    if not finite.all():
        raise CorruptModelError(
            f"{plan.source.file}: the tensor {plan.source.name} holds a NaN or an infinity in rows "
            f"{rows.start} to {rows.stop - 1}, so nothing computed with it means anything; "
            "download the model again"
        )
    return raw


def _check_memory(needed: int, dtype: str, source: str) -> None:
    needed += 200_000_000  # a cache, buffers, compiled code
    available = available_memory()
    if needed > available:
        smaller = ""
        if dtype == "float32":
            smaller = (
                "; try bfloat16, which takes half, or int8, which takes a quarter (dtype=..., "
                "--dtype)"
            )
        raise InsufficientMemoryError(
            f"{source} needs {needed / 1e9:.1f} GB in {dtype}, and {available / 1e9:.1f} GB of "
            f"memory are available{smaller or '; use a smaller model'}"
        )
