"""Passes of the cpu backend against the limits of the machine.

    python benchmarks/kernels.py --output kernels.json --plot kernels.svg

T(k), a pass of k tokens, can be no faster than reading the weights and the cache once, nor
than the arithmetic of k rows: the limit is the larger of the two, both at rates measured in
the same round. See benchmarks/README.md for what each number means.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foretell._model import Rows
from foretell.backends.cpu._buffers import MAX_ROWS
from foretell.backends.cpu._model import load
from foretell.backends.cpu._pool import default_threads
from foretell.backends.cpu._session import CpuSession
from foretell.bench._limits import Bandwidth, MatrixProduct, Work, filled_session, work_of
from foretell.bench._machine import (
    MOST_CORES_USED_BY_OTHERS,
    command_line,
    load_average,
    machine,
    seconds_of_others,
    versions,
)
from foretell.bench._watch import MOST_WAITING, Sample, Watch

DTYPES = ("float32", "bfloat16", "int8", "native")
PARTS = ("passes", "attention", "prefill", "profile")
CONTEXTS = (128, 512, 2048, 8192)
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MOST_ROWS = 32
PREFILL_TOKENS = 500
PROFILE_WIDTHS = (1, 4, 8)
TARGET_CONTEXT = 512
FEWEST_RATES = 3  # undisturbed ones, to stand in for the others
FEWEST_SAMPLES = 5  # undisturbed ones, for a median that counts
# What a thread limit is called by the libraries NumPy may use.
BLAS_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

Entry = dict[str, Any]
"""What was measured, under which settings, and how: one line of a round."""


# --- Measuring --------------------------------------------------------------------------


class Subject:
    """One model in one weight type, and its sessions."""

    def __init__(self, options: argparse.Namespace, dtype: str, cache: str) -> None:
        self.dtype, self.cache = dtype, cache
        self.model = load(options.model, dtype=dtype, cache_dtype=cache, threads=options.threads)
        self.work = work_of(self.model)
        self._sessions: dict[int, CpuSession] = {}

    def context(self, wanted: int) -> int:
        """As long as asked for, or as the model allows with the widest pass behind it."""
        return min(wanted, self.model.max_length - MOST_ROWS)

    def forward(self, context: int, width: int) -> Callable[[], None]:
        """A pass of ``width`` rows with all their logits after ``context`` positions."""
        context = self.context(context)
        if context not in self._sessions:
            self._sessions[context] = filled_session(self.model, context)
        session = self._sessions[context]
        tokens = list(range(10, 10 + width))

        def run() -> None:
            self.model.forward([Rows(session, tokens, logits="all")])
            session.keep([])

        return run

    def prefill(self, tokens: int, watch: Watch, tries: int) -> Sample:
        """A prompt up to the logits of its last token, in the parts a pass is cut into anyway.

        Each part is a sample of its own: a second without disturbance is rare on a machine
        that is not idle.
        """
        session = self.model.new_session()
        ids = [10 + i % 1000 for i in range(tokens)]
        seconds = waited = 0.0
        for start in range(0, tokens, MAX_ROWS):
            part = ids[start : start + MAX_ROWS]
            last = start + len(part) == tokens
            rows = Rows(session, part, logits="last" if last else "none")
            sample = watch.undisturbed(tries, lambda rows=rows: self.model.forward([rows]))
            session.keep(range(len(part)))
            seconds += sample.seconds
            waited += sample.waiting * sample.seconds
        return Sample(seconds, waited / seconds)


class Rounds:
    """Takes every measurement once a round, with the machine's rates in between."""

    def __init__(self, options: argparse.Namespace, subjects: Sequence[Subject]) -> None:
        self.options = options
        self.subjects = subjects
        self.watch = Watch()
        self.bandwidth = Bandwidth(options.threads, options.buffer_bytes)
        self.product = MatrixProduct(options.matrix_size)
        self.rates: Entry = {}

    def entry(self, what: str, subject: Subject, sample: Sample, **settings: Any) -> Entry:
        return {
            "what": what,
            "dtype": subject.dtype,
            "cache": subject.cache,
            **settings,
            "seconds": sample.seconds,
            "waiting": round(sample.waiting, 4),
            **self.rates,
        }

    def measure_rates(self, product: bool) -> None:
        """The limits, measured again: they move, above all on rented machines."""
        if product:
            rate, waiting = self.product.measure(self.watch, self.options.tries)
            self.rates["operations_per_second"] = rate
            self.rates["operations_waiting"] = round(waiting, 4)
        rate, waiting = self.bandwidth.measure(self.watch, self.options.tries)
        self.rates["bytes_per_second"] = rate
        self.rates["bytes_waiting"] = round(waiting, 4)

    def one(self) -> list[Entry]:
        self.watch.look()
        self.measure_rates(product=True)
        entries: list[Entry] = []
        for subject in self.subjects:
            self.measure_rates(product=False)
            entries += self.of(subject)
        return entries

    def of(self, subject: Subject) -> Iterator[Entry]:
        options, watch = self.options, self.watch
        subject.forward(TARGET_CONTEXT, 1)()  # what lies in caches is this model's again
        if "passes" in options.parts:
            for context in options.contexts:
                for width in options.widths:
                    sample = watch.undisturbed(options.tries, subject.forward(context, width))
                    yield self.entry(
                        "pass", subject, sample, context=subject.context(context), width=width
                    )
        if "attention" in options.parts:
            for context in options.attention_contexts:
                run = subject.forward(context, 1)
                run()
                sample = watch.undisturbed(options.tries, run)
                yield self.entry("attention", subject, sample, context=subject.context(context))
        if "prefill" in options.parts:
            tokens = options.prefill_tokens
            sample = subject.prefill(tokens, watch, options.tries)
            yield self.entry("prefill", subject, sample, tokens=tokens)
        if "profile" in options.parts:
            for width in PROFILE_WIDTHS:
                run = subject.forward(TARGET_CONTEXT, width)
                shares: dict[str, float] = {}

                def profiled(
                    run: Callable[[], None] = run, shares: dict[str, float] = shares
                ) -> None:
                    with subject.model.profile() as found:
                        run()
                    shares.update(found)

                sample = watch.undisturbed(options.tries, profiled)
                shares = {part: round(share, 4) for part, share in shares.items()}
                yield self.entry(
                    "profile",
                    subject,
                    sample,
                    context=subject.context(TARGET_CONTEXT),
                    width=width,
                    shares=shares,
                )


