"""Ctrl-C as a request to stop, instead of an exception at a random place."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """While entered, the first Ctrl-C sets ``requested``; a second one raises KeyboardInterrupt.

    So a step in progress is finished, its tokens are shown and the cache stays consistent. Outside
    the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self) -> bool:
        """Whether to stop; what the engine asks at every step."""
        return self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
