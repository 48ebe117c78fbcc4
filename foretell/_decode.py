"""The loop: propose, forward, verify, keep, emit. Speculative decoding is this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from foretell._draft import Draft
from foretell._model import Model, Output, Rows, Session
from foretell._policy import FixedPolicy
from foretell._result import FinishReason, Stats
from foretell._sampling import Choose
from foretell._stop import StopConditions
from foretell._verify import Accepted, Origin, match

PREFILL_CHUNK = 512  # tokens between two looks at the cancel flag


@dataclass
class Request:
    """One generation in progress.

    ``session`` holds every token of ``tokens`` but the last one emitted; before prefill it may
    hold any prefix of the prompt. Whatever ends or breaks the request, it holds a prefix of
    ``tokens``.
    """

    session: Session
    tokens: list[int]
    choose: Choose
    policy: FixedPolicy
    stops: StopConditions
    is_cancelled: Callable[[], bool] = lambda: False
    finish: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Emitted:
    """What one pass emitted: tokens, and for each its origin and the text it completed."""

    tokens: Sequence[int]
    origins: Sequence[Origin]
    pieces: Sequence[str]


def decode(model: Model, request: Request) -> Iterator[Emitted]:
    """Run a request to its end, one pass at a time."""
    yield prefill(model, request)
    while request.finish is None:
        yield from step(model, [request])


def prefill(model: Model, request: Request) -> Emitted:
    """Read the prompt and emit the first token, before anything is drafted."""
    began = perf_counter()
    prompt, session = request.tokens, request.session
    request.policy.start(prompt)
    while True:
        chunk = prompt[session.length : session.length + PREFILL_CHUNK]
        last = session.length + len(chunk) == len(prompt)
        output = model.forward([Rows(session, chunk, logits="last" if last else "none")])
        session.keep(range(len(chunk)))
        if last or request.is_cancelled():
            break
    request.stats.prefill_seconds = perf_counter() - began
    if not last:
        request.finish = FinishReason.CANCELLED
        return Emitted((), (), ())
    token = request.choose(output.logits[0], prompt, len(prompt))
    accepted, pieces = trim(request, Accepted((0,), (token,), Origin.PLAIN))
    request.tokens.extend(accepted.tokens)
    request.policy.observe(Draft(), output, accepted)
    return Emitted(accepted.tokens, accepted.origins, pieces)


def step(model: Model, requests: Sequence[Request]) -> list[Emitted]:
    """One pass of the target for all requests: verify every one's draft, keep what is right."""
    began = perf_counter()
    drafts = [r.policy.propose(r.tokens, r.stops.room - 1) for r in requests]
    rows = [
        Rows(r.session, [r.tokens[-1], *draft.tokens], draft.parents)
        for r, draft in zip(requests, drafts, strict=True)
    ]
    before = perf_counter()
    output = model.forward(rows)
    model_seconds = perf_counter() - before
    emitted = []
    for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        emitted.append(advance(request, draft, output.of(index)))
        request.stats.model_seconds += model_seconds
        request.stats.decode_seconds += perf_counter() - began
    return emitted


def advance(request: Request, draft: Draft, output: Output) -> Emitted:
    """Take what the target accepts into the request, and drop the rest."""
    verdict = match(draft, output.logits, request.choose, request.tokens)
    accepted, pieces = trim(request, verdict)
    request.session.keep(accepted.nodes)
    request.tokens.extend(accepted.tokens)
    request.stats.record(draft, accepted)
    request.policy.observe(draft, output, accepted)
    return Emitted(accepted.tokens, accepted.origins, pieces)


def trim(request: Request, accepted: Accepted) -> tuple[Accepted, list[str]]:
    """Cut accepted tokens where plain decoding would have stopped; sets the finish reason.

    The one place that decides the end of a generation, whatever ends it.
    """
    if request.is_cancelled():
        request.finish = FinishReason.CANCELLED
        return accepted.cut(0), []
    pieces: list[str] = []
    for token in accepted.tokens:
        piece, request.finish = request.stops.push(token)
        pieces.append(piece)
        if request.finish is not None:
            break
    return accepted.cut(len(pieces)), pieces
