"""Reading prompts, a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from foretell._draft import Context
from foretell._logprobs import prompt_logprobs
from foretell._model import Model, Output, Rows, forward_each
from foretell._request import Request

SCORED_CHUNK = 64  # most tokens at a time where every row's logits are needed, and held


def start(requests: Sequence[Request]) -> None:
    """The requests of one prompt begin."""
    for request in requests:
        with request.guarded():
            request.policy.start(Context(request.tokens))


def read(model: Model, groups: Sequence[tuple[Sequence[Request], int]]) -> list[Output | None]:
    """One pass over the next tokens of several prompts, each completed by a group of requests.

    ``groups`` has each group with the most tokens to read. Where a prompt was read to its end,
    everyone has a session that holds it, and the logits at its end, (1, vocab_size), are given;
    None where more is to be read, and where it failed.
    """
    began = perf_counter()
    rows: list[Rows] = []
    for (first, *_), size in groups:
        done, scored = first.session.length, first.num_prompt_logprobs is not None
        chunk = first.tokens[done : done + (min(size, SCORED_CHUNK) if scored else size)]
        last = done + len(chunk) == len(first.tokens)
        part = Rows(first.session, chunk, logits="last" if last else "none")
        rows.append(replace(part, logits="all") if scored else part)
    outputs = forward_each(model, rows)
    seconds = perf_counter() - began
    for requests, _ in groups:
        for request in requests:
            request.stats.prefill_seconds += seconds
    return [
        _take(requests, len(part.tokens), output)
        for (requests, _), part, output in zip(groups, rows, outputs, strict=True)
    ]


def _take(requests: Sequence[Request], count: int, output: Output | Exception) -> Output | None:
    """Commit ``count`` tokens of the prompt."""
    first, *others = requests
    if isinstance(output, Exception):
        for request in requests:
            request.error = output
        return None
    first.session.keep(range(count))
    done = first.session.length
    if first.num_prompt_logprobs is not None:
        following = first.tokens[done - count + 1 : done + 1]
        first.prompt_logprobs += prompt_logprobs(
            output.logits, following, first.num_prompt_logprobs
        )
    if done < len(first.tokens):
        return None
    for request in others:
        request.session = first.session.fork()
    return replace(output, logits=output.logits[-1:])
