"""What an engine in a process of its own is asked, and how it answers: JSON, a line each.

The driver writes one line of settings first; the engine answers with its versions, or with what
is missing. Then requests and answers follow until the driver closes the pipe.

Only the standard library: engines in environments of their own import this file too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from foretell.bench._watch import Watch


@dataclass(frozen=True)
class Request:
    """One turn of a question.

    ``prompt`` are its token ids, the turns before it included; ``messages`` the same for engines
    that have a template of their own, None for text that is continued as it is (``text``). The
    session of the turn before may be used again where ``turn`` is above 0. ``mode`` is the
    engine's: how it speculates, "plain" for not at all.
    """

    mode: str
    prompt: Sequence[int]
    max_tokens: int
    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    turn: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop_token_ids: Sequence[int] = ()


@dataclass
class Answer:
    """What came of a request.

    ``decode_seconds`` begin when the first tokens are there, and ``decode_tokens`` are those that
    came later. ``tokens`` are ids; engines that give none leave it empty.
    """

    tokens: list[int]
    text: str
    num_tokens: int
    decode_tokens: int
    decode_seconds: float
    total_seconds: float
    prompt_tokens: int
    stats: dict[str, Any] = field(default_factory=dict)
    """num_steps, num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos,
    model_seconds, deciding_seconds: those that the engine tells."""
    waiting: float = 0.0
    """Share of the time its threads were ready and had no core."""


class Missing(Exception):
    """Something is not installed; the message names the command that installs it."""


class Worker(ABC):
    """An engine, in its own process."""

    versions: Mapping[str, str] = {}
    profile: str | None = None
    """Whether it began with what was learned of the model before: "used" or "none"; None for
    engines that keep no such thing."""
    process: int | None = None
    """The process that computes, where that is another one."""

    @abstractmethod
    def answer(self, request: Request) -> Answer:
        """Generate."""

    def passes(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """T(k) against the machine's limits, for engines that can tell."""
        return None

    def close(self) -> None:  # noqa: B027 - not every engine has something to close
        """The driver is gone."""


class Clock:
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.start = time.perf_counter()

    def came(self, count: int) -> None:
        """So many tokens are here."""
        self.times.append(time.perf_counter())
        self.counts.append(count)

    @property
    def decode_tokens(self) -> int:
        """Those after the first that came."""
        return sum(self.counts[1:])

    @property
    def decode_seconds(self) -> float:
        """From the first to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answer until there are no more requests."""
    try:
        for line in requests:
            asked = json.loads(line)
            try:
                if "passes" in asked:
                    send(answers, {"passes": worker.passes(asked["passes"])})
                    continue
                send(answers, vars(_timed(worker, Request(**asked))))
            except Exception as error:
                send(answers, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        worker.close()


def _timed(worker: Worker, request: Request) -> Answer:
    watch = Watch(worker.process)
    watch.look()
    answers: list[Answer] = []
    sample = watch.time(lambda: answers.append(worker.answer(request)))
    watch.close()
    [answer] = answers
    answer.waiting = round(sample.waiting, 4)
    return answer


def main(make: Callable[[dict[str, Any]], Worker]) -> None:
    """Run a worker on stdin and stdout, wherever libraries think they may print."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    try:
        worker = make(settings)
    except Missing as missing:
        send(answers, {"missing": str(missing)})
        return
    except Exception as error:
        send(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    send(answers, {"versions": dict(worker.versions), "profile": worker.profile})
    serve(worker, sys.stdin, answers)


def send(answers: TextIO, value: Mapping[str, Any]) -> None:
    """One line."""
    print(json.dumps(value), file=answers, flush=True)
