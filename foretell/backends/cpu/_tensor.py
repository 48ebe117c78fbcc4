"""A stored weight: its shape and type, and how to get float32 rows out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError

Float32Array = npt.NDArray[np.float32]

# Elements decoded at a time: 1 MiB of float32, which stays in the cache while it is checked.
_BLOCK_ELEMENTS = 1 << 18


class TensorSource(ABC):
    """One tensor of a checkpoint, read when asked for.

    `shape` is the logical shape, outermost axis first ((out, in) for a projection), `dtype_name`
    the stored type as its format calls it ("F32", "BF16", "F16", "Q4_1", ...), `name` the canonical
    name for errors.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype_name: str, file: str) -> None:
        self.name = name
        self.shape = shape
        self.dtype_name = dtype_name
        self.file = file

    @abstractmethod
    def raw(self, rows: slice | None = None) -> npt.NDArray[Any]:
        """The stored numbers of some rows, undecoded; often a read-only view of the mapped file.

        float32, float64, float16 or uint16 (the bits of bfloat16) of the logical shape; uint8 of
        shape (rows, bytes per row) for block-quantized types. Rows are in logical order.
        """

    @abstractmethod
    def _decode(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows start..stop as numbers that convert to float32 without surprise."""

    def read(self, rows: slice | None = None) -> Float32Array:
        """Rows as C-contiguous float32, decoded block by block; a vector's rows are its elements.

        Beyond the result, no more than about a megabyte is held. Raises CorruptModelError where a
        weight is not a finite number, and IndexError for a slice with a step.
        """
        start, stop = self._bounds(rows)
        result = np.empty((stop - start, *self.shape[1:]), np.float32)
        width = int(np.prod(self.shape[1:], dtype=np.int64)) if len(self.shape) > 1 else 1
        step = max(1, _BLOCK_ELEMENTS // max(1, width))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            block = result[first - start : last - start]
            # Damaged block scales overflow on the way; the check below reports them.
            with np.errstate(all="ignore"):
                block[...] = self._decode(first, last)
            if not np.isfinite(block).all():
                raise CorruptModelError(
                    f"{self.file}: the tensor {self.name} holds a NaN or an infinity in rows "
                    f"{first} to {last - 1}, so nothing computed with it means anything; "
                    "download the model again"
                )
        return result

    def _bounds(self, rows: slice | None) -> tuple[int, int]:
        start, stop, step = (rows or slice(None)).indices(self.shape[0])
        if step != 1:
            raise IndexError("rows must be consecutive")
        return start, max(start, stop)
