"""Plain decoding by Foretell and by llama.cpp, in the same widths, in turns.

    python benchmarks/llama_cpp.py --output llama_cpp.json

llama.cpp is an optional peer. To build it for this machine, here or in an environment of its
own (then --llama-cpp-python says which):

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foretell._cache import models_directory
from foretell._hub import demo_path
from foretell.backends.cpu._checkpoint import open_checkpoint
from foretell.backends.cpu._pool import default_threads
from foretell.bench._convert import converted
from foretell.bench._machine import (
    MOST_CORES_USED_BY_OTHERS,
    command_line,
    load_average,
    machine,
    seconds_of_others,
    versions,
)
from foretell.bench._watch import MOST_WAITING

HERE = Path(__file__).resolve().parent
FEWEST_STEPS = 20  # undisturbed ones in all, for a median that counts
SECONDS_UNTIL_QUIET = 0.2  # both engines' threads go on spinning for a moment

TEXT = (
    "The lighthouse stood on a rock half a mile from the shore. Every evening the keeper climbed "
    "its two hundred and twelve steps, trimmed the lamp and wrote the weather into a book: wind "
    "from the west, four; sea moderate; two ships passed. In winter the boat could not cross for "
    "weeks, and the keeper read the old books again from the beginning. "
)


@dataclass(frozen=True)
class Width:
    """A file both engines read, and the weight types Foretell keeps it in."""

    file_type: str | None
    """What the demo model is converted to; None is the demo's own file."""
    dtypes: tuple[str, ...]
    target: float


WIDTHS = {
    "f32": Width("F32", ("float32",), 1.1),
    "f16": Width("F16", ("bfloat16", "native"), 1.1),
    "q8_0": Width("Q8_0", ("int8", "native"), 1.1),
    "q4_1": Width(None, ("native",), 1.3),
}


def file_of(width: Width, source: Path, folder: Path) -> Path:
    """The model's file in a width, converted if it is not there yet."""
    return source if width.file_type is None else converted(source, width.file_type, folder)


