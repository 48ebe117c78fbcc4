"""The loop: propose, forward, verify, keep, emit. Speculative decoding is this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foretell._draft import Context, Draft
from foretell._logprobs import TokenLogprobs, prompt_logprobs, token_logprobs
from foretell._model import Model, Output, Rows, Session
from foretell._policy import Policy, propose_together
from foretell._result import FinishReason, Stats
from foretell._sampling import Sampler
from foretell._stop import StopConditions
from foretell._verify import RULES, Accepted, Origin, Rule, Verdict

PREFILL_CHUNK = 512  # tokens between two looks at the cancel flag
SCORED_CHUNK = 64  # the same where every row's logits are needed, and held


@dataclass
class Request:
    """One generation in progress.

    ``session`` holds every token of ``tokens`` but the last one emitted; before prefill it may
    hold any prefix of the prompt. Whatever ends or breaks the request, it holds a prefix of
    ``tokens``.
    """

    session: Session
    tokens: list[int]
    sampler: Sampler
    policy: Policy
    stops: StopConditions
    is_cancelled: Callable[[], bool] = lambda: False
    rule: Rule = RULES["match"]
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Emitted:
    """What one pass emitted: tokens, and for each its origin, its text, its log-probability."""

    tokens: Sequence[int] = ()
    origins: Sequence[Origin] = ()
    pieces: Sequence[str] = ()
    logprobs: Sequence[TokenLogprobs] = ()


def decode(model: Model, requests: Sequence[Request]) -> Iterator[tuple[int, Emitted]]:
    """Run requests of one prompt to their end, one pass at a time, with each one's index."""
    yield from enumerate(prefill(model, requests))
    while running := [i for i, request in enumerate(requests) if request.finish is None]:
        yield from zip(running, step(model, [requests[i] for i in running]), strict=True)


def prefill(model: Model, requests: Sequence[Request]) -> list[Emitted]:
    """Read the prompt that all ``requests`` complete, once, and emit everyone's first token."""
    began = perf_counter()
    first, *others = requests
    prompt, session, scored = first.tokens, first.session, first.num_prompt_logprobs
    for request in requests:
        request.policy.start(Context(request.tokens))
    while True:
        start, size = session.length, PREFILL_CHUNK if scored is None else SCORED_CHUNK
        chunk = prompt[start : start + size]
        last = start + len(chunk) == len(prompt)
        rows = Rows(session, chunk, logits="last" if last else "none")
        output = model.forward([rows if scored is None else replace(rows, logits="all")])
        session.keep(range(len(chunk)))
        if scored is not None:
            first.prompt_logprobs += prompt_logprobs(output.logits, prompt[start + 1 :], scored)
        if last or first.is_cancelled():
            break
    for request in others:
        request.session = session.fork()
    for request in requests:
        request.stats.prefill_seconds = perf_counter() - began
        request.finish = None if last else FinishReason.CANCELLED
    if not last:
        return [Emitted() for _ in requests]
    output = replace(output, logits=output.logits[-1:])
    return [advance(request, Draft.empty(), output, prefilled=True) for request in requests]


def step(model: Model, requests: Sequence[Request]) -> list[Emitted]:
    """One pass of the target for all requests: verify every one's draft, keep what is right."""
    began = perf_counter()
    drafts = propose_together((r.policy, Context(r.tokens), r.stops.room - 1) for r in requests)
    rows = [
        Rows(r.session, [r.tokens[-1], *draft.tokens], draft.parents)
        for r, draft in zip(requests, drafts, strict=True)
    ]
    before = perf_counter()
    output = model.forward(rows)
    model_seconds = perf_counter() - before
    requests[0].policy.passed(sum(len(part.tokens) for part in rows), model_seconds)
    emitted = []
    for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        emitted.append(advance(request, draft, output.of(index)))
        request.stats.model_seconds += model_seconds
        request.stats.decode_seconds += perf_counter() - began
    return emitted


def advance(request: Request, draft: Draft, output: Output, *, prefilled: bool = False) -> Emitted:
    """Take what the target accepts into the request, and drop the rest."""
    verdict = request.rule.verify(draft, output.logits, request.sampler, request.tokens)
    accepted, pieces = trim(request, draft, verdict)
    if not prefilled:
        request.session.keep(accepted.nodes)
        request.stats.record(draft, accepted)
    request.tokens.extend(accepted.tokens)
    logprobs = (
        ()
        if request.num_logprobs is None
        else [
            token_logprobs(output.logits[node], token, request.num_logprobs)
            for node, token in zip(accepted.nodes, accepted.tokens, strict=False)
        ]
    )
    request.policy.observe(draft, output.read_only(), accepted)
    return Emitted(accepted.tokens, accepted.origins, pieces, logprobs)


def trim(request: Request, draft: Draft, verdict: Verdict) -> tuple[Accepted, list[str]]:
    """Cut a verdict where plain decoding would have stopped; sets the finish reason.

    The one place that decides the end of a generation, whatever ends it. What a rule would say
    behind the end is not asked for.
    """
    emitted: list[tuple[int, Origin]] = []
    pieces: list[str] = []
    if request.is_cancelled():
        request.finish = FinishReason.CANCELLED
        return Accepted.of(draft, ()), []
    for token, origin in verdict:
        piece, request.finish = request.stops.push(token)
        emitted.append((token, origin))
        pieces.append(piece)
        if request.finish is not None:
            break
    return Accepted.of(draft, emitted), pieces
