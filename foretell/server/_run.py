"""From start to end: the socket, the signals, and what happens to those who are being answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from foretell._errors import ForetellError, OptionError
from foretell.server._app import Server
from foretell.server._protocol import Impatient

logger = logging.getLogger("foretell.server")
OK, KILLED = 0, 130
MOST_CONNECTIONS = 2048
BACKLOG = 512


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves the signals to ``run``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve on; with port 0 a free one. Raises ForetellError.

    Whoever connects waits until the server is ready: so nobody else gets the port meanwhile.
    """
    if not host:  # the system would take it for every address of the machine
        raise OptionError("the host is empty; use 127.0.0.1, or 0.0.0.0 for every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError, ValueError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ForetellError(
            f"cannot listen on {host}:{port} ({reason}); "
            + (
                "is another server running there? Try another --port"
                if taken
                else "use an address and a port of this machine, like --host 127.0.0.1"
            )
        ) from error
    sock.set_inheritable(True)
    return sock


def configured(server: Server) -> uvicorn.Config:
    """How uvicorn is run."""
    return uvicorn.Config(
        server.app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(server.settings.grace)),
        timeout_keep_alive=30,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=1 << 16,
        http=Impatient,
        ws="none",
    )


def run(server: Server, sock: socket.socket, ready: Callable[[str], None]) -> int:
    """Serve until a signal ends it; returns the exit code.

    The first SIGTERM or SIGINT lets nothing new in and gives those who are being answered
    ``grace`` seconds; then, or at a second one, they are cut off. ``ready`` is called with the
    address once requests are answered.
    """
    return asyncio.run(_serve(server, _Uvicorn(configured(server)), sock, ready))


async def _serve(
    server: Server, inner: _Uvicorn, sock: socket.socket, ready: Callable[[str], None]
) -> int:
    loop = asyncio.get_running_loop()
    code = OK

    def stop(name: str) -> None:
        nonlocal code
        if inner.should_exit:
            inner.force_exit = True
            code = KILLED
            return
        logger.info("stopping", extra={"fields": {"signal": name, "grace": server.settings.grace}})
        server.refuse_new()
        inner.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    serving = asyncio.ensure_future(inner.serve([sock]))
    while not inner.started and not serving.done():
        await asyncio.sleep(0.01)
    if inner.started:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}"
        logger.info("ready", extra={"fields": {"address": address}})
        ready(address)
    await serving
    if server.scheduler.is_alive:
        server.scheduler.stop()
    logger.info("stopped")
    return code
