"""Speed and memory of the cpu backend on the demo model, against targets.

    python benchmarks/speed.py --output speed.json

Everything is measured in turns (A B C A B C ...), so that a machine that slows down
or speeds up does so for all; a ratio is taken within each round, and what is reported
is the median over the rounds. See benchmarks/README.md for what each number means.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foretell import Engine
from foretell._hub import demo_path
from foretell._model import Model, Rows
from foretell.bench._limits import Bandwidth
from foretell.bench._machine import (
    MOST_CORES_USED_BY_OTHERS,
    load_average,
    machine,
    seconds_of_others,
    versions,
)
from foretell.bench._peer import PeerError, ProcessPeer
from foretell.bench._protocol import Missing, Request
from foretell.bench._watch import Watch

DTYPES = ("float32", "bfloat16")
ITEMSIZE = {"float32": 4, "bfloat16": 2}
WIDTHS = (1, 2, 3, 4, 8, 16)
WIDTH_REPEATS = 5
LONG_CONTEXT = 500
MEGABYTE = 1_000_000

TEXT = (
    "The lighthouse stood on a rock half a mile from the shore. Every evening the keeper climbed "
    "its two hundred and twelve steps, trimmed the lamp and wrote the weather into a book: wind "
    "from the west, four; sea moderate; two ships passed. In winter the boat could not cross for "
    "weeks, and the keeper read the old books again from the beginning. Some entries were short, "
    "others told of storms that shook the tower, of birds that struck the glass, and of a night "
    "when the lamp went out and was lit again with a single match. "
)

Round = dict[str, float]


@dataclass(frozen=True)
class Target:
    """A measured value, the bound it is held against, and the side it should lie on."""

    name: str
    meaning: str
    bound: float
    at_least: bool
    value: Callable[[Round], float | None]

    def reached(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def quotient(over: str, under: str) -> Callable[[Round], float | None]:
    """One measurement of a round divided by another of the same round."""

    def value(measured: Round) -> float | None:
        if over not in measured or under not in measured:
            return None
        return measured[over] / measured[under]

    return value


def single(name: str) -> Callable[[Round], float | None]:
    return lambda measured: measured.get(name)


TARGETS = (
    Target(
        "plain_over_transformers",
        "plain fp32 tokens/s over transformers generate",
        2.0,
        True,
        quotient("float32_tokens_per_second", "transformers_tokens_per_second"),
    ),
    Target(
        "step_over_weight_reading",
        "one fp32 step over the time to read the weights",
        1.35,
        False,
        quotient("float32_step_seconds", "float32_weight_reading_seconds"),
    ),
    Target(
        "prefill_tokens_per_second",
        f"prefill of {LONG_CONTEXT} tokens, fp32, tokens/s",
        250.0,
        True,
        single("float32_prefill_tokens_per_second"),
    ),
    Target(
        "pass_of_4_over_1",
        f"T(4)/T(1), fp32, context {LONG_CONTEXT}",
        1.45,
        False,
        quotient("float32_pass_of_4_seconds", "float32_pass_of_1_seconds"),
    ),
    Target(
        "pass_of_8_over_1",
        f"T(8)/T(1), fp32, context {LONG_CONTEXT}",
        2.0,
        False,
        quotient("float32_pass_of_8_seconds", "float32_pass_of_1_seconds"),
    ),
    Target(
        "non_model_share",
        "share of fp32 decoding outside the model",
        0.05,
        False,
        single("float32_non_model_share"),
    ),
    Target(
        "bfloat16_over_float32",
        "plain bf16 tokens/s over plain fp32",
        1.4,
        True,
        quotient("bfloat16_tokens_per_second", "float32_tokens_per_second"),
    ),
    *(
        Target(
            f"{dtype}_peak_memory",
            f"peak memory over 1.3 x weights + 400 MB, {dtype}",
            1.0,
            False,
            quotient(f"{dtype}_peak_bytes", f"{dtype}_peak_bytes_allowed"),
        )
        for dtype in DTYPES
    ),
    Target(
        "first_token_seconds",
        "foretell generate: seconds to the first byte",
        4.0,
        False,
        single("first_token_seconds"),
    ),
)


# --- Foretell in this process -----------------------------------------------------------


def prompt_of(engine: Engine, length: int) -> list[int]:
    """The first `length` tokens of the text, repeated as often as that takes."""
    once = engine.encode(TEXT)
    return (once * (length // len(once) + 1))[:length]


def measure_plain(engine: Engine, dtype: str, prompt: list[int], max_tokens: int) -> Round:
    """Plain decoding: tokens after the first, a step each."""
    result = engine.generate(
        prompt, max_tokens=max_tokens, temperature=0.0, num_draft_tokens=0, ignore_eos=True
    )
    stats = result.stats
    return {
        f"{dtype}_tokens_per_second": stats.num_decode_tokens / stats.decode_seconds,
        f"{dtype}_step_seconds": stats.decode_seconds / stats.num_steps,
        f"{dtype}_non_model_share": 1.0 - stats.model_seconds / stats.decode_seconds,
    }


def measure_prefill(engine: Engine, dtype: str) -> Round:
    """A long prompt, up to its first token."""
    stats = engine.generate(prompt_of(engine, LONG_CONTEXT), max_tokens=1).stats
    return {f"{dtype}_prefill_tokens_per_second": LONG_CONTEXT / stats.prefill_seconds}


class Passes:
    """T(k): seconds of a pass of k rows after a context that never changes."""

    def __init__(self, engine: Engine, dtype: str) -> None:
        self.model: Model = engine.model
        self.dtype = dtype
        self.tokens = prompt_of(engine, LONG_CONTEXT + max(WIDTHS))
        self.session = self.model.new_session()
        self.model.forward([Rows(self.session, self.tokens[:LONG_CONTEXT], logits="none")])
        self.session.keep(range(LONG_CONTEXT))

    def measure(self) -> Round:
        times: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for _ in range(WIDTH_REPEATS):
            for width in WIDTHS:
                rows = Rows(self.session, self.tokens[LONG_CONTEXT:][:width], logits="all")
                start = time.perf_counter()
                self.model.forward([rows])
                times[width].append(time.perf_counter() - start)
                self.session.keep([])
        return {
            f"{self.dtype}_pass_of_{width}_seconds": statistics.median(taken)
            for width, taken in times.items()
        }


# --- Other processes --------------------------------------------------------------------


class Transformers:
    """transformers' `generate` in its own process, or the reason why it is not there."""

    def __init__(self, python: str, threads: int) -> None:
        settings = {"model": str(demo_path()), "draft": None, "dtype": "float32"}
        other = None if python == sys.executable else python
        self.peer = ProcessPeer("transformers", settings | {"threads": threads}, other)
        self.missing: str | None = None
        self.versions: dict[str, str] = {}
        try:
            self.versions = dict(self.peer.start())
        except (Missing, PeerError) as error:
            self.missing = str(error)

    def measure(self, prompt: list[int], max_tokens: int) -> Round:
        if self.missing is not None:
            return {}
        # As for Foretell, nothing ends the answer early and the first token belongs to prefill.
        answer = self.peer.ask(Request("plain", prompt, max_tokens))
        return {"transformers_tokens_per_second": answer.decode_tokens / answer.decode_seconds}

    def close(self) -> None:
        self.peer.close()


