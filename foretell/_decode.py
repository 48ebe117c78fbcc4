"""The loop: propose, forward, verify, keep, emit. Speculative decoding is this file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from foretell._draft import Context, Draft
from foretell._logprobs import token_logprobs
from foretell._model import Model, Output, Rows, forward_each
from foretell._policy import propose_together
from foretell._prefill import read, start
from foretell._request import Emitted, Request
from foretell._result import FinishReason
from foretell._verify import Accepted, Origin, Verdict

PREFILL_CHUNK = 512  # tokens between two looks at the cancel flag


def decode(model: Model, requests: Sequence[Request]) -> Iterator[tuple[int, Emitted]]:
    """Run requests of one prompt to their end, one pass at a time, with each one's index.

    What breaks one of them is raised once all that its last pass emitted was yielded.
    """
    running, emitted = [*range(len(requests))], prefill(model, requests)
    while running:
        yield from zip(running, emitted, strict=True)
        for request in requests:
            if request.error is not None:
                raise request.error
        running = [i for i in running if not requests[i].is_over]
        emitted = step(model, [requests[i] for i in running]) if running else []


def prefill(model: Model, requests: Sequence[Request]) -> list[Emitted]:
    """Read the prompt that all ``requests`` complete, once, and emit everyone's first token."""
    start(requests)
    while not all(request.is_over for request in requests):
        if output := read(model, [(requests, PREFILL_CHUNK)])[0]:
            return begin(requests, output)
        if requests[0].is_cancelled():
            for request in requests:
                request.finish = FinishReason.CANCELLED
    return [Emitted() for _ in requests]


def begin(requests: Sequence[Request], output: Output) -> list[Emitted]:
    """Everyone's first token, of the logits at the end of their prompt."""
    return [advance(request, Draft.empty(), output, prefilled=True) for request in requests]


def step(model: Model, requests: Sequence[Request]) -> list[Emitted]:
    """One pass of the target for all requests: verify every one's draft, keep what is right."""
    began = perf_counter()
    asking = [(r.policy, Context(r.tokens), r.stops.room - 1) for r in requests]
    drafts: list[Draft] = []
    for request, draft in zip(requests, propose_together(asking), strict=True):
        if isinstance(draft, Exception):
            request.error, draft = draft, Draft.empty()
        drafts.append(draft)
    rows = [
        Rows(r.session, [r.tokens[-1], *draft.tokens], draft.parents)
        for r, draft in zip(requests, drafts, strict=True)
    ]
    before = perf_counter()
    outputs = forward_each(model, rows)
    model_seconds = perf_counter() - before
    count = sum(len(part.tokens) for part in rows)
    seen = sum(len(p.tokens) * len(r.tokens) for p, r in zip(rows, requests, strict=True)) / count
    any(r.policy.passed(count, seen, model_seconds) for r in requests)  # the first who keeps costs
    emitted = []
    for request, draft, output in zip(requests, drafts, outputs, strict=True):
        emitted.append(advance(request, draft, output))
        request.stats.model_seconds += model_seconds
        request.stats.decode_seconds += perf_counter() - began
    return emitted


def advance(
    request: Request, draft: Draft, output: Output | Exception, *, prefilled: bool = False
) -> Emitted:
    """Take what the target accepts into the request, and drop the rest."""
    if isinstance(output, Exception):
        request.fail(output)
    if request.is_over or isinstance(output, Exception):
        return Emitted()
    verdict = request.rule.verify(draft, output.logits, request.sampler, request.tokens)
    accepted, pieces = trim(request, draft, verdict)
    if not prefilled:
        request.session.keep(accepted.nodes)
        request.stats.record(draft, accepted)
    request.tokens.extend(accepted.tokens)
    step = request.stats.num_steps
    logprobs = (
        ()
        if request.num_logprobs is None
        else [
            token_logprobs(output.logits[node], token, request.num_logprobs)
            for node, token in zip(accepted.nodes, accepted.tokens, strict=False)
        ]
    )
    try:
        request.policy.observe(draft, output, accepted)
    except Exception as error:
        request.fail(error)
    return Emitted(accepted.tokens, accepted.origins, pieces, logprobs, draft, step)


def trim(request: Request, draft: Draft, verdict: Verdict) -> tuple[Accepted, list[str]]:
    """Cut a verdict where plain decoding would have stopped; sets the finish reason.

    The one place that decides the end of a generation, whatever ends it. What a rule would say
    behind the end is not asked for; what it said before it failed stays.
    """
    emitted: list[tuple[int, Origin]] = []
    pieces: list[str] = []
    if request.is_cancelled():
        request.finish = FinishReason.CANCELLED
        return Accepted.of(draft, ()), []
    try:
        for token, origin in verdict:
            piece, request.finish = request.stops.push(token)
            emitted.append((token, origin))
            pieces.append(piece)
            if request.finish is not None:
                break
    except Exception as error:
        request.fail(error)
    return Accepted.of(draft, emitted), pieces
