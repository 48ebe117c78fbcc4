"""The report as Markdown: what a terminal shows, and what goes into a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from foretell.bench._results import OVERALL, EngineResult, Results
from foretell.bench._statistics import Estimate, number

MANY_DISTURBED: Final = 0.25
"""Above this share of an engine's answers, numbers say more of other programs than of engines."""


def markdown(results: Results, width: int | None = None) -> str:
    """All tables of one record; those wider than ``width`` columns in parts, one below another."""
    record = results.record
    parts = [f"# {title(record)}", "\n".join(f"- {line}" for line in facts(results))]
    if not results.engines:
        parts.append("Nothing was measured.")
        return "\n\n".join(parts) + "\n"
    for heading, rows in tables(results):
        parts += [f"## {heading}", *(table(part) for part in _parts(rows, width))]
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
    found.append(("Acceptance", acceptance_rows(results.engines)))
    found.append(("Where the time of a step goes, milliseconds", step_rows(results.engines)))
    found.append(("Passes against the limit", pass_rows(results.record["passes"])))
    return [(heading, rows) for heading, rows in found if len(rows) > 1]


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
        f"{_count(results.questions, 'question')}, at most {settings['max_tokens']} tokens, {how}, "
        f"{_count(settings['threads'], 'thread')}, "
        f"{_count(settings['repetitions'], 'repetition')}, "
        f"{'with' if settings['chat_template'] else 'without'} chat template",
        f"{machine.get('cpu')}, {machine.get('cores')} cores; others kept "
        f"{record['cores_used_by_others']:.2f} cores busy, load average "
        f"{record['load_average']['before'][0]} before and {record['load_average']['after'][0]} "
        "after",
        f"started {record['started']}, {record['seconds']:.0f} s; `{record['command']}`",
    ]
    disturbed = max((engine.disturbed for engine in results.engines), default=0.0)
    if disturbed > MANY_DISTURBED:
        lines.append("**machine busy: do not trust these numbers**")
    if disturbed:
        lines.append(
            f"while others had the machine: up to {100 * disturbed:.0f}% of an engine's answers"
        )
    if results.left_out:
        lines.append(
            f"left out: {_count(results.left_out, 'turn')} that an engine answered only while "
            "others had the machine"
        )
    lines += _profiles(record["engines"])
    if record["interrupted"]:
        lines.append("**interrupted**: only what every engine had finished is reported")
    lines += [f"left out: question {e['question']}: {e['reason']}" for e in record["left_out"]]
    lines += [f"skipped: {entry['name']}: {entry['reason']}" for entry in record["skipped"]]
    lines += [
        f"failed: {e['engine']}, question {e['question']}: {e['error']}" for e in record["failures"]
    ]
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _profiles(engines: Sequence[Any]) -> list[str]:
    """Who began with what was learned before; records of earlier versions do not tell."""
    found = {
        profile: [engine["name"] for engine in engines if engine.get("profile") == profile]
        for profile in ("used", "none")
    }
    lines = []
    if found["used"]:
        lines.append(f"began with the profile saved on this machine: {', '.join(found['used'])}")
    if found["none"]:
        lines.append(f"began without a profile: {', '.join(found['none'])}")
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


def _parts(rows: list[list[str]], width: int | None) -> Iterator[list[list[str]]]:
    """The same rows; if they are too wide, their columns in groups, each with the first one."""
    widths = _widths([_cells(row) for row in rows])
    start = 1
    while start < len(widths):
        stop = start + 1
        while stop < len(widths) and (
            width is None or _wide([widths[0], *widths[start : stop + 1]]) <= width
        ):
            stop += 1
        yield [[row[0], *row[start:stop]] for row in rows]
        start = stop


def _wide(widths: Sequence[int]) -> int:
    """Of a line: every column with its edges, and the last edge."""
    return sum(width + 3 for width in widths) + 1


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def _cells(row: Sequence[str]) -> list[str]:
    return [text.replace("|", "\\|").replace("\n", " ") for text in row]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, columns as wide as they need to be to read it as it is."""
    cells = [_cells(row) for row in rows]
    widths = _widths(cells)
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
