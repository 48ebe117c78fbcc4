"""Where a generation ends, token by token.

Asked about one token after another, so a block that runs past a stop is cut exactly where
plain decoding would have stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from foretell._result import FinishReason


class TextDecoder(Protocol):
    """Turns token ids to text piece by piece, whole characters only."""

    def push(self, token_id: int) -> str:
        """The text that this token completed."""

    def finish(self) -> str:
        """What is still held back."""


class StopConditions:
    """Every stop condition of one request, and the text it has emitted so far.

    On one and the same token a stop wins over the length limit, and that over the context.
    """

    def __init__(
        self,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int],
        stop_strings: tuple[str, ...],
        max_tokens: int | None,
        max_context_tokens: int,
        min_tokens: int = 0,
        decoder: TextDecoder | None,
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_strings = stop_strings
        self._max_tokens = max_tokens
        self._max_context_tokens = max_context_tokens
        self._decoder = decoder
        self._min_tokens = min_tokens
        self._count = 0
        self._exempt = 0  # so much of the held text came too early to end with a stop string
        self._held = ""
        self._beginnings = [_Beginning(stop) for stop in stop_strings]

    @property
    def room(self) -> int:
        """How many more tokens can be emitted at most."""
        room = self._max_context_tokens - self._count
        return room if self._max_tokens is None else min(room, self._max_tokens - self._count)

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that became certain with ``token``, and the reason if it ends the output."""
        self._count += 1
        if self._decoder and token not in self._eos_token_ids:
            text = self._decoder.push(token)
            self._held += text
            for beginning in self._beginnings:
                beginning.read(text)
        reason = self._reason(token)
        if reason is None and not self._stop_strings:
            text, self._held = self._held, ""
            return text, None
        if reason is not None:
            self._drain()
        if self._count <= self._min_tokens:
            self._exempt = len(self._held)
        if self._cut_at_stop_string():
            reason = FinishReason.STOP
        if reason is None:
            overlap = max((beginning.length for beginning in self._beginnings), default=0)
            return self._release(len(self._held) - overlap), None
        self._decoder = None  # what it may still hold lies behind the end
        return self._release(len(self._held)), reason

    def finish(self) -> str:
        """The text still held back, when the output ends between tokens."""
        self._drain()
        self._cut_at_stop_string()
        return self._release(len(self._held))

    def _reason(self, token: int) -> FinishReason | None:
        """Why ``token`` is the last one, whatever the text says."""
        if token in self._eos_token_ids or token in self._stop_token_ids:
            return FinishReason.STOP
        if self._count == self._max_tokens:
            return FinishReason.LENGTH
        if self._count == self._max_context_tokens:
            return FinishReason.CONTEXT
        return None

    def _drain(self) -> None:
        # What the decoder holds back (half a character) can complete a stop string, too.
        if self._decoder:
            self._held += self._decoder.finish()
            self._decoder = None

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._exempt = max(self._exempt - length, 0)
        return text

    def _cut_at_stop_string(self) -> bool:
        """Cut at the stop string completed first, so that token boundaries do not matter."""
        found = []
        for stop in self._stop_strings:
            start = self._held.find(stop, max(self._exempt - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self._held = self._held[: min(found)[1]]
        return bool(found)


class _Beginning:
    """How much of a string the text read so far ends with, short of the whole.

    In constant time a character, however long the string (Knuth, Morris and Pratt 1977):
    ``shorter[i]`` is the next smaller candidate where ``i`` + 1 characters fit.
    """

    def __init__(self, string: str) -> None:
        self._string = string
        self._shorter = [0]
        self.length = 0
        self.read(string[1:], self._shorter)
        self.length = 0

    def read(self, text: str, lengths: list[int] | None = None) -> None:
        """Go on by ``text``, and append the length after every character to ``lengths``."""
        string, shorter, length = self._string, self._shorter, self.length
        for character in text:
            while length and character != string[length]:
                length = shorter[length - 1]
            if character == string[length]:
                length += 1
            if lengths is not None:
                lengths.append(length)
            elif length == len(string):
                length = shorter[-1]
        self.length = length