class Engine:
    """One engine with one model, in its own process."""

    def __init__(self, python: str, name: str, path: Path, threads: int, dtype: str = "") -> None:
        self.name = f"{name} {dtype}".strip()
        command = [python, "-P", str(HERE / "decoding_process.py"), name, str(path), str(threads)]
        self.process = subprocess.Popen(
            [*command, dtype] if dtype else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        hello = json.loads(self.answers.readline() or '{"missing": "its process ended at once"}')
        self.missing: str | None = hello.get("missing")
        self.version: str | None = hello.get("version")

    def decode(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        print(json.dumps({"prompt": prompt, "max_tokens": max_tokens}), file=self.requests)
        self.requests.flush()
        answer: dict[str, Any] = json.loads(self.answers.readline())
        time.sleep(SECONDS_UNTIL_QUIET)
        return answer

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


def prompt_of(source: Path, length: int) -> list[int]:
    """A text of that many of the model's tokens."""
    tokenizer = open_checkpoint(source).tokenizer
    assert tokenizer is not None
    once = tokenizer.encode(TEXT, add_special_tokens=False)
    return (once * (length // len(once) + 1))[:length]


def measure(options: argparse.Namespace, name: str, source: Path) -> dict[str, Any]:
    """One width: both engines loaded, warmed up, then measured in turns."""
    width = WIDTHS[name]
    path = file_of(width, source, options.folder)
    engines = [Engine(options.llama_cpp_python, "llama.cpp", path, options.threads)]
    if engines[0].missing is None:
        engines += [
            Engine(sys.executable, "foretell", path, options.threads, dtype)
            for dtype in width.dtypes
        ]
    missing = next((engine.missing for engine in engines if engine.missing is not None), None)
    if missing is not None:
        for engine in engines:
            engine.close()
        return {"width": name, "missing": missing}
    prompt = prompt_of(source, options.prompt_tokens)
    texts = {engine.name: engine.decode(prompt, 16)["token_ids"] for engine in engines}
    before, start, others = load_average(), time.perf_counter(), seconds_of_others()
    own = sum(_seconds(engine.process.pid) for engine in engines)
    steps: dict[str, list[list[float]]] = {engine.name: [] for engine in engines}
    for number in range(options.rounds):
        for engine in engines:
            answer = engine.decode(prompt, options.max_tokens)
            steps[engine.name] += [
                [number, float(f"{seconds:.4g}"), waiting]
                for seconds, waiting in zip(answer["seconds"], answer["waiting"], strict=True)
            ]
    others = seconds_of_others() - others
    others -= sum(_seconds(engine.process.pid) for engine in engines) - own
    others /= time.perf_counter() - start
    for engine in engines:
        engine.close()
    return {
        "width": name,
        "file_bytes": path.stat().st_size,
        "versions": {engine.name.partition(" ")[0]: engine.version for engine in engines},
        "load_average": {"before": before, "after": load_average()},
        "cores_used_by_others": round(max(0.0, others), 2),
        "machine_was_idle": others <= MOST_CORES_USED_BY_OTHERS,
        "first_tokens": texts,
        "steps": steps,
    }


def _seconds(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def compare(run: dict[str, Any]) -> dict[str, Any]:
    """Medians over the undisturbed steps, and each of Foretell's against llama.cpp's."""
    engines: dict[str, Any] = {}
    for name, steps in run["steps"].items():
        quiet = [step for step in steps if step[2] <= MOST_WAITING]
        enough = len(quiet) >= FEWEST_STEPS
        median = statistics.median(step[1] for step in (quiet if enough else steps))
        engines[name] = {
            "milliseconds": round(1e3 * median, 3),
            "tokens_per_second": round(1 / median, 1),
            "steps": len(quiet) if enough else len(steps),
            "undisturbed": enough,
        }
    ours = {name: e for name, e in engines.items() if name != "llama.cpp"}
    peer = engines["llama.cpp"]["milliseconds"]
    ratios = {name: round(peer / engine["milliseconds"], 3) for name, engine in ours.items()}
    target = WIDTHS[run["width"]].target
    return {
        "width": run["width"],
        "engines": engines,
        "times_llama_cpp": ratios,
        "target": target,
        "reached": {name: ratio >= target for name, ratio in ratios.items()},
    }


def show(record: dict[str, Any], console: Console) -> None:
    table = Table("width", "engine", "ms a token", "tokens/s", "x llama.cpp", "target", "reached")
    for result in record["results"]:
        for name, engine in result["engines"].items():
            ratio = result["times_llama_cpp"].get(name)
            table.add_row(
                result["width"],
                name + ("" if engine["undisturbed"] else " ?"),
                f"{engine['milliseconds']:.2f}",
                f"{engine['tokens_per_second']:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if ratio is None else f">= {result['target']:g}",
                "" if ratio is None else "yes" if result["reached"][name] else "[bold red]no[/]",
            )
    console.print(table)
    for run in record["runs"]:
        if "missing" in run:
            console.print(f"{run['width']} is left out: {run['missing']}", style="yellow")
    if not all(run.get("machine_was_idle", True) for run in record["runs"]):
        console.print(
            "The machine was not idle. Medians are over the steps no other process cut into; "
            f"a ? marks those with fewer than {FEWEST_STEPS} of them, which show nothing.",
            style="yellow",
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where the JSON record goes")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="RECORD",
        help="measure nothing, but take these records together",
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; the demo model by default")
    parser.add_argument("--widths", nargs="+", choices=tuple(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=448)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--folder",
        type=Path,
        default=models_directory() / "converted",
        help="where the converted files are kept (up to 1 GB)",
    )
    parser.add_argument(
        "--llama-cpp-python",
        default=sys.executable,
        metavar="PYTHON",
        help="a Python that has llama-cpp-python, if this one has not",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if options.merge:
        records = [json.loads(path.read_text("utf-8")) for path in options.merge]
        record: dict[str, Any] = records[0]
        for name in ("runs", "commands"):
            record[name] = [part for other in records for part in other[name]]
    else:
        words = sys.argv[1:] if arguments is None else list(arguments)
        private = ("--output", "--folder", "--llama-cpp-python")
        source = options.model or demo_path()
        record = {
            "commands": [command_line("benchmarks/llama_cpp.py", words, private)],
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "settings": {
                name: getattr(options, name)
                for name in ("threads", "rounds", "prompt_tokens", "max_tokens")
            },
            "runs": [measure(options, name, source) for name in options.widths],
        }
    record["results"] = [compare(run) for run in record["runs"] if "steps" in run]
    show(record, console)
    if options.output is not None:
        text = json.dumps(record, separators=(",", ": "))
        options.output.write_text(text.replace('"runs"', '\n"runs"') + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
