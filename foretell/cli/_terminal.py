"""What people see: the text as it comes, and what is said about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from foretell._result import Event

DRAFTED_STYLE = "green"
NOTE_STYLE = "dim"
PATIENCE = 2.0
"""Seconds that may pass in silence."""

_HARMLESS = "\n\t"
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _HARMLESS}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)  # halves of characters: no UTF-8


def visible(text: str) -> str:
    """``text`` with control characters shown instead of sent.

    A model, or a file name, could otherwise move the cursor, retitle the window or worse.
    """
    return text.translate(_PICTURES)


class Printer(Protocol):
    """Where the text of a generation goes."""

    def event(self, event: Event) -> None:
        """The next piece of a stream."""

    def end(self) -> None:
        """The text is complete: end its line."""

    def note(self, text: str) -> None:
        """Something about the text, for people only."""


class PipePrinter:
    """The text and nothing else, in one line-terminated piece: other programs read it.

    Line ends at the end of the text are left out, so that exactly one follows it.
    """

    def __init__(self) -> None:
        self._held = ""

    def event(self, event: Event) -> None:
        text = self._held + event.text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        if kept:
            sys.stdout.write(kept)
            sys.stdout.flush()

    def end(self) -> None:
        self._held = ""
        sys.stdout.write("\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Nobody reads along."""


class TerminalPrinter:
    """The text with accepted draft tokens coloured, and notes in a muted style."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at_line_start = True

    def event(self, event: Event) -> None:
        from foretell._verify import Origin

        if event.text:
            self._write(visible(event.text), DRAFTED_STYLE if event.origin is Origin.DRAFT else "")
            self._at_line_start = event.text.endswith("\n")

    def end(self) -> None:
        if not self._at_line_start:
            self._write("\n", "")
        self._at_line_start = True

    def note(self, text: str) -> None:
        self._write(text, NOTE_STYLE)
        self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        # Segments pass through rich as they are: no markup, no wrapping, no tab expansion.
        from rich.segment import Segment, Segments

        known = self._console.get_style(style) if style else None
        self._console.print(Segments([Segment(text, known)]), end="", soft_wrap=True)


def make_printer() -> Printer:
    """The printer that fits what stdout is connected to."""
    if not sys.stdout.isatty():
        return PipePrinter()
    return TerminalPrinter(make_console())


def make_console() -> Console:
    """A console on stdout; without any colour or style where NO_COLOR is set."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=sys.stdout, color_system=None if plain else "auto", highlight=False)


def has_colour() -> bool:
    """Whether drafted tokens can be told apart on this terminal."""
    return sys.stdout.isatty() and make_console().color_system is not None


def progress(text: str) -> None:
    """A note about slow work, where someone is watching."""
    if sys.stderr.isatty():
        note(text)


def note(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


@contextmanager
def announced() -> Iterator[Callable[[str], None]]:
    """``progress`` for a piece of work that may be so slow that a pipe is told as well.

    What takes longer than PATIENCE is, on stderr: a download, compiling, a large model.
    """
    waiting: list[Timer] = []

    def tell(text: str) -> None:
        while waiting:
            waiting.pop().cancel()
        if sys.stderr.isatty():
            note(text)
        else:
            waiting.append(Timer(PATIENCE, note, [text]))
            waiting[0].daemon = True
            waiting[0].start()

    try:
        yield tell
    finally:
        while waiting:
            waiting.pop().cancel()
