"""One call of a client: its jobs, what comes of them, and the client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foretell.server._errors import ApiError, of_exception, to_json
from foretell.server._format import Format
from foretell.server._log import Line
from foretell.server._scheduler import (
    Done,
    Failed,
    Item,
    Piece,
    QueueFullError,
    Scheduler,
    StoppingError,
    TimedOutError,
    TooLargeError,
)
from foretell.server._translate import FIELDS, Order

T = TypeVar("T")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(Exception):
    """The client closed the connection."""


class Call:
    """The jobs of one call, submitted together, and what they deliver."""

    def __init__(self, scheduler: Scheduler, order: Order, owner: str) -> None:
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[list[Item]] = asyncio.Queue()
        self.open = len(order.prompts) * order.params.n
        self.jobs = [
            scheduler.job(
                tokens,
                order.params,
                self._deliver,
                drafters=order.drafters,
                num_draft_tokens=order.num_draft_tokens,
                verification=order.verification,
                owner=owner,
                first_index=place * order.params.n,
                with_stats=order.steps and order.stream,
            )
            for place, tokens in enumerate(order.prompts)
        ]

    def submit(self) -> None:
        """Into the queue; raises ApiError where it is not let in."""
        try:
            self._scheduler.submit(self.jobs)
        except Exception as error:
            raise api_error(error) from None

    def cancel(self) -> None:
        """Nobody waits for it any more; what is over already does not mind."""
        self._scheduler.cancel(self.jobs)

    async def items(self) -> list[Item]:
        """What came since the last time, at least something. Raises ApiError if it failed."""
        items = await self._items.get()
        while not self._items.empty():
            items += self._items.get_nowait()
        for item in items:
            if isinstance(item, Failed):
                raise api_error(item.error)
            if isinstance(item, Done):
                self.open -= 1
        return items

    def _deliver(self, items: list[Item]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._items.put_nowait, items)


def api_error(error: Exception) -> ApiError:
    """What the client is told of an exception."""
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            str(error),
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(error.retry_after)},
        )
    if isinstance(error, StoppingError):
        return ApiError(
            503,
            str(error),
            kind="server_error",
            code="shutting_down",
            headers={"Retry-After": "10", "Connection": "close"},
        )
    if isinstance(error, TimedOutError):
        return ApiError(
            408,
            f"{error}; ask for fewer max_tokens, or have the limit raised",
            kind="timeout_error",
            code="timeout",
            headers={"x-should-retry": "false"},
        )
    if isinstance(error, TooLargeError):
        return ApiError(400, str(error), param="max_tokens", code="request_too_large")
    return of_exception(error, FIELDS)


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """``work``, cut short by ClientGoneError when the client goes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def collected(call: Call) -> list[Done]:
    """All completions of a call, in their order."""
    done: list[Done] = []
    while call.open:
        done += [item for item in await call.items() if isinstance(item, Done)]
    return sorted(done, key=lambda one: one.index)


class EventStream(Response):
    """A call as server-sent events. Chunks go out as steps are made, several in one write."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, form: Format, first: list[Item], line: Line) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._format = form
        self._first = first
        self._line = line

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._stream(send))
        except (ClientGoneError, OSError):
            self._line.status = 499
        finally:
            self._call.cancel()
            self._line.write()

    async def _stream(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        done: list[Done] = []
        items: list[Item] = self._first
        try:
            while True:
                frames = bytearray()
                for item in items:
                    if isinstance(item, Piece):
                        for chunk in self._format.piece(item):
                            frames += _frame(chunk)
                    elif isinstance(item, Done):
                        done.append(item)
                        for chunk in self._format.done(item):
                            frames += _frame(chunk)
                if not self._call.open:
                    break
                await send(_body(bytes(frames)))
                items = await self._call.items()
        except ApiError as error:
            self._line.status = error.status
            frames = bytearray(_frame(error.body))
        else:
            self._line.done(done)
            if self._format.order.include_usage:
                frames += _frame(self._format.chunk([], usage=self._format.usage(done)))
            frames += b"data: [DONE]\n\n"
        await send(_body(bytes(frames), more=False))


def _frame(chunk: object) -> bytes:
    return b"data: " + to_json(chunk) + b"\n\n"


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def answered(request: Request, call: Call, form: Format, line: Line) -> list[Done]:
    """The whole call, for a client that waits for it."""
    try:
        done = await while_there(request.receive, collected(call))
    except ClientGoneError:
        line.status = 499
        raise
    except ApiError as error:
        line.status = error.status
        raise
    finally:
        call.cancel()
    line.done(done)
    return done
