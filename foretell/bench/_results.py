"""From a record to the numbers that are reported."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foretell.bench._statistics import Estimate, Sample, rate, speedup
from foretell.bench._workload import distinct_ngrams

OVERALL: Final = "overall"
LOOPING: Final = 0.7
"""Below this share of distinct 4-grams a plain output counts as looping."""
MOST_WAITING: Final = 0.1
"""Above this share of its time spent waiting for a core, added up over threads, a request counts
as disturbed: others had the machine."""

Key = tuple[str, int]
"""A question and a turn."""


@dataclass(frozen=True)
class EngineResult:
    """One engine over the questions that all engines answered.

    Estimates are by category, "overall" among them; ``total`` counts reading the prompts too.
    ``differing`` turns of ``turns`` gave another output than plain decoding; None for plain.
    """

    name: str
    kind: str
    dtype: str
    mode: str
    plain: str | None
    decode: dict[str, Estimate]
    total: dict[str, Estimate]
    decode_speedup: dict[str, Estimate]
    total_speedup: dict[str, Estimate]
    times_others: dict[str, Estimate]
    """How many times as fast overall foretell is that drafts by itself, in the same weights; of
    one entry at most."""
    turns: int
    differing: int | None
    acceptance: tuple[float, ...]
    """At each position of a draft, accepted tokens per draft; empty where it is not told."""
    acceptance_rate: float | None
    tokens_per_step: float | None
    step_seconds: dict[str, float]
    """Seconds of a step by where they go; empty where it is not told."""
    disturbed: float

    @property
    def is_plain(self) -> bool:
        return self.plain == self.name


@dataclass(frozen=True)
class Results:
    """All of a record. ``without_loops``: the same without questions whose plain output loops."""

    record: Mapping[str, Any]
    categories: tuple[str, ...]
    questions: int
    engines: tuple[EngineResult, ...]
    left_out: int
    """Turns that an engine never answered undisturbed, where most were; others went on."""
    looping: tuple[str, ...]
    without_loops: tuple[EngineResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Speeds and speedups, for machines."""
        return {
            "questions": self.questions,
            "left_out": self.left_out,
            "looping": list(self.looping),
            "engines": [_to_dict(engine) for engine in self.engines],
            "without_loops": [_to_dict(engine) for engine in self.without_loops],
        }


def _to_dict(engine: EngineResult) -> dict[str, Any]:
    estimates = ("decode", "total", "decode_speedup", "total_speedup")
    return {
        "name": engine.name,
        **{
            name: {place: e.to_list() for place, e in getattr(engine, name).items()}
            for name in estimates
        },
        "turns": engine.turns,
        "differing": engine.differing,
    }


def results_of(record: Mapping[str, Any]) -> Results:
    """The results of a checked record; of one that was interrupted, of what is complete."""
    table = _Table(record)
    looping = table.looping()
    rest = [key for key in table.keys if key[0] not in looping]
    return Results(
        record,
        tuple(dict.fromkeys(table.categories[question] for question, _ in table.keys)),
        len({question for question, _ in table.keys}),
        table.engines(table.keys),
        table.left_out,
        tuple(looping),
        table.engines(rest) if looping and rest else (),
    )


