"""What drafting costs beside the model: each drafter's time and memory per step.

    python benchmarks/drafters.py --output drafters.json

Every step of a drafter is what a generation asks of it: index the tokens of the last step,
propose, and observe logits of the model's width for all nodes of the draft. The text is made up:
words of very uneven frequency, and every so often a passage quoted from before. Prints a table
and writes one JSON record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import foretell
from foretell import Accepted, Draft, Drafter, Origin, Output
from foretell._calibration import Calibration
from foretell._model import FloatArray
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._tree import draft_of, grow, learn
from foretell.drafters import PromptLookup, Recycling, Suffix, SuffixMemory

CONTEXTS = (512, 2048, 8192)
MEMORY_TOKENS = 100_000
MOST_NEW = 3  # tokens a step adds
Spent = dict[str, list[float]]


def text(count: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    """Tokens with Zipf's frequencies; a fifth of them in passages quoted from earlier."""
    chances = 1.0 / np.arange(1, vocab_size + 1)
    words = rng.permutation(vocab_size)
    fresh = words[rng.choice(vocab_size, size=count, p=chances / chances.sum())].tolist()
    tokens: list[int] = []
    while len(tokens) < count:
        if len(tokens) > 100 and rng.random() < 0.02:
            start = int(rng.integers(len(tokens) - 20))
            tokens += tokens[start : start + int(rng.integers(5, 20))]
        else:
            tokens.append(fresh[len(tokens)])
    return tokens[:count]


def workload(
    context: int, options: argparse.Namespace
) -> tuple[list[int], FloatArray, np.random.Generator]:
    """Tokens for a context and the steps after it, and logits for every node of a draft."""
    rng = np.random.default_rng(context)
    tokens = text(context + MOST_NEW * options.steps + 4, options.vocab_size, rng)
    logits = rng.normal(size=(options.limit + 1, options.vocab_size)).astype(np.float32)
    return tokens, logits, rng


def emitted(tokens: list[int]) -> Accepted:
    """What a step emits; that nothing was accepted makes no difference to the cost."""
    return Accepted((0,), tuple(tokens), Origin.PLAIN)


def run(make: Callable[[], Drafter], context: int, options: argparse.Namespace) -> Spent:
    """Seconds of each part of each step."""
    tokens, logits, rng = workload(context, options)
    drafter, length = make(), context
    spent: Spent = {"start": [], "propose": [], "observe": []}
    began = time.perf_counter()
    drafter.start(tokens[:length])
    empty = Proposal().draft()
    drafter.observe(empty, Output(logits[:1]), emitted(tokens[length : length + 1]))
    drafter.propose(tokens[:length], options.limit)
    spent["start"].append(time.perf_counter() - began)
    for _ in range(options.steps):
        new = int(rng.integers(1, MOST_NEW + 1))
        seen = tokens[: length + new]
        begun = time.perf_counter()
        draft = drafter.propose(seen, options.limit)
        proposed = time.perf_counter()
        output = Output(logits[: len(draft) + 1])
        accepted = emitted(tokens[length + new : length + new + 1])
        observing = time.perf_counter()
        drafter.observe(draft, output, accepted)
        spent["observe"].append(time.perf_counter() - observing)
        spent["propose"].append(proposed - begun)
        length += new
    return spent


