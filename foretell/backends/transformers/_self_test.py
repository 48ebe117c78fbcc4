"""Whether a model's rows are invariant: passes of many tokens against single steps, once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell._model import Model, Rows, Session

LONGEST = 33
PROMPT = 11
Record = Callable[[], AbstractContextManager[list[tuple[str, Any]]]]


@dataclass(frozen=True)
class Difference:
    """How far a pass of many tokens is from single steps."""

    largest: float
    """Of all logits and cached numbers; 0: the same bits."""
    rows: int = 0
    """The length of the pass where it was."""
    module: str | None = None
    """The first module whose output differs."""
    by: float = 0.0


def _tokens(model: Model, count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(model.vocab_size, size=count).tolist()
    return found


def _prefilled(model: Model, prompt: list[int]) -> Session:
    session = model.new_session()
    model.forward([Rows(session, prompt, logits="none")])
    session.keep(range(len(prompt)))
    return session


def check_rows_alone(model: Model, record: Record) -> Difference:
    """Compare passes of 1 to 33 tokens behind a prompt with as many single steps, by bits.

    Shorter where the context is. Where something differs, the run is repeated with every module's
    output recorded, to name the first that does.
    """
    longest = max(1, min(LONGEST, model.max_length - PROMPT - 1))
    prompt, tokens = _tokens(model, PROMPT, 3), _tokens(model, longest, 4)
    plain = _prefilled(model, prompt)
    steps = []
    for token in tokens:
        steps.append(model.forward([Rows(plain, [token])]).logits)
        plain.keep([0])
    expected = np.concatenate(steps)
    session = _prefilled(model, prompt)
    largest, rows = 0.0, 0
    for count in range(1, longest + 1):
        got = model.forward([Rows(session, tokens[:count])]).logits
        if got.tobytes() != expected[:count].tobytes():
            apart = max(_apart(got, expected[:count]), float(np.finfo(np.float32).tiny))
            if apart > largest:
                largest, rows = apart, count
    session.keep(range(longest))
    if largest == 0:
        for one, other in zip(session.keys_values(), plain.keys_values(), strict=True):
            if one.tobytes() != other.tobytes():
                largest = max(_apart(one, other), float(np.finfo(np.float32).tiny))
                rows = longest
    if largest == 0:
        return Difference(0.0)
    module, by = _first_module(model, prompt, tokens[:rows], record)
    return Difference(largest, rows, module, by)


def check_trees(model: Model, allowed: float) -> bool:
    """Whether each node of a tree has the logits of its own path as a chain."""
    if model.max_length < PROMPT + 5:
        return False
    prompt, tokens = _tokens(model, PROMPT, 5), _tokens(model, 7, 6)
    parents = [-1, 0, 0, 1, 2, 2, 3]
    session = _prefilled(model, prompt)
    logits = model.forward([Rows(session, tokens, parents)]).logits
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = _prefilled(model, prompt)
        expected = model.forward([Rows(chain, [tokens[i] for i in path], logits="last")]).logits[0]
        apart = _apart(logits[node], expected)
        if not apart <= allowed or (allowed == 0 and logits[node].tobytes() != expected.tobytes()):
            return False
        if node == len(tokens) - 1:  # what is kept of it is the chain's cache
            session.keep(path)
            chain.keep(range(len(path)))
            for one, other in zip(session.keys_values(), chain.keys_values(), strict=True):
                if not _apart(one, other) <= allowed:
                    return False
    return True


def _apart(one: Any, other: Any) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


def _first_module(
    model: Model, prompt: list[int], tokens: list[int], record: Record
) -> tuple[str | None, float]:
    session = _prefilled(model, prompt)
    with record() as single:
        runs = []
        for token in tokens:
            model.forward([Rows(session, [token])])
            session.keep([0])
            runs.append(list(single))
            single.clear()
    session = _prefilled(model, prompt)
    with record() as together:
        model.forward([Rows(session, tokens)])
    for index, (name, value) in enumerate(together):
        rows_at = 1 if value.dim() > 2 and value.shape[0] == 1 else 0
        if value.shape[rows_at] != len(tokens):
            continue
        for row, run in enumerate(runs):
            if index >= len(run) or run[index][0] != name:
                return name, float("nan")
            mine = value.select(rows_at, row)
            theirs = run[index][1].select(rows_at, 0)
            if mine.shape == theirs.shape and not bool((mine == theirs).all()):
                return name, float((mine.double() - theirs.double()).abs().max())
    return None, 0.0
