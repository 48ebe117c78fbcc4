"""The weights in memory: one aligned, C-ordered array a tensor, and the table that points there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from foretell._errors import InsufficientMemoryError
from foretell.backends.cpu import _pass as at
from foretell.backends.cpu._checkpoint import Checkpoint
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._layout import EMBEDDING, HEAD, expected_tensors
from foretell.backends.cpu._simd import BF16, F32

KINDS = {"float32": F32, "bfloat16": BF16}
_ITEM_SIZE = {"float32": 4, "bfloat16": 2}
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
    """All tensors of a decoder in ``dtype``; vectors (norms, biases) stay in float32.

    Raises InsufficientMemoryError before reading anything.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, progress: Callable[[str], None] | None = None
    ) -> None:
        self.kind = KINDS[dtype]
        self.num_bytes = weight_bytes(checkpoint.config, dtype)
        _check_memory(self.num_bytes, dtype, checkpoint.source)
        if progress is not None:
            progress(f"reading {self.num_bytes / 1e6:.0f} MB of {dtype} weights")
        self._arrays = _read_all(checkpoint, self.kind)
        self.layers = np.zeros((checkpoint.config.num_layers, at.LAYER_WIDTH), dtype=np.int64)
        for index, row in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name, column in _VECTORS:
                row[column] = self.address(f"{prefix}{name}.weight")
            for name, column, kind, bias in _MATRICES:
                row[column] = self.address(f"{prefix}{name}.weight")
                row[kind] = self.kind
                row[bias] = self.address(f"{prefix}{name}.bias")
        self.embedding = self.address(EMBEDDING)
        self.head = self.address(HEAD) or self.embedding
        self.final_norm = self.address("model.norm.weight")

    def address(self, name: str) -> int:
        """Where a tensor lies, 0 if there is none."""
        array = self._arrays.get(name)
        return 0 if array is None else int(array.ctypes.data)


def weight_bytes(config: DecoderConfig, dtype: str) -> int:
    """Memory the weights take in ``dtype``."""
    shapes = expected_tensors(config).values()
    return sum(
        int(np.prod(shape)) * (_ITEM_SIZE[dtype] if len(shape) == 2 else 4) for shape in shapes
    )


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


def _read_all(checkpoint: Checkpoint, kind: int) -> dict[str, npt.NDArray[Any]]:
    """Every tensor, one behind the other in one block of memory.

    One large block, because the system backs it with large pages; in many small ones a step
    spends a third of its time looking up addresses.
    """
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, source in checkpoint.tensors.items():
        matrix = len(source.shape) == 2
        size = int(np.prod(source.shape)) * (2 if matrix and kind == BF16 else 4)
        places[name] = (end, size)
        # Room for a vector's padding, and the next tensor on a cache line.
        end = (end + size + 32 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    block = aligned_empty((end,), np.uint8)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, source in checkpoint.tensors.items():
        start, size = places[name]
        if len(source.shape) == 2:
            dtype = np.float32 if kind == F32 else np.uint16
            array = block[start : start + size].view(dtype).reshape(source.shape)
            for row in range(0, source.shape[0], _ROWS_AT_ONCE):
                rows = slice(row, min(row + _ROWS_AT_ONCE, source.shape[0]))
                values = source.read(rows)
                array[rows] = values if kind == F32 else to_bfloat16(values)
        else:  # vectors stay in float32, padded with zeros to whole vectors of 8
            array = block[start : start + size + 32].view(np.float32)
            array[:] = 0
            array[: source.shape[0]] = source.read()
        arrays[name] = array
    return arrays


def _check_memory(needed: int, dtype: str, source: str) -> None:
    needed += 200_000_000  # a cache, buffers, compiled code
    available = psutil.virtual_memory().available
    if needed > available:
        smaller = "; try dtype='bfloat16', which takes half" if dtype == "float32" else ""
        raise InsufficientMemoryError(
            f"{source} needs {needed / 1e9:.1f} GB in {dtype}, and {available / 1e9:.1f} GB of "
            f"memory are available{smaller or '; use a smaller model'}"
        )
