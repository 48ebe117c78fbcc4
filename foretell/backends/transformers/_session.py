"""Sessions of the transformers backend: one sequence's cache each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell._errors import CapabilityError, InputError
from foretell._model import FloatArray, Session, check_path
from foretell.backends.transformers._cache import LayerCache

if TYPE_CHECKING:
    from foretell.backends.transformers._model import TransformersModel


class TransformersSession(Session):
    """Keys and values of every layer, all positions of them; rolled back by forgetting the end."""

    def __init__(self, model: TransformersModel, layers: Sequence[LayerCache]) -> None:
        self.model = model
        self.layers = layers
        self.tokens: list[int] = []
        """What is committed; whoever has the same tokens has the same cache."""
        self._pending: list[int] = []
        self._parents: Sequence[int] | None = None
        model.sessions.add(self)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def reserve(self, count: int) -> None:
        """Room for ``count`` more positions."""
        for layer in self.layers:
            layer.reserve(self.length + count, self.length)

    def add(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        """The speculative nodes a pass has added."""
        self._pending = [int(token) for token in tokens]
        self._parents = None if parents is None else list(parents)

    def keep(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self._parents, len(self._pending))
        slots = [self.length + node for node in nodes]
        with torch.inference_mode():
            for layer in self.layers:
                layer.move(slots, self.length)
        self.tokens += [self._pending[node] for node in nodes]
        self._pending, self._parents = [], None

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self.length:
            raise InputError(f"cannot roll back {n} of {self.length} positions")
        del self.tokens[self.length - n :]
        self._pending, self._parents = [], None

    def fork(self) -> TransformersSession:
        with torch.inference_mode():
            other = TransformersSession(
                self.model, [layer.copy(self.length) for layer in self.layers]
            )
        other.tokens = list(self.tokens)
        return other

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        if len({(layer.past(0)[0].shape, layer.past(0)[1].shape) for layer in self.layers}) > 1:
            raise CapabilityError("the layers' caches have different shapes; there is no one array")
        past = [layer.past(self.length) for layer in self.layers]
        with torch.inference_mode():
            keys, values = (
                torch.cat([pair[side] for pair in past]).float().cpu().contiguous().numpy()
                for side in range(2)
            )
        return keys, values


class PlainSession(Session):
    """A cache of transformers' own that can only grow: for plain decoding."""

    def __init__(self, model: TransformersModel, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self._length = 0
        self._pending = 0

    @property
    def length(self) -> int:
        return self._length

    def add(self, count: int) -> None:
        """Rows that a pass has added; they cannot be taken back."""
        self._pending = count

    def check_no_rows_waiting(self) -> None:
        """Raise CapabilityError where rows of the last pass would have to be dropped."""
        if self._pending:
            self.model.capabilities.require("rollback")

    def keep(self, nodes: Sequence[int]) -> None:
        check_path(nodes, None, self._pending)
        if len(nodes) < self._pending:
            self.model.capabilities.require("rollback")
        self._length += len(nodes)
        self._pending = 0

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._length:
            raise InputError(f"cannot roll back {n} of {self._length} positions")
        if n or self._pending:
            self.model.capabilities.require("rollback")

    def fork(self) -> PlainSession:
        import copy

        other = PlainSession(self.model, copy.deepcopy(self.cache))
        other._length = self._length
        return other

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        if self._length == 0:
            empty = np.zeros((0, 0, 0, 0), np.float32)
            return empty, empty
        raise CapabilityError("this model's cache is not made of keys and values alone")
