"""Engines for tests of `foretell bench`: the real workers on table models, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fake_engine import byte_tokenizer, fake_engine

from foretell.bench._engines import EngineSpec
from foretell.bench._foretell_worker import ForetellWorker
from foretell.bench._model_text import ModelText
from foretell.bench._peer import Peer, PeerError, PeerGone
from foretell.bench._protocol import Answer, Request, Worker, _timed
from foretell.bench._run import Plan
from foretell.bench._workload import Question, Workload


class WorkerPeer(Peer):
    """A worker without a process. ``fails_at`` and ``dies_at`` count requests from 1."""

    def __init__(self, worker: Worker, *, fails_at: int = 0, dies_at: int = 0) -> None:
        self.worker, self.fails_at, self.dies_at = worker, fails_at, dies_at
        self.asked: list[Request] = []
        self.closed = False

    def start(self) -> Mapping[str, str]:
        self.profile = self.worker.profile
        return self.worker.versions

    def ask(self, request: Request) -> Answer:
        self.asked.append(request)
        if len(self.asked) == self.fails_at:
            raise PeerError("it did not want to")
        if self.dies_at and len(self.asked) >= self.dies_at:
            raise PeerGone("its process ended without a word")
        answer = _timed(self.worker, request)
        answer.waiting = 0.0  # what else this machine does is no matter of the tests
        return answer

    def passes(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        return self.worker.passes(settings)

    def close(self) -> None:
        self.closed = True


class Scripted(Worker):
    """Says what it is told to, at the speed it is told to, by mode: tokens and seconds each."""

    versions: Mapping[str, str] = {"scripted": "1"}

    def __init__(self, script: Mapping[str, tuple[Sequence[int], float]]) -> None:
        self.script = script

    def answer(self, request: Request) -> Answer:
        tokens, each = self.script[request.mode]
        count = len(tokens)
        return Answer(
            tokens=list(tokens),
            text="",
            num_tokens=count,
            decode_tokens=count - 1,
            decode_seconds=each * (count - 1),
            total_seconds=each * (count - 1) + 1.0,
            prompt_tokens=len(request.prompt),
            stats={"num_steps": count - 1},
        )


def text() -> ModelText:
    tokenizer = byte_tokenizer()
    return ModelText(tokenizer, tokenizer.eos_token_ids, 4096)


def foretell_peer(**settings: Any) -> WorkerPeer:
    return WorkerPeer(ForetellWorker(fake_engine(None, **settings)))


def spec(kind: str, mode: str, dtype: str = "native", **settings: Any) -> EngineSpec:
    return EngineSpec(kind, mode, dtype, f"{kind} {mode}", **settings)


WORKLOAD = Workload(
    "made up",
    (
        Question("1", "jumps", ("fox jumps", "and again")),
        Question("2", "jumps", ("jumps fox",)),
        Question("3", "runs", ("fox",)),
    ),
)


def plan(*engines: EngineSpec, **settings: Any) -> Plan:
    own = text()
    return Plan(
        workload=settings.pop("workload", WORKLOAD),
        engines=engines,
        text=own,
        stop_token_ids=own.stop_token_ids,
        max_length=settings.pop("max_length", own.max_length),
        max_tokens=settings.pop("max_tokens", 24),
        threads=1,
        **settings,
    )