def held(make: Callable[[], Drafter], context: int, options: argparse.Namespace) -> int:
    """Bytes that Python holds for a drafter after ``context`` tokens and all steps."""
    tokens, logits, _ = workload(context, options)
    ready = make()  # what is loaded once for all requests does not count
    ready.start(tokens[:2])
    ready.observe(ready.propose(tokens[:2], 1), Output(logits[:2]), emitted(tokens[:1]))
    tracemalloc.start()
    drafter = make()
    drafter.start(tokens[:context])
    for length in range(context, context + options.steps):
        draft = drafter.propose(tokens[:length], options.limit)
        drafter.observe(draft, Output(logits[: len(draft) + 1]), emitted([tokens[length]]))
    del draft
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def full(options: argparse.Namespace) -> dict[str, int]:
    """Bytes of what an engine keeps for all requests, when there is no room for more."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(options.limit + 1, options.vocab_size)).astype(np.float32)
    recycling, sizes = Recycling(), {}
    recycling.start([1, 2])
    recycling.observe(Proposal().draft(), Output(logits[:1]), emitted([1]))
    tracemalloc.start()
    memory = SuffixMemory()
    while memory.num_tokens < memory.max_tokens - 1000:
        memory.add(rng.integers(options.vocab_size, size=1000).tolist())
    sizes["suffix"] = tracemalloc.get_traced_memory()[0]
    del memory
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20_000 // options.limit):
        draft = Draft.one_hot(rng.integers(options.vocab_size, size=options.limit).tolist())
        recycling.observe(draft, Output(logits), emitted(list(draft.tokens)))
    del draft
    sizes["recycling"] = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return sizes


def run_assembly(context: int, options: argparse.Namespace) -> Spent:
    """The same for suffix and recycling together: their proposals, one tree, what it teaches."""
    tokens, logits, rng = workload(context, options)
    drafters: list[EvidenceDrafter] = [Suffix(), Recycling()]
    calibration, length = Calibration(), context
    for drafter in drafters:
        drafter.start(tokens[:length])
    spent: Spent = {"suggest": [], "assemble": [], "learn": []}
    for _ in range(options.steps):
        new = int(rng.integers(1, MOST_NEW + 1))
        seen = tokens[: length + new]
        times = [time.perf_counter()]
        made = {drafter.name: drafter.suggest(seen, options.limit) for drafter in drafters}
        times.append(time.perf_counter())
        draft = draft_of(list(grow(made, calibration, options.limit)))
        times.append(time.perf_counter())
        learn(made, tokens[length + new : length + new + 2], calibration)
        times.append(time.perf_counter())
        for part, before, after in zip(spent, times, times[1:], strict=False):
            spent[part].append(after - before)
        accepted = emitted(tokens[length + new : length + new + 1])
        for drafter in drafters:
            drafter.observe(draft, Output(logits[: len(draft) + 1]), accepted)
        length += new
    return spent


def microseconds(values: list[float]) -> dict[str, float]:
    """The middle and the ends of what was measured."""
    return {
        "median": round(1e6 * median(values), 1),
        "percentile_90": round(1e6 * float(np.quantile(values, 0.9)), 1),
        "mean": round(1e6 * float(np.mean(values)), 1),
    }


def contestants(vocab_size: int) -> dict[str, Callable[[], Drafter]]:
    """Every drafter that needs no model of its own."""
    memory = SuffixMemory()
    rng = np.random.default_rng(0)
    for _ in range(MEMORY_TOKENS // 1000):
        memory.add(text(1000, vocab_size, rng))
    return {
        "prompt_lookup": PromptLookup,
        "suffix": Suffix,
        f"suffix, {MEMORY_TOKENS} tokens of earlier outputs": lambda: Suffix(memory),
        "recycling": Recycling,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the JSON record")
    parser.add_argument("--steps", type=int, default=400, help="steps at each context")
    parser.add_argument("--limit", type=int, default=16, help="most nodes of a draft")
    parser.add_argument("--vocab-size", type=int, default=49152)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    table = Table(title=f"Microseconds per step: median (90%), drafts of at most {options.limit}")
    for heading in ("drafter", "part", *map(str, CONTEXTS)):
        table.add_column(heading)
    made = contestants(options.vocab_size)
    runs: dict[str, Callable[[int], Spent]] = {
        name: lambda context, make=make: run(make, context, options)  # type: ignore[misc]
        for name, make in made.items()
    }
    memory = {
        name: {str(context): held(make, context, options) for context in CONTEXTS}
        for name, make in made.items()
    }
    kept = full(options)
    runs["suffix and recycling, one tree"] = lambda context: run_assembly(context, options)
    for name, measure in runs.items():
        spent = {context: measure(context) for context in CONTEXTS}
        results[name] = {
            str(context): {part: microseconds(values) for part, values in parts.items()}
            for context, parts in spent.items()
        }
        for row, part in enumerate(spent[CONTEXTS[0]]):
            cells = [results[name][str(context)][part] for context in CONTEXTS]
            values = [f"{cell['median']} ({cell['percentile_90']})" for cell in cells]
            table.add_row("" if row else name, part, *values)
    sizes = Table(title="Bytes held for a request")
    for heading in ("drafter", *map(str, CONTEXTS)):
        sizes.add_column(heading, justify="right")
    for name, counts in memory.items():
        sizes.add_row(name, *(f"{count:,}" for count in counts.values()))
    console = Console()
    console.print(table)
    console.print(sizes)
    console.print(f"Bytes of what an engine keeps for all requests, when full: {kept}")
    record = {
        "what": "time per step and memory of each drafter",
        "foretell": foretell.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "settings": {
            "steps": options.steps,
            "limit": options.limit,
            "vocab_size": options.vocab_size,
        },
        "microseconds": results,
        "bytes_of_a_request": memory,
        "bytes_of_an_engine": kept,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
