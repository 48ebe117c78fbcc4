"""The report as Markdown: what a terminal shows, and what goes into a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foretell.bench._results import OVERALL, EngineResult, Results
from foretell.bench._statistics import Estimate, number


def markdown(results: Results) -> str:
    """All tables of one record."""
    record = results.record
    parts = [f"# {title(record)}", "\n".join(f"- {line}" for line in facts(results))]
    if not results.engines:
        parts.append("Nothing was measured.")
        return "\n\n".join(parts) + "\n"
    for heading, rows in tables(results):
        parts += [f"## {heading}", table(rows)]
    return "\n\n".join(parts) + "\n"


def tables(results: Results) -> list[tuple[str, list[list[str]]]]:
    """Heading and rows of every table, the first row being the columns."""
    found = [
        ("Engines", engine_rows(results.engines)),
        ("Tokens per second of decoding", category_rows(results, results.engines, "decode")),
        ("Speed of decoding over own plain decoding", speedup_rows(results, results.engines)),
        (
            "Tokens per second with reading the prompt",
            category_rows(results, results.engines, "total"),
        ),
    ]
    if results.without_loops:
        found.append(
            (
                f"Without questions whose plain output loops: {len(results.looping)} left out",
                loop_rows(results),
            )
        )
    accepted = acceptance_rows(results.engines)
    found += [("Acceptance", accepted)] if len(accepted) > 1 else []
    steps = step_rows(results.engines)
    found += [("Where the time of a step goes, milliseconds", steps)] if len(steps) > 1 else []
    passes = pass_rows(results.record["passes"])
    found += [("Passes against the limit", passes)] if len(passes) > 1 else []
    return found


def title(record: Any) -> str:
    """Model and workload."""
    return f"{record['model'].get('source', 'a model')} on {record['workload']['name']}"


def facts(results: Results) -> list[str]:
    """What has to be known to read the numbers."""
    record = results.record
    settings, machine = record["settings"], record["machine"]
    sampling = settings["sampling"]
    how = (
        sampling
        if isinstance(sampling, str)
        else ", ".join(f"{k} {v}" for k, v in sampling.items())
    )
    lines = [
        f"{results.questions} questions, at most {settings['max_tokens']} tokens, {how}, "
        f"{settings['threads']} threads, {settings['repetitions']} repetitions, "
        f"{'with' if settings['chat_template'] else 'without'} chat template",
        f"{machine.get('cpu')}, {machine.get('cores')} cores; others kept "
        f"{record['cores_used_by_others']:.2f} cores busy, load average "
        f"{record['load_average']['before'][0]} before and {record['load_average']['after'][0]} "
        "after",
        f"started {record['started']}, {record['seconds']:.0f} s; `{record['command']}`",
    ]
    disturbed = max((engine.disturbed for engine in results.engines), default=0.0)
    if results.left_out or disturbed:
        lines.append(
            f"left out: {results.left_out} turns that an engine answered only while others had the "
            f"machine; of what is left, up to {100 * disturbed:.0f}% of an engine's answers were "
            "disturbed"
        )
    if record["interrupted"]:
        lines.append("**interrupted**: only what every engine had finished is reported")
    lines += [f"left out: question {e['question']}: {e['reason']}" for e in record["left_out"]]
    lines += [f"skipped: {entry['name']}: {entry['reason']}" for entry in record["skipped"]]
    lines += [
        f"failed: {e['engine']}, question {e['question']}: {e['error']}" for e in record["failures"]
    ]
    return lines


def engine_rows(engines: Sequence[EngineResult]) -> list[list[str]]:
    rows = [
        [
            "engine",
            "tokens/s",
            "over own plain",
            "with prompt",
            "foretell auto over it",
            "differs from plain",
        ]
    ]
    for engine in engines:
        differing = "" if engine.differing is None else f"{engine.differing} of {engine.turns}"
        rows.append(
            [
                engine.name,
                cell(engine.decode.get(OVERALL)),
                "" if engine.is_plain else cell(engine.decode_speedup.get(OVERALL)),
                "" if engine.is_plain else cell(engine.total_speedup.get(OVERALL)),
                " ".join(cell(estimate) for estimate in engine.times_others.values()),
                differing,
            ]
        )
    return rows


def category_rows(results: Results, engines: Sequence[EngineResult], what: str) -> list[list[str]]:
    places = [OVERALL, *results.categories]
    rows = [["engine", *places]]
    for engine in engines:
        rates = engine.decode if what == "decode" else engine.total
        rows.append([engine.name, *(cell(rates.get(place)) for place in places)])
    return rows


def speedup_rows(results: Results, engines: Sequence[EngineResult]) -> list[list[str]]:
    places = [OVERALL, *results.categories]
    return [
        ["engine", *places],
        *(
            [engine.name, *(cell(engine.decode_speedup.get(place)) for place in places)]
            for engine in engines
            if engine.decode_speedup and not engine.is_plain
        ),
    ]


def loop_rows(results: Results) -> list[list[str]]:
    places = [OVERALL, *results.categories]
    rows = [["engine", "tokens/s", *(f"over plain, {place}" for place in places)]]
    for engine in results.without_loops:
        speedups = {} if engine.is_plain else engine.decode_speedup
        rows.append(
            [
                engine.name,
                cell(engine.decode.get(OVERALL)),
                *(cell(speedups.get(place)) for place in places),
            ]
        )
    return rows


def acceptance_rows(engines: Iterable[EngineResult]) -> list[list[str]]:
    rows = [["engine", "accepted / drafted", "tokens a step", "accepted at position 1, 2, ..."]]
    for engine in engines:
        if engine.is_plain or engine.tokens_per_step is None:
            continue
        share = "" if engine.acceptance_rate is None else f"{engine.acceptance_rate:.2f}"
        places = " ".join(f"{value:.2f}" for value in engine.acceptance[:8])
        rows.append([engine.name, share, f"{engine.tokens_per_step:.2f}", places])
    return rows


def step_rows(engines: Iterable[EngineResult]) -> list[list[str]]:
    rows: list[list[str]] = []
    for engine in engines:
        if engine.step_seconds:
            if not rows:
                rows.append(["engine", *engine.step_seconds])
            rows.append(
                [engine.name, *(number(1e3 * value) for value in engine.step_seconds.values())]
            )
    return rows


def pass_rows(passes: Sequence[Any]) -> list[list[str]]:
    rows = [["weights", "tokens in the pass", "ms", "over T(1)", "limit, ms", "over the limit"]]
    for entry in passes:
        first = entry["widths"][0]["seconds"]
        rows += [
            [
                entry["dtype"],
                str(one["width"]),
                f"{1e3 * one['seconds']:.1f}",
                f"{one['seconds'] / first:.2f}",
                f"{1e3 * one['limit_seconds']:.1f}",
                f"{one['seconds'] / one['limit_seconds']:.2f}",
            ]
            for one in entry["widths"]
        ]
    return rows


def cell(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, columns as wide as they need to be to read it as it is."""
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
