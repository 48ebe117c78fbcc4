"""Ctrl-C as a request to stop, instead of an exception at a random place."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While entered, the first Ctrl-C sets ``requested``; a second one raises KeyboardInterrupt.

    So a step in progress is finished, its tokens are shown and the cache stays consistent. Where
    Ctrl-C is ignored (a shell's background jobs), it stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = signal.SIG_IGN

    def __enter__(self) -> Self:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self) -> bool:
        """Whether to stop; what the engine asks at every step."""
        return self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