class _Table:
    """Requests by engine, question and turn."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record
        self.requests: dict[str, dict[Key, list[dict[str, Any]]]] = {}
        self.categories: dict[str, str] = {}
        for request in record["requests"]:
            key = (request["question"], request["turn"])
            places = self.requests.setdefault(request["engine"], {})
            places.setdefault(key, []).append(request)
            self.categories[request["question"]] = request["category"]
        self.listed = [e for e in record["engines"] if e["name"] in self.requests]
        shared = [set(self.requests[engine["name"]]) for engine in self.listed]
        common: set[Key] = set.intersection(*shared) if shared else set()
        order = dict.fromkeys((r["question"], r["turn"]) for r in record["requests"])
        self.keys = [key for key in order if key in common]
        quiet = [key for key in self.keys if self._has_quiet(key)]
        # Where hardly anything was undisturbed there is nothing to choose; the report says so.
        chosen = quiet if 2 * len(quiet) >= len(self.keys) else self.keys
        self.left_out = len(self.keys) - len(chosen)
        self.keys = chosen

    def _has_quiet(self, key: Key) -> bool:
        """Whether every engine has a repetition that nobody disturbed."""
        return all(
            any(request["waiting"] <= MOST_WAITING for request in self.requests[e["name"]][key])
            for e in self.listed
        )

    def looping(self) -> list[str]:
        """Questions whose output repeats itself, by the first plain engine there is."""
        plain = next((e["name"] for e in self.listed if e["plain"] == e["name"]), None)
        if plain is None:
            return []
        looping = []
        for question in dict.fromkeys(question for question, _ in self.keys):
            turns = [key for key in self.keys if key[0] == question]
            outputs = [self._output(plain, key) for key in turns]
            if any(distinct_ngrams(output) < LOOPING for output in outputs):
                looping.append(question)
        return looping

    def engines(self, keys: Sequence[Key]) -> tuple[EngineResult, ...]:
        if not keys:
            return ()
        return tuple(self._engine(engine, keys) for engine in self.listed)

    def _output(self, engine: str, key: Key) -> Sequence[Any]:
        """Of the first repetition: tokens, or the words of an engine that gives none."""
        output = self.record["outputs"][self.requests[engine][key][0]["output"]]
        return output.split() if isinstance(output, str) else output

    def _engine(self, engine: Mapping[str, Any], keys: Sequence[Key]) -> EngineResult:
        name, plain = engine["name"], engine["plain"]
        mine = self.requests[name]
        requests = [request for key in keys for request in mine[key]]
        known = plain if plain in self.requests else None
        champion = self._champion(engine)
        return EngineResult(
            name=name,
            kind=engine["kind"],
            dtype=engine["dtype"],
            mode=engine["mode"],
            plain=known,
            decode=self._rates(name, keys, "decode"),
            total=self._rates(name, keys, "total"),
            decode_speedup={} if known is None else self._speedups(name, known, keys, "decode"),
            total_speedup={} if known is None else self._speedups(name, known, keys, "total"),
            times_others={}
            if champion is None
            else {champion: self._speedups(champion, name, keys, "decode")[OVERALL]},
            turns=len(keys),
            differing=None
            if known in (None, name)
            else sum(self._differs(name, str(known), key) for key in keys),
            **_counts(requests),
            disturbed=sum(r["waiting"] > MOST_WAITING for r in requests) / len(requests),
        )

    def _champion(self, engine: Mapping[str, Any]) -> str | None:
        """Foretell as it drafts by itself, in the weights of ``engine``; for others than itself."""
        for other in self.listed:
            own = (other["kind"], other["mode"]) == ("foretell", "auto") and not other["drafters"]
            if own and other["dtype"] == engine["dtype"] and engine["kind"] != "foretell":
                return str(other["name"])
        return None

    def _differs(self, name: str, plain: str, key: Key) -> bool:
        """Whether a repetition gave what plain decoding never did."""
        outputs = {request["output"] for request in self.requests[plain][key]}
        return any(request["output"] not in outputs for request in self.requests[name][key])

    def _rates(self, name: str, keys: Sequence[Key], what: str) -> dict[str, Estimate]:
        found = {}
        for category, inside in self._by_category(keys).items():
            samples = self._samples(name, inside, what)
            if samples:
                found[category] = rate([*samples.values()])
        return found

    def _speedups(
        self, name: str, other: str, keys: Sequence[Key], what: str
    ) -> dict[str, Estimate]:
        found = {}
        for category, inside in self._by_category(keys).items():
            ours, theirs = (self._samples(engine, inside, what) for engine in (name, other))
            both = [question for question in ours if question in theirs]
            if both:
                found[category] = speedup([ours[q] for q in both], [theirs[q] for q in both])
        return found

    def _by_category(self, keys: Sequence[Key]) -> dict[str, list[Key]]:
        """Those of each category, and all of them."""
        inside: dict[str, list[Key]] = {}
        for key in keys:
            inside.setdefault(self.categories[key[0]], []).append(key)
        return {OVERALL: list(keys), **inside}

    def _samples(self, name: str, keys: Sequence[Key], what: str) -> dict[str, Sample]:
        """One for each question, its turns added up.

        An answer of a single token has no decoding, and is left out.
        """
        samples = {}
        counted = "decode_tokens" if what == "decode" else "num_tokens"
        for question in dict.fromkeys(question for question, _ in keys):
            turns = [_quietest(self.requests[name][key]) for key in keys if key[0] == question]
            repetitions = min(len(turn) for turn in turns)
            tokens = sum(statistics.median(r[counted] for r in turn) for turn in turns)
            seconds = tuple(
                sum(turn[index][f"{what}_seconds"] for turn in turns)
                for index in range(repetitions)
            )
            if tokens and all(seconds):
                samples[question] = Sample(tokens, seconds)
        return samples


def _quietest(requests: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The repetitions that were not disturbed; all, where all were."""
    return [request for request in requests if request["waiting"] <= MOST_WAITING] or requests


def _counts(requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance and where the time goes, added up over requests."""
    sums: dict[str, float] = {}
    positions: list[float] = []
    seconds = 0.0
    for request in requests:
        seconds += request["decode_seconds"]
        sums["decode_tokens"] = sums.get("decode_tokens", 0.0) + request["decode_tokens"]
        for name, value in request["stats"].items():
            if isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value
        for position, count in enumerate(request["stats"].get("num_accepted_tokens_per_pos", ())):
            positions += [0.0] * (position + 1 - len(positions))
            positions[position] += count
    drafts, drafted, steps = (
        sums.get(name, 0.0) for name in ("num_drafts", "num_draft_tokens", "num_steps")
    )
    where: dict[str, float] = {}
    if steps and "model_seconds" in sums:
        deciding = sums.get("deciding_seconds", 0.0)
        where = {
            "passes of the model": sums["model_seconds"] / steps,
            "drafters and policy": deciding / steps,
            "all else": max(seconds - sums["model_seconds"] - deciding, 0.0) / steps,
        }
    return {
        "acceptance": tuple(count / drafts for count in positions) if drafts else (),
        "acceptance_rate": sums.get("num_accepted_tokens", 0.0) / drafted if drafted else None,
        "tokens_per_step": sums["decode_tokens"] / steps if steps else None,
        "step_seconds": where,
    }
