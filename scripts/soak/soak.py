"""Compare speculative with plain decoding on the demo model, at random, for some minutes.

    python scripts/soak/soak.py --minutes 10 --output soak.json

Every case draws a prompt, a length, stop conditions, sampling parameters, weights, threads,
drafters and a draft length, decodes plainly and speculatively, and compares tokens, text, ending
and log-probabilities. The record says what was run and lists every case that differed, with all
that is needed to run it again (`--seed` and the number of the case draw the same one). Exit code 1
if any did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretell import Draft, Drafter, Engine, Generation, SamplingParams, __version__
from foretell.drafters import PromptLookup

ROOT = Path(__file__).resolve().parent.parent.parent
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about rivers.",
    "Count from one to thirty in words.",
    "List the first ten prime numbers and explain each.",
    "Schreibe einen Satz auf Deutsch. 🙂",
    "Repeat the word 'echo' twenty times.",
)
STOPS = ((), (), (".",), ("\n\n", "the"), ("e s", "zq"))
DRAFTERS = ("prompt_lookup", "long_lookup", "draft_model", "ngram", "noise", "noise+prompt_lookup")


class Noise(Drafter):
    """Random trees of tokens the text has already used: nearly always wrong, sometimes right."""

    name = "noise"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    def spawn(self) -> Noise:
        return Noise(self._seed)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        tokens: list[int] = []
        parents = [-1]
        for _ in range(self._random.randint(0, limit)):
            token, parent = self._random.choice(context), self._random.randrange(len(parents))
            if (parent, token) not in zip(parents[1:], tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        return Draft.one_hot(tuple(tokens), tuple(parents))


@dataclass(frozen=True)
class Case:
    """One comparison; everything in it was drawn from (seed, number)."""

    number: int
    kind: str
    prompt: str | list[int]
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    dtype: str
    plain_threads: int
    threads: int
    drafter: str
    num_draft_tokens: int
    temperature: float
    top_p: float
    frequency_penalty: float
    sampling_seed: int


@dataclass
class Record:
    """What a soak leaves behind."""

    seed: int
    minutes: float
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    seconds: float = 0.0
    num_cases: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cases_per_drafter: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(
        default_factory=lambda: {
            "foretell": __version__,
            "python": platform.python_version(),
            "numba": version("numba"),
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
        }
    )


def texts() -> str:
    """Prose to cut prompts from: this project's own pages."""
    return "\n".join(p.read_text("utf-8") for p in sorted(ROOT.glob("docs/*.md")))


def draw(seed: int, number: int, prose: str, vocab_size: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(("question", "prose", "repetition", "ids"))
    prompt: str | list[int]
    if kind == "question":
        prompt = rng.choice(QUESTIONS)
    elif kind == "prose":
        start, length = rng.randrange(len(prose)), rng.randint(1, 2000)
        prompt = prose[start : start + length] or "x"
    elif kind == "repetition":
        prompt = rng.choice(("abc ", "1, 2, ", "🙂", "def f(x):\n    ")) * rng.randint(1, 60)
    else:
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 300))]
    return Case(
        number=number,
        kind=kind,
        prompt=prompt,
        max_tokens=rng.choice((1, 2, 7, 24, 48, 96)),
        stop=rng.choice(STOPS),
        ignore_eos=rng.random() < 0.2,
        dtype=rng.choice(("float32", "bfloat16")),
        plain_threads=rng.choice((1, 2)),
        threads=rng.choice((1, 2)),
        drafter=rng.choice(DRAFTERS),
        num_draft_tokens=rng.choice((1, 2, 3, 4, 5, 8, 15, 16, 31)),
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.2)),
        sampling_seed=rng.getrandbits(64),
    )


class Engines:
    """Loads each combination of weights, threads and drafter once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._loaded: dict[tuple[str, int], Engine] = {}
        self._wired: dict[tuple[str, int, str], Engine] = {}

    def plain(self, dtype: str, threads: int) -> Engine:
        """An engine to decode plainly with."""
        key = (dtype, threads)
        if key not in self._loaded:
            self._loaded[key] = Engine(self._model, dtype=dtype, threads=threads)
        return self._loaded[key]

    def speculative(self, dtype: str, threads: int, name: str) -> Engine:
        """An engine with the named drafters, on the same loaded model."""
        key = (dtype, threads, name)
        if key not in self._wired:
            model = self.plain(dtype, threads).model
            named: dict[str, list[str | Drafter]] = {
                "prompt_lookup": ["prompt_lookup"],
                "long_lookup": [PromptLookup(max_ngram=8, min_ngram=2)],
                "draft_model": ["draft_model"],
                "ngram": ["ngram"],
                "noise": [Noise(1)],
                "noise+prompt_lookup": [Noise(2), "prompt_lookup"],
            }
            # The model as its own draft: everything is accepted, unless a stop cuts it. In the
            # other weights it would be a second copy in memory.
            draft = model if name == "draft_model" else None
            self._wired[key] = Engine(model, draft, named[name])
        return self._wired[key]


def run(case: Case, engines: Engines) -> tuple[Generation, Generation]:
    """The case, plainly and speculatively."""
    plain = engines.plain(case.dtype, case.plain_threads)
    speculative = engines.speculative(case.dtype, case.threads, case.drafter)
    sampling = SamplingParams(
        max_tokens=case.max_tokens,
        stop=case.stop,
        ignore_eos=case.ignore_eos,
        temperature=case.temperature,
        top_p=case.top_p,
        frequency_penalty=case.frequency_penalty,
        seed=case.sampling_seed,
        logprobs=1,
    )
    given: dict[str, Any] = {"prompt": case.prompt}
    if case.kind == "question":
        given = {"messages": [{"role": "user", "content": case.prompt}]}
    return (
        plain.generate(**given, sampling=sampling, num_draft_tokens=0),
        speculative.generate(**given, sampling=sampling, num_draft_tokens=case.num_draft_tokens),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, help="most cases to run")
    options = parser.parse_args()

    began = time.monotonic()
    record = Record(options.seed, options.minutes)
    engines = Engines(options.model)
    vocab_size = engines.plain("float32", 1).model.vocab_size
    prose = texts()
    for number in itertools.count(options.first):
        if record.num_cases == options.cases or time.monotonic() - began > 60 * options.minutes:
            break
        case = draw(options.seed, number, prose, vocab_size)
        record.num_cases += 1
        try:
            plain, speculative = run(case, engines)
        except Exception as error:  # a finding like any other, and no reason to stop
            record.differences.append({"case": asdict(case), "error": repr(error)})
            print(f"case {number} failed: {error!r}", file=sys.stderr)
            continue
        record.num_tokens += len(plain.token_ids)
        record.num_draft_tokens += speculative.stats.num_draft_tokens
        record.num_accepted_tokens += speculative.stats.num_accepted_tokens
        record.cases_per_drafter[case.drafter] += 1
        record.endings[str(plain.finish_reason)] += 1
        results = [
            (r.token_ids, r.text, str(r.finish_reason), [t.to_dict() for t in r.logprobs or ()])
            for r in (plain, speculative)
        ]
        if results[0] != results[1]:
            record.differences.append(
                {"case": asdict(case), "plain": results[0], "speculative": results[1]}
            )
            print(f"case {number} differs", file=sys.stderr)
    record.seconds = time.monotonic() - began
    options.output.write_text(json.dumps(vars(record), indent=2) + "\n", "utf-8")
    print(
        f"{record.num_cases} cases, {record.num_tokens} tokens, "
        f"{len(record.differences)} differences; written to {options.output}"
    )
    return 1 if record.differences else 0


if __name__ == "__main__":
    sys.exit(main())
