"""Speculation as it is by default against plain decoding, in turns, also where nothing can be won.

    python benchmarks/never_slower.py --questions QUESTIONS.jsonl --output never_slower.json

QUESTIONS.jsonl has Spec-Bench's format: a line of JSON for each question, with `category` and
`turns`, of which the first is asked; MT-bench's categories count as one. Hostile workloads are
added: random text, a drafter that is always wrong and says 0.99, and one that takes longer than the
target. Only decoding is timed: the prompt is read once for both ways. See README.md here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from foretell import Draft, Drafter, Engine, SamplingParams
from foretell._auto_policy import Experience
from foretell._decode import decode
from foretell._model import Rows
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._request import Request
from foretell.bench._machine import (
    command_line,
    load_average,
    machine,
    seconds_of_others,
    versions,
)

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
DTYPES = ("float32", "bfloat16", "int8", "native")
RANDOM_TOKENS = 200
LEAST_POINT, LEAST_BOUND = 0.98, 0.95
RESAMPLES = 2000
LOOPING = 0.7
"""A text with fewer distinct 4-grams than this share repeats itself."""


# --- What is hostile --------------------------------------------------------------------


class Wrong(EvidenceDrafter):
    """Says 0.99 of tokens that the target never chooses."""

    name = "wrong"

    def __init__(self, token: int) -> None:
        self._token = token

    def spawn(self) -> Wrong:
        return Wrong(self._token)

    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        return Proposal((self._token,) * limit, None, (0.99,) * limit, ("certain",) * limit)


class Slow(Drafter):
    """Right, but every token takes it twice as long as the target takes."""

    name = "slow"

    def __init__(self, answer: Sequence[int], seconds: float) -> None:
        self._answer, self._seconds = answer, seconds

    def spawn(self) -> Slow:
        return Slow(self._answer, self._seconds)

    def start(self, prompt: Sequence[int]) -> None:
        self._begin = len(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        end = time.perf_counter() + limit * self._seconds
        while time.perf_counter() < end:
            pass
        done = len(context) - self._begin
        return Draft.one_hot(self._answer[done : done + limit])


# --- What is measured -------------------------------------------------------------------


class Question(NamedTuple):
    """Something to decode after, in both ways."""

    workload: str
    number: int
    tokens: list[int]
    params: SamplingParams


def read_questions(path: Path, per_category: int) -> dict[str, list[str]]:
    """The first turns of as many questions of each category, evenly spread over the file."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        if line.strip():
            entry = json.loads(line)
            group = entry["category"] if entry["category"] in GROUPS else "mt_bench"
            groups[group].append(entry["turns"][0])
    return {
        name: [texts[i * len(texts) // count] for i in range(count)]
        for name, texts in sorted(groups.items())
        for count in [min(per_category, len(texts))]
    }


def questions_of(engine: Engine, options: argparse.Namespace) -> list[Question]:
    """All that is decoded in a repetition, the workloads in turns."""
    made: list[Question] = []
    greedy = SamplingParams(max_tokens=options.max_tokens)
    for workload, texts in read_questions(options.questions, options.per_category).items():
        for number, text in enumerate(texts):
            tokens = engine.encode(messages=[{"role": "user", "content": text}])
            made.append(Question(workload, number, tokens, greedy))
    rng = np.random.default_rng(1)
    for number in range(options.hostile_questions):
        noise = rng.integers(engine.model.vocab_size, size=RANDOM_TOKENS).tolist()
        random = SamplingParams(
            max_tokens=options.max_tokens, temperature=1.5, seed=number, ignore_eos=True
        )
        made.append(Question("random text", number, noise, random))
        free = Question("wrong drafter", number, noise[:20], greedy)
        made += [free, free._replace(workload="slow drafter")]
    wanted = options.workloads.split(",") if options.workloads else None
    return sorted(
        (one for one in made if wanted is None or one.workload in wanted),
        key=lambda one: one.number,
    )


def run(engine: Engine, request: Request) -> dict[str, Any]:
    """Decode to the end: what it took, and what was decided."""
    began = len(request.tokens)
    for _ in decode(engine.model, [request]):
        pass
    if request.error is not None:
        raise request.error
    request.policy.finish(request.tokens)
    return {
        "tokens": request.tokens[began:],
        "seconds": request.stats.decode_seconds,
        "steps": request.stats.num_steps,
        "drafted": request.stats.num_draft_tokens,
        "accepted": request.stats.num_accepted_tokens,
        "policy": request.policy.report(),
    }


class Contest:
    """One engine for each weight type, and what each has learned so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engines = {
            dtype: Engine(options.model, dtype=dtype, threads=options.threads)
            for dtype in options.dtypes.split(",")
        }
        first, *_ = self.engines.values()
        self.usual = {dtype: engine.drafters for dtype, engine in self.engines.items()}
        self.questions = questions_of(first, options)
        # Nothing is known at the beginning, whatever was kept on this machine. Each hostile
        # workload learns for itself, all questions of an engine together.
        self.experiences: dict[tuple[str, str], Experience] = defaultdict(Experience)
        self.plain_seconds: dict[str, float] = {}
        for engine in self.engines.values():  # warm up: memory, threads, first calls
            engine._experience = Experience()
            for ways in (0, 4):
                engine.generate(
                    first.encode("One, two, three"), max_tokens=8, num_draft_tokens=ways
                )

    def turn(self, dtype: str, question: Question, repetition: int) -> dict[str, Any]:
        """The same question plainly and by default, one after the other, in changing order."""
        engine, tokens = self.engines[dtype], question.tokens
        base = engine.model.new_session()
        for start in range(0, len(tokens) - 1, 256):
            chunk = tokens[start : min(start + 256, len(tokens) - 1)]
            engine.model.forward([Rows(base, chunk, logits="none")])
            base.keep(range(len(chunk)))
        hostile = question.workload if question.workload.endswith("drafter") else ""
        hidden = question.workload == "random text"
        engine._experience = self.experiences[dtype, question.workload if hidden else hostile]

        def decoded(way: int | str) -> dict[str, Any]:
            [request] = engine.prepare(
                tokens,
                question.params,
                num_draft_tokens=way,
                session=base.fork(),  # type: ignore[arg-type]
            )
            return run(engine, request)

        ways: dict[str, dict[str, Any]] = {}
        if hostile:  # what it would say, and how long a step takes
            ways["plain"] = decoded(0)
            engine.drafters = [self.hostile(engine, hostile, ways["plain"])]
        for way in ("plain", "auto") if (repetition + question.number) % 2 else ("auto", "plain"):
            ways[way] = decoded(0 if way == "plain" else "auto")
        engine.drafters = self.usual[dtype]
        plain, auto = ways["plain"], ways["auto"]
        policy = auto["policy"]
        return {
            "dtype": dtype,
            "workload": question.workload,
            "question": question.number,
            "repetition": repetition,
            "tokens": len(plain["tokens"]),
            "distinct_4_grams": distinct(plain["tokens"]),
            "equal": plain["tokens"] == auto["tokens"],
            "plain_seconds": plain["seconds"],
            "seconds": auto["seconds"],
            "steps": auto["steps"],
            "drafted": auto["drafted"],
            "accepted": auto["accepted"],
            "expected_tokens": policy["expected_tokens"],
            "deciding_seconds": policy["deciding_seconds"],
            "exploration_seconds": policy["exploration_seconds"],
            "asks": {one["name"]: one["num_asks"] for one in policy["drafters"]},
        }

    def hostile(self, engine: Engine, name: str, plain: dict[str, Any]) -> Drafter:
        if name == "slow drafter":
            each = plain["seconds"] / max(plain["steps"], 1)
            return Slow(plain["tokens"], 2.0 * each)
        used = {*plain["tokens"]}
        return Wrong(next(t for t in range(engine.model.vocab_size) if t not in used))


def distinct(tokens: Sequence[int]) -> float:
    """The share of 4-grams that are there once only counted once: 1 for a text without repeats."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def units(contest: Contest) -> Iterator[tuple[str, Question, int]]:
    """Everything to measure, so that wherever it ends, all were measured about as often."""
    for repetition in range(contest.options.repetitions):
        for question in contest.questions:
            for dtype in contest.engines:
                yield dtype, question, repetition


# --- What it says -----------------------------------------------------------------------


def ratio(samples: Sequence[dict[str, Any]]) -> float:
    """How many times as fast as plain decoding."""
    return sum(s["plain_seconds"] for s in samples) / sum(s["seconds"] for s in samples)


def lower_bound(samples: Sequence[dict[str, Any]], level: float = 0.05) -> float:
    """Bootstrap: questions are drawn with replacement, and of each its repetitions."""
    questions: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for s in samples:
        questions[s["workload"], s["question"]].append((s["plain_seconds"], s["seconds"]))
    times = [np.array(pairs) for pairs in questions.values()]
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        plain = seconds = 0.0
        for pairs in (times[i] for i in rng.integers(len(times), size=len(times))):
            drawn = pairs[rng.integers(len(pairs), size=len(pairs))].mean(axis=0)
            plain, seconds = plain + drawn[0], seconds + drawn[1]
        ratios.append(plain / seconds)
    return float(np.quantile(ratios, level))


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = sum(s["steps"] for s in samples)
    emitted = sum(s["tokens"] - 1 for s in samples)
    drafted = sum(s["drafted"] for s in samples)
    seconds = sum(s["seconds"] for s in samples)
    return {
        "samples": len(samples),
        "questions": len({(s["workload"], s["question"]) for s in samples}),
        "speed_over_plain": round(ratio(samples), 4),
        "lower_bound": round(lower_bound(samples), 4),
        "median_of_samples": round(median(s["plain_seconds"] / s["seconds"] for s in samples), 4),
        "plain_tokens_per_second": round(emitted / sum(s["plain_seconds"] for s in samples), 2),
        "tokens_per_second": round(emitted / seconds, 2),
        "tokens_per_step": round(emitted / steps, 3),
        "expected_tokens_per_step": round(sum(s["expected_tokens"] for s in samples) / steps, 3),
        "nodes_per_step": round(drafted / steps, 3),
        "acceptance_rate": round(sum(s["accepted"] for s in samples) / max(drafted, 1), 3),
        "deciding_microseconds": round(1e6 * sum(s["deciding_seconds"] for s in samples) / steps),
        "exploration_share": round(sum(s["exploration_seconds"] for s in samples) / seconds, 5),
        "outputs_that_differ": sum(not s["equal"] for s in samples),
    }


def results(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every weight type: each workload, all questions, and those without repetitive ones."""
    made = []
    for dtype in dict.fromkeys(s["dtype"] for s in samples):
        mine = [s for s in samples if s["dtype"] == dtype]
        ordinary = [s for s in mine if s["workload"] in GROUPS]
        free = [s for s in ordinary if s["distinct_4_grams"] >= LOOPING]
        parts: list[tuple[str, list[dict[str, Any]]]] = [
            (name, [s for s in mine if s["workload"] == name])
            for name in dict.fromkeys(s["workload"] for s in mine)
        ]
        parts += [("all questions", ordinary), ("of these without loops", free)]
        made += [{"dtype": dtype, "workload": name, **summary(of)} for name, of in parts if of]
    return made


def tables(entries: Iterable[dict[str, Any]]) -> Table:
    table = Table(title="Speed over plain decoding")
    for heading in (
        "weights", "workload", "over plain", "at least", "median", "tokens/s", "tokens/step",
        "(expected)", "nodes", "deciding us", "exploring", "questions x times", "",
    ):  # fmt: skip
        table.add_column(heading)
    for e in entries:
        fine = e["speed_over_plain"] >= LEAST_POINT and e["lower_bound"] >= LEAST_BOUND
        table.add_row(
            e["dtype"],
            e["workload"],
            f"{e['speed_over_plain']:.3f}",
            f"{e['lower_bound']:.3f}",
            f"{e['median_of_samples']:.3f}",
            f"{e['tokens_per_second']:.1f}",
            f"{e['tokens_per_step']:.2f}",
            f"{e['expected_tokens_per_step']:.2f}",
            f"{e['nodes_per_step']:.2f}",
            str(e["deciding_microseconds"]),
            f"{100 * e['exploration_share']:.1f}%",
            f"{e['questions']} x {e['samples'] / e['questions']:.1f}",
            "" if fine and not e["outputs_that_differ"] else "**no**",
        )
    return table


# --- The record -------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What has to stay the same from one slice to the next."""
    names = "per_category hostile_questions repetitions max_tokens threads dtypes workloads"
    return {
        "questions": options.questions.name,
        "model": Path(str(options.model)).name,
        **{name: getattr(options, name) for name in names.split()},
    }


def opened(options: argparse.Namespace) -> dict[str, Any]:
    """The record so far, or a new one."""
    if options.output is None or not options.output.exists():
        return {"what": "speed by default over plain decoding", "slices": [], "samples": []}
    record: dict[str, Any] = json.loads(options.output.read_text("utf-8"))
    if record["settings"] != settings_of(options):
        raise SystemExit(
            f"{options.output} was made with other settings: {record['settings']}; use these, or "
            "another --output"
        )
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """JSON with a line for each sample."""
    head = json.dumps({k: v for k, v in record.items() if k != "samples"}, indent=1)
    samples = ",\n  ".join(map(json.dumps, record["samples"]))
    path.write_text(f'{head[:-2]},\n "samples": [\n  {samples}\n ]\n}}\n', "utf-8")


def measure(options: argparse.Namespace, record: dict[str, Any], say: Callable[..., None]) -> None:
    """Go on where the record ends, for as long as there is time."""
    began, load, others = time.perf_counter(), load_average(), seconds_of_others()
    contest = Contest(options)
    names = ("dtype", "workload", "question", "repetition")
    done = {tuple(s[name] for name in names) for s in record["samples"]}
    before = len(done)
    for dtype, question, repetition in units(contest):
        if (dtype, question.workload, question.number, repetition) in done:
            continue
        if time.perf_counter() - began > 60 * options.minutes:
            break
        sample = contest.turn(dtype, question, repetition)
        sample["slice"] = len(record["slices"])
        record["samples"].append(sample)
        if not sample["equal"]:
            say(f"[red]{dtype}, {question.workload} {question.number}: the outputs differ")
    seconds = time.perf_counter() - began
    record["slices"].append(
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "samples": len(record["samples"]) - before,
            "load_average_before": load,
            "cores_used_by_others": round((seconds_of_others() - others) / seconds, 3),
            "versions": versions(),
        }
    )
    say(f"{len(record['samples'])} of {sum(1 for _ in units(contest))} samples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's format")
    parser.add_argument("--output", type=Path, help="the JSON record; is continued if it exists")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--per-category", type=int, default=40)
    parser.add_argument("--hostile-questions", type=int, default=40, help="of each hostile kind")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--workloads", default="", help="some of them only, by name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="stop after so many; go on later"
    )
    options = parser.parse_args()
    console = Console()
    if console.width < 160:  # a table cut to pieces says nothing
        console = Console(width=160)
    record = opened(options)
    record["settings"], record["machine"] = settings_of(options), machine()
    record["command"] = command_line("benchmarks/never_slower.py", sys.argv[1:], ("--minutes",))
    measure(options, record, console.print)
    record["results"] = results(record["samples"])
    console.print(tables(record["results"]))
    if options.output is not None:
        write(options.output, record)


if __name__ == "__main__":
    main()
