"""Requests that share passes, and come and go at every step."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._decode import begin, step
from foretell._model import Model
from foretell._prefill import read, start
from foretell._request import Emitted, Request
from foretell._result import FinishReason

PROMPT_ROWS = 128  # most tokens of prompts to read between two steps of those who are answering


class Batch:
    """Runs requests together: continuous batching (Yu et al. 2022, Orca).

    ``read`` reads a bounded piece of the prompts that are waiting, several in one pass where they
    are short; ``step`` makes one pass for all requests that are answering, whatever the length of
    their drafts. Called in turn, they keep everybody going. Rows are invariant, so each request's
    tokens are those that it would have had alone. What breaks one request ends that one. Both give
    what was emitted, also for requests that are over, with nothing or their last tokens.

    Not safe to use from several threads: one of them owns a batch.
    """

    def __init__(self, model: Model, prompt_rows: int = PROMPT_ROWS) -> None:
        self._model = model
        self._prompt_rows = prompt_rows
        self._reading: list[Sequence[Request]] = []
        self._answering: list[Request] = []

    def __len__(self) -> int:
        """Requests that are not over."""
        return sum(map(len, self._reading)) + len(self._answering)

    def join(self, requests: Sequence[Request]) -> None:
        """Take in the requests that complete one prompt: it is read once, for all of them.

        The first one's session may hold the beginning of the prompt already.
        """
        start(requests)
        self._reading.append(requests)

    def read(self) -> list[tuple[Request, Emitted]]:
        """One pass over the next tokens of prompts, first come, first served."""
        emitted = self._leave_early()
        groups: list[tuple[Sequence[Request], int]] = []
        room = self._prompt_rows
        for group in self._reading:
            if room > 0:
                groups.append((group, room))
                room -= len(group[0].tokens) - group[0].session.length
        if not groups:
            return emitted
        unread: list[Sequence[Request]] = []
        for (group, _), output in zip(groups, read(self._model, groups), strict=True):
            if output is not None:
                emitted += zip(group, begin(group, output), strict=True)
                self._answering += [request for request in group if not request.is_over]
            elif group[0].is_over:
                emitted += [(request, Emitted()) for request in group]
            else:
                unread.append(group)
        self._reading = unread + self._reading[len(groups) :]
        return emitted

    def step(self) -> list[tuple[Request, Emitted]]:
        """One pass for all who are answering."""
        emitted = self._leave_early()
        if self._answering:
            emitted += zip(self._answering, step(self._model, self._answering), strict=True)
        self._answering = [request for request in self._answering if not request.is_over]
        return emitted

    def _leave_early(self) -> list[tuple[Request, Emitted]]:
        """Who was cancelled, or failed as soon as it began, costs no pass."""
        everyone = [*self._answering, *(one for group in self._reading for one in group)]
        for request in everyone:
            if not request.is_over and request.is_cancelled():
                request.finish = FinishReason.CANCELLED
        # A prompt is read for those who still want it; the session is its first request's.
        reading = [[one for one in group if not one.is_over] for group in self._reading]
        for before, after in zip(self._reading, reading, strict=True):
            if after and after[0] is not before[0]:
                after[0].session = before[0].session
        self._reading = [group for group in reading if group]
        self._answering = [request for request in self._answering if not request.is_over]
        return [(request, Emitted()) for request in everyone if request.is_over]
