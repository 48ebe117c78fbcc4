"""Ctrl-C as a request to stop, instead of an exception at a random place."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

INTERRUPTED = 130
"""The exit code of Ctrl-C."""


@contextmanager
def leaving_at_ctrl_c() -> Iterator[None]:
    """While entered, Ctrl-C ends the process on the spot: nothing has begun that needs an end.

    Until ``raising_at_ctrl_c``. Where Ctrl-C is ignored or somebody else's, it stays so.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def raising_at_ctrl_c() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_ctrl_c() -> None:
    """For the moment in which Python ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\n")
    os._exit(INTERRUPTED)


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
