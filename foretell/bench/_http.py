"""JSON over HTTP, with the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

TIMEOUT = 600.0  # seconds for an answer; a slow model on a busy machine
MOST_BYTES = 64 << 20  # of an answer, or of an event of a stream
MOST_SHOWN = 200


def ask(url: str, body: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> Any:
    """GET, or POST of a body; raises OSError, with what the server said."""
    with _open(url, body, timeout) as response:
        return _json(url, response.read(MOST_BYTES))


def stream(url: str, body: Mapping[str, Any], timeout: float = TIMEOUT) -> Iterator[dict[str, Any]]:
    """The events of a server that streams, up to its [DONE].

    Raises OSError for an event that is an error or no object, and for a stream that just ends.
    """
    with _open(url, body, timeout) as response:
        while line := response.readline(MOST_BYTES):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _json(url, data)
                if not isinstance(event, dict) or event.get("error") is not None:
                    raise OSError(f"{url} sent {data[:MOST_SHOWN].decode(errors='replace')}")
                yield event
    raise OSError(f"{url} ended its stream without [DONE]")


def _json(url: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        said = data[:MOST_SHOWN].decode(errors="replace")
        raise OSError(f"{url} sent what is no JSON: {said}") from error


def _open(url: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("FORETELL_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:MOST_SHOWN]
        raise OSError(f"{url} answered {error.code}: {said}") from error