def measure(options: argparse.Namespace, console: Console) -> Entry:
    """One run: load, warm up, take the rounds."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    pairs = [(dtype, cache) for cache in options.cache_dtypes for dtype in options.dtypes]
    subjects = [Subject(options, dtype, cache) for dtype, cache in pairs]
    rounds = Rounds(options, subjects)
    console.print("loaded", style="dim")
    rounds.one()  # the first pays for page faults, and for finding out how long passes take
    load_before, start, others = load_average(), time.perf_counter(), seconds_of_others()
    taken = []
    for number in range(options.rounds):
        taken.append(rounds.one())
        quiet = sum(entry["waiting"] <= MOST_WAITING for entry in taken[-1])
        console.print(
            f"round {number + 1} of {options.rounds}: {quiet} of {len(taken[-1])} undisturbed",
            style="dim",
        )
    others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return {
        "started": started,
        "load_average": {"before": load_before, "after": load_average()},
        "cores_used_by_others": round(max(0.0, others), 2),
        "machine_was_idle": others <= MOST_CORES_USED_BY_OTHERS,
        "settings": {
            "model": options.model if options.model == "demo" else Path(options.model).name,
            "threads": options.threads,
            "rounds": options.rounds,
            "parts": options.parts,
            "tries": options.tries,
        },
        "work": {f"{subject.dtype} {subject.cache}": vars(subject.work) for subject in subjects},
        "rounds": pack(taken),
    }


# --- Records: a table for each kind of measurement, a row for each number ----------------


def pack(rounds: Sequence[Sequence[Entry]]) -> dict[str, Any]:
    """Tables, which are a tenth of the size of a list of named values."""
    tables: dict[str, Any] = {}
    for number, entries in enumerate(rounds):
        for entry in entries:
            row = {"round": number, **entry}
            columns = [name for name in row if name != "what"]
            table = tables.setdefault(entry["what"], {"columns": columns, "rows": []})
            table["rows"].append([_rounded(row[name]) for name in columns])
    return tables


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def unpack(run: Entry) -> Iterator[Entry]:
    """Every number of a run as a named value again."""
    for what, table in run["rounds"].items():
        for row in table["rows"]:
            yield {"what": what, **dict(zip(table["columns"], row, strict=True))}


RATES_OF = {"attention": ("bytes_waiting",), "prefill": ("operations_waiting",)}


def counts(entry: Entry) -> bool:
    """Whether neither the sample nor the rates it is held against were disturbed."""
    rates = RATES_OF.get(entry["what"], ("bytes_waiting", "operations_waiting"))
    return all(entry[name] <= MOST_WAITING for name in ("waiting", *rates))


def with_quiet_rates(runs: Sequence[Entry]) -> list[list[Entry]]:
    """Each run's entries, disturbed rates replaced by the median of those that were not.

    Those of the same run if there are enough of them, else of all.
    """
    entries = [list(unpack(run)) for run in runs]
    for name, waiting in (
        ("bytes_per_second", "bytes_waiting"),
        ("operations_per_second", "operations_waiting"),
    ):
        quiet = [{e[name] for e in run if e[waiting] <= MOST_WAITING} for run in entries]
        everywhere = set().union(*quiet)
        for index, run in enumerate(entries):
            rates = quiet[index] if len(quiet[index]) >= FEWEST_RATES else everywhere
            if len(rates) >= FEWEST_RATES:
                instead = {name: median(rates), waiting: 0.0}
                entries[index] = [e if e[waiting] <= MOST_WAITING else e | instead for e in run]
    return entries


# --- Results ----------------------------------------------------------------------------


class Numbers:
    """All entries of some runs, and medians over those that count."""

    def __init__(self, runs: Iterable[Entry]) -> None:
        self.work: dict[str, Work] = {}
        self.groups: dict[tuple[Any, ...], list[Entry]] = {}
        runs = list(runs)
        for run in runs:
            self.work |= {name: Work(**work) for name, work in run["work"].items()}
        for index, entries in enumerate(with_quiet_rates(runs)):
            for entry in entries:
                place = tuple(entry.get(name) for name in ("what", *KEYS))
                self.groups.setdefault(place, []).append({**entry, "run": index})

    def entries(self, what: str, **settings: Any) -> list[Entry]:
        """Those of one configuration, undisturbed if there are enough of them."""
        found = self.groups.get((what, *(settings.get(name) for name in KEYS)), [])
        quiet = [entry for entry in found if counts(entry)]
        return quiet if len(quiet) >= FEWEST_SAMPLES else found

    def reliable(self, entries: Sequence[Entry]) -> bool:
        return len(entries) >= FEWEST_SAMPLES and all(map(counts, entries))

    def values(self, what: str, name: str) -> list[Any]:
        """Every value a setting has in what was measured, in order of appearance."""
        position = 1 + KEYS.index(name)
        return list(dict.fromkeys(place[position] for place in self.groups if place[0] == what))

    def limit(self, entry: Entry) -> float:
        """Seconds a pass takes at least, at the rates of its own round."""
        work = self.work[f"{entry['dtype']} {entry['cache']}"]
        width = entry.get("width", 1)
        return max(
            work.pass_bytes(entry["context"]) / entry["bytes_per_second"],
            work.operations(entry["context"], width) / entry["operations_per_second"],
        )


KEYS = ("dtype", "cache", "context", "width", "tokens")


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def pass_results(numbers: Numbers) -> list[Entry]:
    """T(k), its limit, and how far apart they are, for every configuration."""
    results = []
    for what, dtype, cache, context, width, _ in numbers.groups:
        if what != "pass":
            continue
        entries = numbers.entries("pass", dtype=dtype, cache=cache, context=context, width=width)
        over_limit = [entry["seconds"] / numbers.limit(entry) for entry in entries]
        results.append(
            {
                "dtype": dtype,
                "cache": cache,
                "context": context,
                "width": width,
                "milliseconds": 1e3 * median(entry["seconds"] for entry in entries),
                "limit_milliseconds": 1e3 * median(map(numbers.limit, entries)),
                "over_limit": median(over_limit),
                "over_one_row": over_one_row(numbers, entries),
                "samples": len(entries),
                "undisturbed": numbers.reliable(entries),
            }
        )
    return results


def over_one_row(numbers: Numbers, entries: Sequence[Entry]) -> float | None:
    """T(k)/T(1), within the rounds that have both."""
    first = entries[0]
    same = {name: first[name] for name in ("dtype", "cache", "context")}
    ones = {
        (entry["run"], entry["round"]): entry["seconds"]
        for entry in numbers.entries("pass", **same, width=1)
    }
    ratios = [
        entry["seconds"] / ones[entry["run"], entry["round"]]
        for entry in entries
        if (entry["run"], entry["round"]) in ones
    ]
    return median(ratios) if ratios else None


def attention_results(numbers: Numbers) -> list[Entry]:
    """What each further position of context costs, against its bytes."""
    results = []
    contexts = sorted(numbers.values("attention", "context"))
    pairs = {place[1:3] for place in numbers.groups if place[0] == "attention"}
    for dtype, cache in sorted(pairs, key=lambda pair: DTYPES.index(pair[0])):
        near, far = (
            {
                (entry["run"], entry["round"]): entry
                for entry in numbers.entries("attention", dtype=dtype, cache=cache, context=context)
            }
            for context in (contexts[0], contexts[-1])
        )
        both = sorted(near.keys() & far.keys())
        if not both or contexts[0] == contexts[-1]:
            continue
        size = numbers.work[f"{dtype} {cache}"].position_bytes
        positions = contexts[-1] - contexts[0]
        costs = [(far[r]["seconds"] - near[r]["seconds"]) / positions for r in both]
        limits = [size / far[r]["bytes_per_second"] for r in both]
        results.append(
            {
                "dtype": dtype,
                "cache": cache,
                "from": contexts[0],
                "to": contexts[-1],
                "bytes_per_position": size,
                "nanoseconds_per_position": 1e9 * median(costs),
                "limit_nanoseconds": 1e9 * median(limits),
                "over_limit": median(c / m for c, m in zip(costs, limits, strict=True)),
                "samples": len(both),
                "undisturbed": len(both) >= FEWEST_SAMPLES
                and all(counts(side[r]) for side in (near, far) for r in both),
            }
        )
    return results


def prefill_results(numbers: Numbers) -> list[Entry]:
    """The rate of a prompt's arithmetic, as a share of a large matrix product's."""
    results = []
    for what, dtype, cache, _, _, tokens in numbers.groups:
        if what != "prefill":
            continue
        entries = numbers.entries("prefill", dtype=dtype, cache=cache, tokens=tokens)
        operations = numbers.work[f"{dtype} {cache}"].prefill_operations(tokens)
        rates = [operations / entry["seconds"] for entry in entries]
        results.append(
            {
                "dtype": dtype,
                "cache": cache,
                "tokens": tokens,
                "tokens_per_second": tokens / median(entry["seconds"] for entry in entries),
                "operations_per_second": median(rates),
                "share_of_product": median(
                    rate / entry["operations_per_second"]
                    for rate, entry in zip(rates, entries, strict=True)
                ),
                "samples": len(entries),
                "undisturbed": numbers.reliable(entries),
            }
        )
    return results


def profile_results(numbers: Numbers) -> list[Entry]:
    """Where the time of a pass goes, and what reading its bytes would take."""
    results = []
    for what, dtype, cache, context, width, _ in numbers.groups:
        if what != "profile":
            continue
        entries = numbers.entries("profile", dtype=dtype, cache=cache, context=context, width=width)
        work = numbers.work[f"{dtype} {cache}"]
        part_bytes = {**work.part_bytes, "attention": context * work.position_bytes}
        results.append(
            {
                "dtype": dtype,
                "cache": cache,
                "context": context,
                "width": width,
                "milliseconds": {
                    part: 1e3 * median(e["seconds"] * e["shares"][part] for e in entries)
                    for part in entries[0]["shares"]
                },
                "reading_milliseconds": {
                    part: 1e3 * median(size / e["bytes_per_second"] for e in entries)
                    for part, size in part_bytes.items()
                },
                "samples": len(entries),
                "undisturbed": numbers.reliable(entries),
            }
        )
    return results


def target_results(results: Entry) -> list[Entry]:
    """Each bound of the project with what was measured; those not measured are left out."""
    rows: list[Entry] = []

    def add(name: str, found: Entry | None, key: str, bound: float, at_least: bool = False) -> None:
        if found is None or found[key] is None:
            return
        value = found[key]
        rows.append(
            {
                "name": name,
                "value": value,
                "target": bound,
                "at": "least" if at_least else "most",
                "reached": value >= bound if at_least else value <= bound,
                "undisturbed": found["undisturbed"],
            }
        )

    def first(kind: str, **settings: Any) -> Entry | None:
        for entry in results[kind]:
            if all(entry[name] == value for name, value in settings.items()):
                return dict(entry)
        return None

    for dtype in DTYPES:
        step = 1.4 if dtype in ("int8", "native") else 1.25
        for width, bound in ((1, step), (4, 1.4), (8, 1.6)):
            found = first(
                "passes", dtype=dtype, cache="float32", context=TARGET_CONTEXT, width=width
            )
            add(f"{dtype}: T({width}) over its limit", found, "over_limit", bound)
            if dtype == "float32" and width > 1:
                bound = {4: 1.3, 8: 1.7}[width]
                add(f"{dtype}: T({width})/T(1)", found, "over_one_row", bound)
        found = first("prefill", dtype=dtype, cache="float32")
        add(f"{dtype}: prefill over NumPy's rate", found, "share_of_product", 0.7, at_least=True)
    for entry in results["attention"]:
        name = f"{entry['dtype']}, {entry['cache']} cache: a position over its bytes"
        add(name, entry, "over_limit", 1.2)
    return rows


def summarize(runs: Sequence[Entry]) -> Entry:
    """Everything that follows from the numbers of some runs."""
    numbers = Numbers(runs)
    entries = [entry for group in numbers.groups.values() for entry in group]
    results: Entry = {
        "bytes_per_second": median(e["bytes_per_second"] for e in entries),
        "operations_per_second": median(e["operations_per_second"] for e in entries),
        "undisturbed_share": sum(map(counts, entries)) / len(entries),
        "passes": pass_results(numbers),
        "attention": attention_results(numbers),
        "prefill": prefill_results(numbers),
        "profile": profile_results(numbers),
    }
    results["targets"] = target_results(results)
    return results


# --- Showing them -----------------------------------------------------------------------


def mark(entry: Entry) -> str:
    return "" if entry["undisturbed"] else " ?"


def show(record: Entry, console: Console) -> None:
    """Tables: passes for each context, attention, prefill, parts, targets."""
    results = record["results"]
    configurations = dict.fromkeys((e["context"], e["cache"]) for e in results["passes"])
    for context, cache in configurations:
        here = [e for e in results["passes"] if (e["context"], e["cache"]) == (context, cache)]
        widths = sorted({e["width"] for e in here})
        table = Table(f"ms a pass, context {context}, cache {cache}", *map(str, widths))
        for dtype in dict.fromkeys(e["dtype"] for e in here):
            row = {e["width"]: e for e in here if e["dtype"] == dtype}
            table.add_row(dtype, *(f"{row[w]['milliseconds']:.1f}{mark(row[w])}" for w in widths))
            table.add_row("  limit", *(f"{row[w]['limit_milliseconds']:.1f}" for w in widths))
            table.add_row("  over limit", *(f"{row[w]['over_limit']:.2f}" for w in widths))
            ratios = [row[w]["over_one_row"] for w in widths]
            table.add_row("  over T(1)", *("" if r is None else f"{r:.2f}" for r in ratios))
        console.print(table)
    if results["attention"]:
        table = Table("attention", "from", "to", "ns a position", "its bytes", "over them")
        for e in results["attention"]:
            table.add_row(
                f"{e['dtype']}, cache {e['cache']}{mark(e)}",
                f"{e['from']}",
                f"{e['to']}",
                f"{e['nanoseconds_per_position']:.0f}",
                f"{e['limit_nanoseconds']:.0f}",
                f"{e['over_limit']:.2f}",
            )
        console.print(table)
    if results["prefill"]:
        table = Table("prefill", "tokens", "tokens/s", "GFLOP/s", "share of NumPy's rate")
        for e in results["prefill"]:
            table.add_row(
                f"{e['dtype']}, cache {e['cache']}{mark(e)}",
                f"{e['tokens']}",
                f"{e['tokens_per_second']:.0f}",
                f"{e['operations_per_second'] / 1e9:.0f}",
                f"{e['share_of_product']:.2f}",
            )
        console.print(table)
    if results["profile"]:
        parts = list(results["profile"][0]["milliseconds"])
        table = Table("ms (reading)", *parts)
        for e in results["profile"]:
            cells = []
            for part in parts:
                least = e["reading_milliseconds"].get(part)
                cells.append(
                    f"{e['milliseconds'][part]:.2f}" + ("" if least is None else f" ({least:.2f})")
                )
            table.add_row(f"{e['dtype']} {e['width']}{mark(e)}", *cells)
        console.print(table)
    if results["targets"]:
        table = Table("target", "measured", "bound", "reached")
        for e in results["targets"]:
            sign = ">=" if e["at"] == "least" else "<="
            table.add_row(
                e["name"] + mark(e),
                f"{e['value']:.2f}",
                f"{sign} {e['target']:g}",
                "yes" if e["reached"] else "[bold red]no[/]",
            )
        console.print(table)
    console.print(
        f"{results['bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{results['operations_per_second'] / 1e9:.0f} GFLOP/s in NumPy; "
        f"{100 * results['undisturbed_share']:.0f}% of the samples undisturbed; "
        f"{record['machine']['cpu']}"
    )
    if not all(run["machine_was_idle"] for run in record["runs"]):
        console.print(
            "The machine was not idle. Medians are over the samples no other process cut into; "
            "a ? marks those with fewer than "
            f"{FEWEST_SAMPLES} of them, which show nothing.",
            style="yellow",
        )


def draw(record: Entry, path: Path) -> None:
    """T(k) and its limit over k, a panel for each context."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("a plot needs matplotlib: pip install '.[bench]'") from None
    passes = [e for e in record["results"]["passes"] if e["cache"] == "float32"]
    contexts = sorted({e["context"] for e in passes})
    columns = min(2, len(contexts))
    lines = -(-len(contexts) // columns)
    figure = Figure(figsize=(5.5 * columns, 4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, context in zip(panels, contexts, strict=False):
        for number, dtype in enumerate(DTYPES):
            here = sorted(
                (e for e in passes if e["context"] == context and e["dtype"] == dtype),
                key=lambda e: e["width"],
            )
            widths = [e["width"] for e in here]
            panel.plot(widths, [e["milliseconds"] for e in here], f"C{number}o-", ms=3, label=dtype)
            panel.plot(widths, [e["limit_milliseconds"] for e in here], f"C{number}--", lw=1)
        panel.set(title=f"context {context}", xlabel="tokens in the pass", ylabel="milliseconds")
        panel.set_ylim(bottom=0)
        panel.legend(title="dashed: the limit")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


# --- The command ------------------------------------------------------------------------


def names(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return chosen

    return parse


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="as foretell's own --model")
    parser.add_argument("--output", type=Path, help="where the JSON record goes")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="or .png; needs matplotlib")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="RECORD",
        help="measure nothing, but take these records together",
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--tries", type=int, default=5, help="for each sample, until one is undisturbed"
    )
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS))
    parser.add_argument("--dtypes", type=names(DTYPES), default=list(DTYPES))
    parser.add_argument("--cache-dtypes", type=names(("float32", "bfloat16")), default=["float32"])
    parser.add_argument("--contexts", type=whole_numbers, default=list(CONTEXTS))
    parser.add_argument("--attention-contexts", type=whole_numbers, default=list(CONTEXTS))
    parser.add_argument("--widths", type=whole_numbers, default=list(WIDTHS))
    parser.add_argument("--all-widths", action="store_true", help="every width from 1 to 32")
    parser.add_argument("--prefill-tokens", type=int, default=PREFILL_TOKENS)
    parser.add_argument("--buffer-bytes", type=int, default=640 << 20, help=argparse.SUPPRESS)
    parser.add_argument("--matrix-size", type=int, default=2048, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.all_widths:
        options.widths = list(range(1, MOST_ROWS + 1))
    return options


def main(arguments: Sequence[str] | None = None) -> Entry:
    options = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if options.merge:
        records = [json.loads(path.read_text("utf-8")) for path in options.merge]
        record = records[0]
        record["runs"] = [run for other in records for run in other["runs"]]
        record["commands"] = [command for other in records for command in other["commands"]]
    else:
        words = sys.argv[1:] if arguments is None else list(arguments)
        record = {
            "commands": [command_line("benchmarks/kernels.py", words, ("--output", "--plot"))],
            "machine": machine(),
            "versions": versions(),
            "runs": [measure(options, console)],
        }
    record["results"] = rounded(summarize(record["runs"]))
    show(record, console)
    if options.output is not None:
        options.output.write_text(to_json(record), encoding="utf-8")
    if options.plot is not None:
        draw(record, options.plot)
    return dict(record)


def rounded(value: Any) -> Any:
    """Five digits of every number; more are noise."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return _rounded(value)


def to_json(record: Entry) -> str:
    """Readable, with a line for each row of a table."""
    text = json.dumps(record, indent=1)
    return _one_line_lists(text) + "\n"


def _one_line_lists(text: str) -> str:
    def join(found: re.Match[str]) -> str:
        return re.sub(r"\s*\n\s*", " ", found[0]).replace("[ ", "[").replace(" ]", "]")

    return re.sub(r"\[[^\[\]]*\]", join, text)


if __name__ == "__main__":
    chosen = parse()
    limits = dict.fromkeys(BLAS_THREADS, str(chosen.threads))
    if not chosen.merge and any(os.environ.get(name) != n for name, n in limits.items()):
        # BLAS reads them when NumPy is imported, which was before the options were known.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | limits)
    main()
