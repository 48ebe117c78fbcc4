"""A server of this process, for clients that have to be answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], **attributes: Any
) -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """A server whose ``attributes`` the handler reads, and its address; it ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
