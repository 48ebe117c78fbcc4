"""uvicorn's HTTP/1.1, with an end to its patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Impatient(H11Protocol):
    """Ends connections that only hold a place.

    uvicorn bounds the time between two requests, but waits forever for the first byte of a request,
    for the rest of one, and for a client that does not read what it is sent; a few thousand such
    connections would keep everybody else out. A request's head may take ``arrival`` seconds, its
    body as long again, and what is sent may lie unread for ``unread`` seconds.
    """

    arrival = 60.0
    unread = 120.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._awaited: object = None
        self._arrives, self._reads = _Timer(), _Timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrives.stop()
        self._reads.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reads.start(self.unread, self.transport.abort)

    def resume_writing(self) -> None:
        self._reads.stop()
        super().resume_writing()

    def _watch(self) -> None:
        """Begin to wait for what the client has to send next, if that is something else now."""
        state = self.conn.their_state
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is not self._awaited:
            self._awaited = awaited
            self._arrives.stop()
            if awaited is not None:
                self._arrives.start(self.arrival, self.transport.abort)


class _Timer:
    """Something that happens after a while, if it is not called off."""

    _handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, what: Callable[[], object]) -> None:
        """Anew, where it ran already."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, what)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
