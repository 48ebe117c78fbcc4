"""The largest logits of every row, found while they are still in the cache of the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from foretell._kernel_cache import Kernel
from foretell._model import FloatArray

Ints = npt.NDArray[np.int32]


def _largest(rows: Any, ids: Any, values: Any) -> None:
    """Write the largest of each row, in falling order; of equal ones that of the smallest id.

    NaN counts as minus infinity. Eight values are looked at together, and only where one of them
    is larger than the smallest of those found so far are they looked at one by one.
    """
    k = ids.shape[1]
    size = rows.shape[1]
    for r in range(rows.shape[0]):
        row, best, at = rows[r], values[r], ids[r]
        best[:] = -np.inf
        at[:] = -1
        least = np.float32(-np.inf)
        full = False
        start = 0
        while start < size:
            stop = min(start + 64, size)
            if full and stop - start == 64:
                part = row[start:stop]
                larger = np.int32(0)
                for i in range(64):
                    larger += np.int32(part[i] > least)
                if larger == 0:
                    start = stop
                    continue
            for i in range(start, stop):
                value = row[i]
                if value > least or (not full and not value > least):
                    place = k - 1
                    while place > 0 and (at[place - 1] < 0 or value > best[place - 1]):
                        best[place] = best[place - 1]
                        at[place] = at[place - 1]
                        place -= 1
                    best[place] = value if value == value else -np.inf
                    at[place] = i
                    full = at[k - 1] >= 0
                    least = best[k - 1]
            start = stop


_kernel = Kernel(
    _largest,
    types.void(
        types.Array(types.float32, 2, "C", readonly=True),
        types.int32[:, ::1],
        types.float32[:, ::1],
    ),
)


def largest(rows: FloatArray, k: int) -> tuple[Ints, FloatArray]:
    """The ids of the ``k`` largest values of each row, and these, largest first: (rows, k) each.

    Of equal values the one of the smallest id comes first; NaN counts as minus infinity.
    """
    ids = np.empty((len(rows), k), np.int32)
    values = np.empty((len(rows), k), np.float32)
    _kernel.prepare()(np.ascontiguousarray(rows, np.float32), ids, values)
    return ids, values