PEAK_MEMORY = """
import json, sys
from foretell import Engine
engine = Engine("demo", dtype=sys.argv[1], threads=int(sys.argv[2]))
engine.generate(json.loads(sys.argv[3]), max_tokens=64, ignore_eos=True)
try:
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
except FileNotFoundError:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak)
"""


def measure_memory(dtype: str, threads: int, prompt: list[int], weight_bytes: int) -> Round:
    """The most memory a fresh process has held after loading and generating."""
    arguments = [dtype, str(threads), json.dumps(prompt)]
    run = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, *arguments], capture_output=True, text=True, check=True
    )
    return {
        f"{dtype}_peak_bytes": float(run.stdout),
        f"{dtype}_peak_bytes_allowed": 1.3 * weight_bytes + 400 * MEGABYTE,
    }


def measure_first_token(threads: int) -> Round:
    """From starting the command to the first byte it writes."""
    command = [sys.executable, "-m", "foretell", "generate", "--model", "demo"]
    command += ["--threads", str(threads), "--max-tokens", "16", "The capital of France is"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
        errors = process.stderr.read().decode()
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {errors}")
    return {"first_token_seconds": seconds}


# --- The run ----------------------------------------------------------------------------


def count_weights(path: Path) -> int:
    """Number of values in a GGUF file's tensors."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def measure_rounds(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Load everything, warm it up, and take the rounds."""
    weights = count_weights(demo_path())
    weight_bytes = {dtype: weights * ITEMSIZE[dtype] for dtype in DTYPES}
    bandwidth, watch = Bandwidth(options.threads), Watch()
    engines = {dtype: Engine("demo", dtype=dtype, threads=options.threads) for dtype in DTYPES}
    passes = [Passes(engine, dtype) for dtype, engine in engines.items()]
    prompt = prompt_of(engines["float32"], options.prompt_tokens)
    other = Transformers(options.transformers_python, options.threads)
    if other.missing is not None:
        console.print(f"transformers is left out: {other.missing}", style="yellow")

    def one_round(max_tokens: int) -> Round:
        watch.look()
        bytes_per_second, _ = bandwidth.measure(watch, tries=5)
        measured: Round = {"bandwidth_bytes_per_second": bytes_per_second}
        for dtype in DTYPES:
            measured[f"{dtype}_weight_reading_seconds"] = weight_bytes[dtype] / bytes_per_second
        measured |= measure_plain(engines["float32"], "float32", prompt, max_tokens)
        measured |= other.measure(prompt, max_tokens)
        measured |= measure_plain(engines["bfloat16"], "bfloat16", prompt, max_tokens)
        for part in passes:
            measured |= part.measure()
        for dtype, engine in engines.items():
            measured |= measure_prefill(engine, dtype)
        measured |= measure_first_token(options.threads)
        for dtype in DTYPES:
            measured |= measure_memory(dtype, options.threads, prompt, weight_bytes[dtype])
        return measured

    # The first round pays for compiling, for page faults and for filling caches on disk.
    one_round(max_tokens=8)
    rounds = []
    for number in range(options.rounds):
        rounds.append(one_round(options.max_tokens))
        console.print(f"round {number + 1} of {options.rounds}", style="dim")
    other.close()
    return {
        "rounds": rounds,
        "weight_bytes": weight_bytes,
        "versions": versions() | other.versions,
        "transformers_missing": other.missing,
    }


def compare(rounds: list[Round]) -> dict[str, dict[str, Any]]:
    """Each target with the median of its value over the rounds; None where not measured."""
    comparisons = {}
    for target in TARGETS:
        values = [value for value in map(target.value, rounds) if value is not None]
        median = statistics.median(values) if values else None
        comparisons[target.name] = {
            "meaning": target.meaning,
            "value": median,
            "lowest": min(values, default=None),
            "highest": max(values, default=None),
            "target": target.bound,
            "at": "least" if target.at_least else "most",
            "reached": None if median is None else target.reached(median),
        }
    return comparisons


def show(record: dict[str, Any], console: Console) -> None:
    """Two tables: the targets, and the medians behind them."""
    targets = Table("measured", "value", "range", "target", "reached")
    for name, entry in record["targets"].items():
        if entry["value"] is None:
            targets.add_row(name, "none", "", "", "")
            continue
        targets.add_row(
            name,
            f"{entry['value']:.3g}",
            f"{entry['lowest']:.3g}..{entry['highest']:.3g}",
            f"{'>=' if entry['at'] == 'least' else '<='} {entry['target']:g}",
            "yes" if entry["reached"] else "[bold red]no[/]",
        )
    console.print(targets)

    medians = record["medians"]
    passes = Table(f"milliseconds a pass, context {LONG_CONTEXT}", *map(str, WIDTHS))
    for dtype in DTYPES:
        times = [medians[f"{dtype}_pass_of_{width}_seconds"] for width in WIDTHS]
        passes.add_row(dtype, *(f"{1000 * time:.1f}" for time in times))
        passes.add_row("  over T(1)", *(f"{time / times[0]:.2f}" for time in times))
    console.print(passes)

    plain = [f"{medians['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s read"]
    for name in (*DTYPES, "transformers"):
        if f"{name}_tokens_per_second" in medians:
            plain.append(f"{name} {medians[f'{name}_tokens_per_second']:.1f} tokens/s")
    for dtype in DTYPES:
        plain.append(f"{dtype} peak {medians[f'{dtype}_peak_bytes'] / MEGABYTE:.0f} MB")
    console.print(", ".join(plain))
    console.print(
        f"load average {record['load_average']['before'][0]} before and "
        f"{record['load_average']['after'][0]} after; other processes kept "
        f"{record['cores_used_by_others']:.2f} of {record['machine']['cores']} cores busy; "
        f"{record['machine']['cpu']}"
    )
    if not record["machine_was_idle"]:
        console.print(
            "The machine was not idle: these numbers show neither that a target is reached "
            "nor that it is missed. Run this again on an idle one.",
            style="bold yellow",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where the JSON record goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--transformers-python",
        default=sys.executable,
        metavar="PYTHON",
        help="a Python that has torch and transformers, if this one has not",
    )
    options = parser.parse_args()
    console = Console()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before, start, others = load_average(), time.perf_counter(), seconds_of_others()
    measured = measure_rounds(options, console)
    others = (seconds_of_others() - others) / (time.perf_counter() - start)
    rounds = measured["rounds"]
    record = {
        "command": "python benchmarks/speed.py",
        "started": started,
        "machine": machine(),
        "load_average": {"before": before, "after": load_average()},
        "cores_used_by_others": round(others, 2),
        "machine_was_idle": others <= MOST_CORES_USED_BY_OTHERS,
        "settings": {
            "threads": options.threads,
            "rounds": options.rounds,
            "prompt_tokens": options.prompt_tokens,
            "max_tokens": options.max_tokens,
            "long_context": LONG_CONTEXT,
        },
        "targets": compare(rounds),
        "medians": {name: statistics.median(r[name] for r in rounds) for name in rounds[0]},
        **measured,
    }
    show(record, console)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
