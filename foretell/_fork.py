"""A lock that a forked process can take."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_LOCKS: WeakSet[ForkLock] = WeakSet()


class ForkLock:
    """A ``threading.Lock`` for ``with``, free again in a forked process.

    A fork copies locks as they are, but no thread that could release them: a plain one that
    another thread held at that moment would stay taken for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


def _renew() -> None:
    for lock in list(_LOCKS):
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
