"""Keys and values of a session, and what a pass tells transformers of them.

Every layer keeps all positions, also those behind a sliding window: then dropping speculative
nodes, rolling back and a block that crosses the window are exact by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from foretell._model import Rows, depths, is_chain
from foretell.backends.cpu._operators import JOB_WIDTH
from foretell.backends.transformers._operators import JOB_ROWS

if TYPE_CHECKING:
    from foretell.backends.transformers._session import TransformersSession

_AT_LEAST = 64  # positions to make room for


class LayerShape(NamedTuple):
    """What a layer keeps for a position."""

    kv_heads: int
    dim: int
    value_dim: int


class LayerCache:
    """One layer's keys (kv_heads, capacity, dim) and values (kv_heads, capacity, padded dim)."""

    __slots__ = ("_shape", "capacity", "keys", "values")

    def __init__(self, shape: LayerShape, like: Tensor) -> None:
        self._shape = shape
        self.capacity = 0
        self.keys = like.new_empty((shape.kv_heads, 0, shape.dim))
        self.values = like.new_empty((shape.kv_heads, 0, (shape.value_dim + 7) // 8 * 8))

    def reserve(self, positions: int, length: int) -> None:
        """Room for ``positions``; the first ``length`` are kept."""
        if positions <= self.capacity:
            return
        capacity = max(positions, 2 * self.capacity, _AT_LEAST)
        keys = self.keys.new_zeros((self.keys.shape[0], capacity, self.keys.shape[2]))
        values = self.values.new_zeros((self.values.shape[0], capacity, self.values.shape[2]))
        keys[:, :length] = self.keys[:, :length]
        values[:, :length] = self.values[:, :length]
        self.keys, self.values, self.capacity = keys, values, capacity

    def write(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Put (kv_heads, rows, dim) keys and values at position ``at`` and behind."""
        rows = keys.shape[1]
        self.keys[:, at : at + rows] = keys
        self.values[:, at : at + rows, : self._shape.value_dim] = values

    def past(self, end: int) -> tuple[Tensor, Tensor]:
        """(1, kv_heads, end, dim) keys and values, as views."""
        return (
            self.keys[None, :, :end],
            self.values[None, :, :end, : self._shape.value_dim],
        )

    def move(self, slots: Sequence[int], to: int) -> None:
        """Gather positions ``slots`` to ``to`` and behind."""
        if list(slots) == list(range(to, to + len(slots))):
            return
        index = torch.tensor(slots).to(self.keys.device, non_blocking=True)
        self.keys[:, to : to + len(slots)] = self.keys[:, index]
        self.values[:, to : to + len(slots)] = self.values[:, index]

    def copy(self, length: int) -> LayerCache:
        """The first ``length`` positions in memory of their own."""
        other = LayerCache(self._shape, self.keys)
        other.reserve(length, 0)
        other.keys[:, :length] = self.keys[:, :length]
        other.values[:, :length] = self.values[:, :length]
        return other


@dataclass
class Part:
    """One session's rows in a pass: ``start`` to ``stop``, behind ``prefix`` positions."""

    session: TransformersSession
    start: int
    stop: int
    prefix: int
    parents: Sequence[int] | None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Slots in use once the rows are there."""
        return self.prefix + self.count


class Pass:
    """What the attention of one pass needs to know."""

    def __init__(
        self,
        rows: Sequence[Rows],
        sessions: Sequence[TransformersSession],
        shapes: Sequence[LayerShape],
        windows: Sequence[int | None],
        device: torch.device,
        exact: bool,
    ) -> None:
        self.shapes, self.windows, self.exact, self.device = shapes, windows, exact, device
        self.updated: int | None = None
        """The layer whose keys and values were added last, until its attention ran."""
        self.added: tuple[Tensor, Tensor] | None = None
        """Those keys and values, of all rows."""
        ends = np.cumsum([0, *(len(part.tokens) for part in rows)]).tolist()
        self.parts = [
            Part(session, start, stop, session.length, _tree(part.parents))
            for (start, stop), session, part in zip(pairwise(ends), sessions, rows, strict=True)
        ]
        self.positions = np.concatenate(
            [part.prefix + np.asarray(depths(part.parents, part.count)) for part in self.parts]
        ).astype(np.int64)
        self.device_positions = torch.from_numpy(self.positions).to(device, non_blocking=True)
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        if exact:
            self._plan()

    def _plan(self) -> None:
        """The tables of the attention kernel; a layer adds where its keys and values lie."""
        paths = np.zeros(len(self.positions), np.int64)
        self._paths: list[np.ndarray[Any, Any]] = []
        jobs, owners = [], []
        for index, part in enumerate(self.parts):
            if part.parents is not None:
                found: list[np.ndarray[Any, Any]] = []
                for node, parent in enumerate(part.parents):
                    before = found[parent] if parent >= 0 else np.zeros(0, np.int64)
                    found.append(np.append(before, part.prefix + node))
                paths[part.start : part.stop] = [path.ctypes.data for path in found]
                self._paths += found  # the addresses are good for as long as these live
            for first in range(part.start, part.stop, JOB_ROWS):
                last = min(first + JOB_ROWS, part.stop)
                jobs.append((first, last, 0, 0, 0, 0, part.prefix, 0))
                owners.append(index)
        self._jobs = np.array(jobs, np.int64).reshape(-1, JOB_WIDTH)
        self._owners = np.array(owners)
        self._tables = tuple(
            torch.from_numpy(table) for table in (self._jobs, self.positions, paths)
        )

    def tables(self, layer: int) -> tuple[Tensor, ...]:
        """Jobs, positions and paths for the kernel, of one layer."""
        places = np.array(
            [
                (
                    cache.keys.data_ptr(),
                    cache.values.data_ptr(),
                    4 * cache.keys.stride(0),
                    4 * cache.values.stride(0),
                )
                for cache in (part.session.layers[layer] for part in self.parts)
            ],
            np.int64,
        )
        self._jobs[:, 2:6] = places[self._owners]
        return self._tables

    def mask(self, part: Part, window: int | None) -> Tensor | None:
        """What each row of a part sees, (rows, end) bool; None: everything."""
        key = (part.start, window)
        if key not in self._masks:
            seen = sees(part.parents, part.count, part.prefix, window)
            self._masks[key] = (
                None if seen.all() else torch.from_numpy(seen).to(self.device, non_blocking=True)
            )
        return self._masks[key]


def _tree(parents: Sequence[int] | None) -> Sequence[int] | None:
    """The parents of a real tree; None for a chain."""
    return None if parents is None or is_chain(parents) else parents


def sees(
    parents: Sequence[int] | None, count: int, prefix: int, window: int | None
) -> np.ndarray[Any, Any]:
    """(count, prefix + count) bool: the prefix, ancestors and itself, within the window."""
    own = np.zeros((count, count), bool)
    for node in range(count):
        parent = node - 1 if parents is None else parents[node]
        if parent >= 0:
            own[node] = own[parent]
        own[node, node] = True
    seen = np.concatenate([np.ones((count, prefix), bool), own], axis=1)
    if window is not None:
        depth = np.asarray(depths(parents, count))
        at = np.concatenate([np.arange(prefix), prefix + depth])
        seen &= at[None, :] > (prefix + depth)[:, None] - window
    return seen


class _PackedLayer(CacheLayerMixin):
    """A layer of a pass over many sessions: takes keys and values, and hides the past."""

    is_sliding = False

    def __init__(self, run: Pass, index: int) -> None:
        super().__init__()
        self._run, self._index = run, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        run = self._run
        for part in run.parts:
            part.session.layers[self._index].write(
                part.prefix,
                key_states[0, :, part.start : part.stop],
                value_states[0, :, part.start : part.stop],
            )
        run.updated, run.added = self._index, (key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _OwnLayer(CacheLayerMixin):
    """A layer of a pass over one session, for models that bring their own attention."""

    def __init__(self, cache: LayerCache, length: int, is_sliding: bool) -> None:
        super().__init__()
        self._cache, self._length = cache, length
        self.is_sliding = is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._cache.write(self._length, key_states[0], value_states[0])
        self._length += key_states.shape[2]
        return self._cache.past(self._length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


class PackedCache(Cache):
    """The caches of all sessions of a pass, as one that transformers can fill."""

    def __init__(self, run: Pass) -> None:
        super().__init__(layers=[_PackedLayer(run, index) for index in range(len(run.shapes))])


class OwnCache(Cache):
    """One session's cache, as one that transformers can fill."""

    def __init__(self, session: TransformersSession, windows: Sequence[int | None]) -> None:
        super().__init__(
            layers=[
                _OwnLayer(cache, session.length, window is not None)
                for cache, window in zip(session.layers, windows, strict=True)
            ]
        )
