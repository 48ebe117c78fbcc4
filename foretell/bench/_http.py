"""JSON over HTTP, with the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

TIMEOUT = 600.0  # seconds for an answer; a slow model on a busy machine


def ask(url: str, body: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> Any:
    """GET, or POST of a body; raises OSError, with what the server said."""
    with _open(url, body, timeout) as response:
        return json.loads(response.read())


def stream(url: str, body: Mapping[str, Any], timeout: float = TIMEOUT) -> Iterator[dict[str, Any]]:
    """The events of a server that streams, up to its [DONE]."""
    with _open(url, body, timeout) as response:
        for line in response:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)


def _open(url: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("FORETELL_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise OSError(f"{url} answered {error.code}: {said}") from error
