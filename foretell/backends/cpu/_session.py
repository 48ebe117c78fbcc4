"""A sequence's cache, in pages of 64 positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretell._errors import InputError
from foretell._model import FloatArray, Session, check_path
from foretell.backends.cpu._kernels import BLOCK, GROUP

if TYPE_CHECKING:
    from foretell.backends.cpu._model import CpuModel


CACHE_TYPES = {"float32": np.float32, "bfloat16": np.uint16}


def page_type(layers: int, kv_heads: int, head_dim: int, dtype: str) -> np.dtype[Any]:
    """The layout of a page: see ``_kernels``. Values are padded to whole vectors of 8."""
    item = CACHE_TYPES[dtype]
    padded = (head_dim + 7) // 8 * 8
    head = np.dtype(
        [
            ("keys", item, (BLOCK // GROUP, head_dim, GROUP)),
            ("values", item, (BLOCK, padded)),
        ]
    )
    return np.dtype((head, (layers, kv_heads)))


class CpuSession(Session):
    """Pages are added as the sequence grows, so nothing is ever copied to make room.

    Forks share the pages that are full; whoever writes to a shared page copies it first.
    """

    def __init__(self, model: CpuModel) -> None:
        self.model = model
        self._length = 0
        self._pages: list[npt.NDArray[Any]] = []
        self._owned: list[bool] = []
        self.page_addresses = np.zeros(0, dtype=np.int64)
        self._count = 0
        self._parents: Sequence[int] | None = None

    @property
    def length(self) -> int:
        return self._length

    def reserve(self, count: int) -> None:
        """Make room for ``count`` nodes after the committed prefix, all of it writable."""
        self._count = 0  # what was not kept is dropped
        needed = (self._length + count + BLOCK - 1) // BLOCK
        changed = len(self.page_addresses) < needed
        while len(self._pages) < needed:
            self._pages.append(np.empty((), self.model.page_type))
            self._owned.append(True)
        for index in range(self._length // BLOCK, needed):
            if not self._owned[index]:
                self._pages[index] = self._pages[index].copy()
                self._owned[index] = changed = True
        if changed:
            self.page_addresses = np.array([page.ctypes.data for page in self._pages], np.int64)

    def add(self, count: int, parents: Sequence[int] | None) -> None:
        """Nodes were computed and may be kept."""
        self._count, self._parents = count, parents

    def keep(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self._parents, self._count)
        for index, node in enumerate(nodes):
            if node != index:
                self._move(self._length + node, self._length + index)
        self._length += len(nodes)
        self._count = 0

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._length:
            raise InputError(f"cannot roll back {n} of {self._length} positions")
        self._length -= n
        self._count = 0

    def fork(self) -> CpuSession:
        other = CpuSession(self.model)
        other._length = self._length
        used = (self._length + BLOCK - 1) // BLOCK
        self._owned[:used] = [False] * used
        other._pages, other._owned = self._pages[:used], [False] * used
        return other

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        config = self.model.config
        shape = (config.num_layers, config.num_kv_heads, 0, config.head_dim)
        keys, values = [np.empty(shape, np.float32)], [np.empty(shape, np.float32)]
        for page in self._pages:
            keys.append(page["keys"].swapaxes(-1, -2).reshape(*shape[:2], BLOCK, shape[3]))
            values.append(page["values"][..., : shape[3]])
        return self._joined(keys), self._joined(values)

    def _joined(self, parts: list[npt.NDArray[Any]]) -> FloatArray:
        whole = np.concatenate([_as_float32(part) for part in parts], axis=2, dtype=np.float32)
        return whole[:, :, : self._length]

    def _move(self, source: int, target: int) -> None:
        there, here = self._pages[source // BLOCK], self._pages[target // BLOCK]
        a, b = source % BLOCK, target % BLOCK
        here["keys"][..., b // GROUP, :, b % GROUP] = there["keys"][..., a // GROUP, :, a % GROUP]
        here["values"][..., b, :] = there["values"][..., a, :]


def _as_float32(numbers: npt.NDArray[Any]) -> FloatArray:
    if numbers.dtype == np.uint16:  # the bits of bfloat16
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers
