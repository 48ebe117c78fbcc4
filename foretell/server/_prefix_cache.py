"""Beginnings of earlier prompts, kept so that they need not be read again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foretell._model import Model, Session

LEAST_SHARED = 16
"""Tokens below which a common beginning is not worth a copy of its page."""


@dataclass
class _Entry:
    owner: str
    tokens: bytes
    session: Session
    size: int


class PrefixCache:
    """Sessions of finished prompts and answers, each owner's apart, the latest used kept longest.

    A lookup forks the session that shares the longest beginning with a prompt and rolls the fork
    back to where they part. Rows are invariant, so what is computed from there has the same bits as
    if the whole prompt had been read. ``max_bytes`` bounds the memory; shared pages count for every
    entry that holds them, so it is never exceeded.

    Nobody is ever given a session of another owner, so how long a prompt takes tells nothing of
    what others have asked. Not safe to use from several threads.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._of_owner: dict[str, list[int]] = {}
        self._next = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, owner: str, prompt: Sequence[int]) -> Session | None:
        """A session that holds the longest known beginning of ``prompt``, but not all of it."""
        wanted = _packed(prompt)
        best, found = LEAST_SHARED - 1, None
        for key in self._of_owner.get(owner, ()):
            shared = min(_common(self._entries[key].tokens, wanted), len(prompt) - 1)
            if shared > best and self._usable(self._entries[key], shared):
                best, found = shared, key
        if found is None:
            return None
        self._entries.move_to_end(found)
        session = self._entries[found].session.fork()
        if session.length > best:
            session.rollback(session.length - best)
        return session

    def add(self, owner: str, tokens: Sequence[int], session: Session) -> None:
        """Keep ``session``, which nobody else uses any more, and the ``tokens`` that it holds."""
        assert session.length == len(tokens)
        packed = _packed(tokens)
        size = positions_for(self._model, len(tokens)) * self._model.position_bytes
        if len(tokens) < LEAST_SHARED or size > self._max_bytes:
            return
        for key in list(self._of_owner.get(owner, ())):
            known = self._entries[key].tokens
            if known.startswith(packed):
                self._entries.move_to_end(key)
                return
            if packed.startswith(known):
                self._remove(key)
        self.shrink(self._max_bytes - size)
        self._entries[self._next] = _Entry(owner, packed, session, size)
        self._of_owner.setdefault(owner, []).append(self._next)
        self._next += 1
        self.num_bytes += size

    def shrink(self, max_bytes: int) -> None:
        """Forget what was not used for longest, until so many bytes are left."""
        while self._entries and (self.num_bytes > max_bytes or len(self) >= MOST_ENTRIES):
            self._remove(next(iter(self._entries)))

    def _usable(self, entry: _Entry, shared: int) -> bool:
        return self._model.capabilities.rollback or shared == entry.session.length

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.num_bytes -= entry.size
        self._of_owner[entry.owner].remove(key)
        if not self._of_owner[entry.owner]:
            del self._of_owner[entry.owner]


MOST_ENTRIES = 256


def positions_for(model: Model, tokens: int) -> int:
    """Positions that a session of so many tokens can hold memory for, what it shares included.

    One granule more than the tokens fill: the page that a fork shares in part is copied.
    """
    granule = model.position_granule
    return ((tokens + granule - 1) // granule + 1) * granule


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """How many tokens two packed texts have in common at their beginnings."""
    width = array("i").itemsize
    low, high = 0, min(len(one), len(other)) // width
    if one[: high * width] == other[: high * width]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * width : middle * width] == other[low * width : middle * width]:
            low = middle
        else:
            high = middle
    return low
