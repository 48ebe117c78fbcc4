"""Errors as the OpenAI API has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from foretell._errors import CapabilityError, ForetellError, InputError


def to_json(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate, which an error may quote, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ApiError(Exception):
    """What the client is told: a status, a sentence, and which field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Json:
        """The HTTP response that says so."""
        return Json(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param, code=code)


def of_exception(error: Exception, fields: Mapping[str, str]) -> ApiError:
    """What to tell of an exception; ``fields`` maps the engine's names of options to the API's.

    The engine's messages about an option begin with its name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        message = str(error)
        name = message.split(" ", 1)[0]
        param = fields.get(name)
        if param is not None:
            message = param + message[len(name) :]
        return bad_request(message, param)
    if isinstance(error, CapabilityError):
        return bad_request(str(error))
    if isinstance(error, MemoryError):
        return ApiError(
            503,
            "the machine has no memory left for this request; try again later",
            kind="server_error",
            code="out_of_memory",
            headers={"Retry-After": "5"},
        )
    kept = str(error) if isinstance(error, ForetellError) else type(error).__name__
    return ApiError(500, f"the generation failed ({kept})", kind="server_error")
