"""Structured logs: a JSON object a line, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.server._scheduler import Done, Job

logger = logging.getLogger("foretell.server")


class JsonLines(logging.Formatter):
    """Every record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if fields is not None:
            entry.update(fields)
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def configure() -> None:
    """Send this server's log, and uvicorn's, to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("foretell.server", "uvicorn", "uvicorn.error"):
        log = logging.getLogger(name)
        log.handlers = [handler] if name != "uvicorn.error" else []
        log.setLevel(logging.INFO)
        log.propagate = name == "uvicorn.error"
    logging.getLogger("uvicorn.access").disabled = True


class Line:
    """The one line of a request, filled while it is worked on. No text of prompts or answers."""

    def __init__(self, request_id: str, path: str, *, with_text: bool) -> None:
        self.request_id = request_id
        self.status = 200
        self._began = time.monotonic()
        self._fields: dict[str, Any] = {"path": path}
        self._with_text = with_text
        self._jobs: Sequence[Job] = ()

    def note(self, **fields: Any) -> None:
        """Put something into the line."""
        self._fields.update(fields)

    def text(self, **fields: Any) -> None:
        """Put something into the line that is text of a prompt or an answer, if that was asked."""
        if self._with_text:
            self._fields.update(fields)

    def jobs(self, jobs: Sequence[Job]) -> None:
        """What was made of the request."""
        self._jobs = jobs

    def done(self, done: Sequence[Done]) -> None:
        """What came of it."""
        stats = [one.result.stats for one in done]
        self.note(
            completion_tokens=sum(len(one.result.token_ids) for one in done),
            finish_reasons=[str(one.result.finish_reason) for one in done],
            num_drafts=sum(one.num_drafts for one in stats),
            num_draft_tokens=sum(one.num_draft_tokens for one in stats),
            num_accepted_tokens=sum(one.num_accepted_tokens for one in stats),
        )
        self.text(completions=[one.result.text for one in done])

    def write(self) -> None:
        """Out with it."""
        jobs = self._jobs
        if jobs:
            first = jobs[0]
            self.note(
                prompt_tokens=sum(job.answers[0].prompt_tokens for job in jobs),
                cached_tokens=sum(job.cached_tokens for job in jobs),
                queue_seconds=_since(first.arrived, first.admitted),
                first_token_seconds=_since(first.arrived, first.first_token),
            )
        logger.info(
            "request",
            extra={
                "fields": {
                    "id": self.request_id,
                    "status": self.status,
                    "seconds": round(time.monotonic() - self._began, 4),
                    **self._fields,
                }
            },
        )


def _since(began: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - began, 4)
