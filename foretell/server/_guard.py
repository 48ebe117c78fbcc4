"""What is checked of every HTTP request before anything reads it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from foretell.server._errors import ApiError
from foretell.server._settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready", "/version")
"""Answered without an API key, as are the files of the page."""


class Guard:
    """Refuses what is not for this server: other hosts, other sites' pages, no key, large bodies.

    - The Host header must be localhost, a plain IP address or a name that was allowed, so that a
      page from elsewhere cannot reach a local server under a name of its own (DNS rebinding).
    - With an Origin header of another site, which is what browsers send, the answer is 403 unless
      the site was allowed.
    - API keys are compared in constant time, each of them. The key's hash becomes
      ``scope["foretell_owner"]``.
    - A body is counted as it comes in, whatever its Content-Length says.
    """

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key) for key in settings.api_keys]
        self._hosts = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
        self._origins = set(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["method"] != "OPTIONS":
                scope["foretell_owner"] = self._owner(scope["path"], headers)
            self._check_length(headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._limited(scope, receive, send)

    def _check_host(self, headers: dict[bytes, str]) -> None:
        host = _host_of(headers.get(b"host", ""))
        if host in self._hosts or _is_address(host):
            return
        raise ApiError(
            421,
            "the Host header names another machine; ask under localhost or the IP address, or "
            "start the server with --allowed-host",
            code="wrong_host",
        )

    def _check_origin(self, headers: dict[bytes, str]) -> None:
        origin = headers.get(b"origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        try:
            same = urlsplit(origin).netloc == headers.get(b"host", "")
        except ValueError:
            same = False
        if not same:
            raise ApiError(
                403,
                "pages of other sites may not ask this server; start it with --cors-origin to "
                "allow one",
                code="wrong_origin",
            )

    def _owner(self, path: str, headers: dict[bytes, str]) -> str:
        if not self._keys or path in OPEN_PATHS or path.startswith("/static/"):
            return ""
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if scheme.lower() == "bearer" and any(matches):
            return digest.hex()
        raise ApiError(
            401,
            "an API key is needed, and the one that was sent is not among them; send "
            "'Authorization: Bearer KEY'",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_length(self, headers: dict[bytes, str]) -> None:
        length = headers.get(b"content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._most:
            raise self._too_large()

    @property
    def _most(self) -> int:
        return self._settings.max_body_bytes

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._most} bytes; send less",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, with a body of bounded size; what it says of a larger one is dropped."""
        size = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._most:
                    raise self._too_large()
            return message

        async def unless_too_large(message: MutableMapping[str, Any]) -> None:
            if size <= self._most:
                await send(message)

        try:
            await self._app(scope, counted, unless_too_large)
        except Exception:
            if size <= self._most:
                raise
        if size > self._most:
            await self._too_large().response()(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_of(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
