"""A sequence's cache, in pages of 64 positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell._errors import InputError
from foretell._model import FloatArray, Session, check_path
from foretell.backends.cpu._kernels import BLOCK, GROUP

if TYPE_CHECKING:
    from foretell.backends.cpu._model import CpuModel


_SLAB_BYTES = 8 << 20
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


def pages_at_once(page: np.dtype[Any]) -> int:
    """How many pages are allocated together."""
    return -(-_SLAB_BYTES // page.itemsize)


def new_pages(page: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Some pages side by side, that take no memory before they are written.

    NumPy asks for large pages of the system's where an array is large, and with small ones
    a step over a long context would wait for address translation.
    """
    slab = np.empty((pages_at_once(page),), page)
    return (slab[index] for index in range(len(slab)))


class _Pages(NamedTuple):
    """The pages of a sequence. Replaced as a whole, so that an interrupt leaves no half of it."""

    arrays: tuple[npt.NDArray[Any], ...] = ()
    owned: tuple[bool, ...] = ()
    """False for pages that a fork shares."""
    addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class CpuSession(Session):
    """Pages are added as the sequence grows, so nothing is ever copied to make room.

    Forks share the pages that are full; whoever writes to a shared page copies it first.
    """

    def __init__(self, model: CpuModel) -> None:
        self.model = model
        self._length = 0
        self._pages = _Pages()
        self._count = 0
        self._parents: Sequence[int] | None = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def page_addresses(self) -> npt.NDArray[np.int64]:
        """Where the pages lie."""
        return self._pages.addresses

    def reserve(self, count: int) -> None:
        """Make room for ``count`` nodes after the committed prefix, all of it writable."""
        self._count = 0  # what was not kept is dropped
        first = self._length // BLOCK
        needed = (self._length + count + BLOCK - 1) // BLOCK
        there = self._pages
        if needed <= len(there.arrays) and all(there.owned[first:needed]):
            return
        arrays = list(there.arrays)
        while len(arrays) < needed:
            arrays.extend(new_pages(self.model.page_type))
        for index in range(first, min(needed, len(there.arrays))):
            if not there.owned[index]:
                arrays[index] = arrays[index].copy()
        owned = [*there.owned[:first], *[True] * (len(arrays) - first)]
        owned[needed : len(there.owned)] = there.owned[needed:]
        addresses = np.array([page.ctypes.data for page in arrays], np.int64)
        self._pages = _Pages(tuple(arrays), tuple(owned), addresses)

    def add(self, count: int, parents: Sequence[int] | None) -> None:
        """Nodes were computed and may be kept."""
        self._count, self._parents = count, parents

    def keep(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self._parents, self._count)
        self._count = 0  # first: nodes that an interrupt left half moved are nobody's
        for index, node in enumerate(nodes):
            if node != index:
                self._move(self._length + node, self._length + index)
        self._length += len(nodes)

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._length:
            raise InputError(f"cannot roll back {n} of {self._length} positions")
        self._length -= n
        self._count = 0

    def fork(self) -> CpuSession:
        used = (self._length + BLOCK - 1) // BLOCK
        there = self._pages
        shared = (False,) * used
        self._pages = there._replace(owned=shared + there.owned[used:])
        other = CpuSession(self.model)
        other._length = self._length
        other._pages = _Pages(there.arrays[:used], shared, there.addresses[:used])
        return other

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        config = self.model.config
        shape = (config.num_layers, config.num_kv_heads, 0, config.head_dim)
        keys, values = [np.empty(shape, np.float32)], [np.empty(shape, np.float32)]
        for page in self._pages.arrays[: -(-self._length // BLOCK)]:
            keys.append(page["keys"].swapaxes(-1, -2).reshape(*shape[:2], BLOCK, shape[3]))
            values.append(page["values"][..., : shape[3]])
        return self._joined(keys), self._joined(values)

    def _joined(self, parts: list[npt.NDArray[Any]]) -> FloatArray:
        whole = np.concatenate([_as_float32(part) for part in parts], axis=2, dtype=np.float32)
        return whole[:, :, : self._length]

    def _move(self, source: int, target: int) -> None:
        pages = self._pages.arrays
        there, here = pages[source // BLOCK], pages[target // BLOCK]
        a, b = source % BLOCK, target % BLOCK
        here["keys"][..., b // GROUP, :, b % GROUP] = there["keys"][..., a // GROUP, :, a % GROUP]
        here["values"][..., b, :] = there["values"][..., a, :]


def _as_float32(numbers: npt.NDArray[Any]) -> FloatArray:
    if numbers.dtype == np.uint16:  # the bits of bfloat16
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers
