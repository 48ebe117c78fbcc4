"""The arrays a pass works in, and how its attention is cut into jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foretell.backends.cpu import _pass as at
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._kernels import BLOCK, TILE_OUTPUTS
from foretell.backends.cpu._weights import aligned_empty

if TYPE_CHECKING:
    from foretell.backends.cpu._model import Batch

MAX_ROWS = (
    128  # rows in one go: enough to share each read of the weights, few enough to stay cached
)
_SPLIT_ROWS = 32  # with more rows than this there is work enough for all threads without splitting
_FEW_JOB_ROWS = 4  # of one job where there are few rows: enough to share a reading of the cache
_SPLIT_BYTES = 64_000_000  # most memory for partial results


class Buffers:
    """Grown when a pass needs more, and reused: passes take turns."""

    max_rows = MAX_ROWS

    def __init__(self, config: DecoderConfig, threads: int) -> None:
        self._config = config
        self._threads = threads
        self._rows = 0
        self._partial_floats = 0
        self._arrays: dict[int, npt.NDArray[np.float32]] = {}
        padded_head = (config.head_dim + 7) // 8 * 8
        self._part_floats = padded_head + 8
        widest = max(
            config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        )
        group = config.num_heads // config.num_kv_heads
        attention = (
            BLOCK * (config.head_dim + padded_head)  # a tree node's keys and values
            + at.JOB_ROWS * group * BLOCK  # scores
            + at.VALUE_QUERIES * self._part_floats  # results to fold
        )
        floats = max(attention, TILE_OUTPUTS * _padded(widest))
        self._scratch_floats = (floats + 1023) // 1024 * 1024
        self._scratch = aligned_empty((threads, self._scratch_floats), np.float32)

    def plan_attention(
        self, batch: Batch, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Jobs for rows ``start`` to ``stop``, relative to ``start``, and the parts they need.

        Either one job for all blocks of some rows, or, where that would leave threads idle, one
        for each block, whose results are folded afterwards in the same order: the same bits.
        """
        rows, heads = stop - start, self._config.num_heads
        groups: list[tuple[int, int, int]] = []
        for first, last in zip(batch.starts, batch.starts[1:], strict=False):
            begin, end = max(first, start), min(last, stop)
            most_rows = at.JOB_ROWS if rows > _SPLIT_ROWS else _FEW_JOB_ROWS
            count = -(-(end - begin) // most_rows)
            for job in range(count):  # of equal size, so that threads finish together
                low = begin + (end - begin) * job // count
                high = begin + (end - begin) * (job + 1) // count
                blocks = int(batch.positions[low:high].max()) // BLOCK + 1
                groups.append((low - start, high - start, blocks))
        most = max(blocks for _, _, blocks in groups)
        split = (
            most > 1
            and rows <= _SPLIT_ROWS
            and len(groups) * self._config.num_kv_heads < 3 * self._threads
            and 4 * rows * heads * most * self._part_floats <= _SPLIT_BYTES
        )
        if split:
            jobs = [
                (first, last, block, block + 1)
                for first, last, blocks in groups
                for block in range(blocks)
            ]
        else:
            jobs = [(first, last, 0, blocks) for first, last, blocks in groups]
        return np.array(jobs, np.int64), most if split else 1

    def reserve(self, rows: int, parts: int) -> None:
        """Make room for a pass of ``rows`` rows with ``parts`` partial results a row and head."""
        config = self._config
        if rows > self._rows:
            capacity = min(MAX_ROWS, max(rows, 2 * self._rows))
            widths = {
                at.X: _padded(config.hidden_size),
                at.NORMED: _padded(config.hidden_size),
                at.PROJECTED: _padded(config.hidden_size),
                at.QKV: (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
                at.ATTENTION: _padded(config.num_heads * config.head_dim),
                at.GATE: _padded(config.intermediate_size),
                at.UP: _padded(config.intermediate_size),
            }
            larger = {
                name: aligned_empty((capacity, width), np.float32) for name, width in widths.items()
            }
            for array in larger.values():
                array[:] = 0  # the padding takes part in sums
            self._arrays.update(larger)
            self._rows = capacity  # last, when all of it is there
        floats = rows * config.num_heads * parts * self._part_floats
        if floats > self._partial_floats:
            self._arrays[at.PARTIALS] = aligned_empty((floats,), np.float32)
            self._partial_floats = floats

    def fill(self, p: npt.NDArray[np.int64]) -> None:
        """Put the addresses into a pass's parameters."""
        for name, array in self._arrays.items():
            p[name] = array.ctypes.data
        p[at.SCRATCH] = self._scratch.ctypes.data
        p[at.SCRATCH_SIZE] = 4 * self._scratch_floats


def _padded(n: int) -> int:
    """Rows of activations end with zeros, up to a whole block of 32 weights."""
    return (n + 31) // 32 * 32
