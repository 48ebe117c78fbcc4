"""A tiny model whose next token depends on the last few tokens alone, by a table.

Exact, instant and honest about its cache: the double to test drafters, rules and engines with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foretell._errors import InputError
from foretell._model import (
    Capabilities,
    FloatArray,
    Model,
    Output,
    Rows,
    Session,
    check_path,
    check_rows,
)


class TableModel(Model):
    """Logits looked up by the last ``order`` tokens.

    ``table`` has ``order`` + 1 axes of vocab_size: ``table[a, b]`` are the logits after the
    tokens a, b. Positions before the sequence count as token 0.
    """

    def __init__(
        self,
        table: FloatArray,
        *,
        max_length: int = 4096,
        eos_token_ids: Sequence[int] = (),
        capabilities: Capabilities | None = None,
    ) -> None:
        table = np.ascontiguousarray(table, dtype=np.float32)
        if table.ndim < 2 or len(set(table.shape)) != 1:
            raise InputError(f"a table needs equal axes, at least two; got shape {table.shape}")
        self.table = table
        self.order = table.ndim - 1
        self.vocab_size = table.shape[0]
        self.max_length = max_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.capabilities = capabilities or Capabilities()
        self.num_passes = 0

    @classmethod
    def random(
        cls, vocab_size: int, order: int = 2, *, seed: int = 0, max_length: int = 4096
    ) -> TableModel:
        """A table of normal logits."""
        rng = np.random.default_rng(seed)
        shape = (vocab_size,) * (order + 1)
        return cls(rng.normal(size=shape).astype(np.float32), max_length=max_length)

    def new_session(self) -> TableSession:
        return TableSession(self)

    def forward(self, rows: Sequence[Rows]) -> Output:
        check_rows(self, rows)
        sessions = [self._own(part.session) for part in rows]
        self.num_passes += 1
        logits: list[FloatArray] = []
        bounds: list[tuple[int, int]] = []
        for part, session in zip(rows, sessions, strict=True):
            paths = session.append(part.tokens, part.parents)
            wanted = {"all": paths, "last": paths[-1:], "none": []}[part.logits]
            bounds.append((len(logits), len(logits) + len(wanted)))
            logits.extend(self.table[self._key(path)] for path in wanted)
        stacked = np.array(logits, dtype=np.float32).reshape(len(logits), self.vocab_size)
        return Output(stacked, bounds=tuple(bounds))

    def _own(self, session: Session) -> TableSession:
        if not isinstance(session, TableSession) or session.model is not self:
            raise InputError("the session belongs to another model")
        return session

    def _key(self, path: Sequence[int]) -> tuple[int, ...]:
        return tuple([0] * self.order + list(path))[-self.order :]


@dataclass
class TableSession(Session):
    """The tokens themselves are the cache."""

    model: TableModel
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[list[int]]:
        """Add nodes; returns for each the tokens up to and including it."""
        self.pending = list(tokens)
        self.parents = list(range(-1, len(tokens) - 1) if parents is None else parents)
        paths: list[list[int]] = []
        for token, parent in zip(self.pending, self.parents, strict=True):
            paths.append([*(self.tokens if parent < 0 else paths[parent]), token])
        return paths

    def keep(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self.parents, len(self.pending))
        if len(nodes) < len(self.pending):
            self.model.capabilities.require("rollback")
        self.tokens.extend(self.pending[node] for node in nodes)
        self.pending, self.parents = [], []

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self.length:
            raise InputError(f"cannot roll back {n} of {self.length} positions")
        if n:
            self.model.capabilities.require("rollback")
        del self.tokens[self.length - n :]
        self.pending, self.parents = [], []

    def fork(self) -> TableSession:
        return TableSession(self.model, list(self.tokens))

    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        kept = np.array(self.tokens, dtype=np.float32).reshape(1, 1, -1, 1)
        return kept, kept
