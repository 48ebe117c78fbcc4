"""Plots of a record as SVG, drawn by matplotlib, an optional library."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, Final

from foretell._errors import MissingExtraError
from foretell._extras import install_command
from foretell.bench._results import OVERALL, EngineResult, Results
from foretell.bench._statistics import Estimate

LONGEST: Final = 60  # characters of a name


def plots(results: Results) -> list[tuple[str, str]]:
    """Heading and SVG of every plot there are numbers for. Raises MissingExtraError."""
    require_matplotlib()
    if not results.engines:
        return []
    import matplotlib

    # Names are text: a dollar sign begins no formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        return _drawn(results)


def _drawn(results: Results) -> list[tuple[str, str]]:
    places = [OVERALL, *results.categories]
    drafting = [e for e in results.engines if e.decode_speedup and not e.is_plain]
    found = [
        (
            "Tokens per second of decoding, with 95% intervals",
            _bars(places, [(e.name, e.decode) for e in results.engines], None),
        )
    ]
    if drafting:
        found.append(
            (
                "Speed of decoding over own plain decoding, with 95% intervals",
                _bars(places, [(e.name, e.decode_speedup) for e in drafting], 1.0),
            )
        )
    if any(engine.acceptance for engine in drafting):
        found.append(("Accepted tokens at each position of a draft", _acceptance(drafting)))
    if results.record["passes"]:
        found.append(("T(k): a pass of k tokens against its limit", _passes(results.record)))
    if any(engine.step_seconds for engine in results.engines):
        found.append(("Where the time of a step goes", _steps(results.engines)))
    if any(entry.get("parts") for entry in results.record["passes"]):
        found.append(("Where the time of a pass goes", _parts(results.record)))
    return found


def require_matplotlib() -> None:
    """Raise MissingExtraError where it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"plots need matplotlib ({error}): {install_command('bench')}"
        ) from error


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=matplotlib.color_sequences["tab20"])
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure alone: text as text, no date, nothing from outside."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "foretell"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    )


def _label(name: str) -> str:
    """A name that fonts and legends take; these leave out what begins with a line."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:LONGEST])
    return f"\N{ZERO WIDTH SPACE}{text}" if not text or text.startswith("_") else text


def _bars(
    places: Sequence[str], series: Sequence[tuple[str, dict[str, Estimate]]], line: float | None
) -> str:
    figure, axes = _figure(11, 4.2)
    width = 0.8 / len(series)
    for index, (name, estimates) in enumerate(series):
        xs, values, below, above = [], [], [], []
        for place, category in enumerate(places):
            estimate = estimates.get(category)
            if estimate is None:
                continue
            xs.append(place + (index - (len(series) - 1) / 2) * width)
            values.append(estimate.value)
            low = estimate.value if estimate.low is None else estimate.low
            high = estimate.value if estimate.high is None else estimate.high
            below.append(max(estimate.value - low, 0.0))
            above.append(max(high - estimate.value, 0.0))
        error = {"elinewidth": 0.8}
        axes.bar(xs, values, width, label=_label(name), yerr=[below, above], error_kw=error)
    axes.set_xticks(range(len(places)), [_label(place) for place in places])
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8)
    _legend(axes, len(series))
    return _svg(figure)


def _acceptance(engines: Sequence[EngineResult]) -> str:
    figure, axes = _figure(7, 3.6)
    for engine in engines:
        if engine.acceptance:
            shares = engine.acceptance[:16]
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=_label(engine.name))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted tokens per draft")
    axes.set_ylim(bottom=0)
    _legend(axes, len(engines))
    return _svg(figure)


def _passes(record: Any) -> str:
    figure, axes = _figure(7, 4)
    for entry in record["passes"]:
        widths = [one["width"] for one in entry["widths"]]
        times = [1e3 * one["seconds"] for one in entry["widths"]]
        [line] = axes.plot(widths, times, marker="o", label=_label(entry["dtype"]))
        limits = [1e3 * one["limit_seconds"] for one in entry["widths"]]
        axes.plot(
            widths, limits, "--", color=line.get_color(), label=f"{_label(entry['dtype'])}, limit"
        )
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    _legend(axes, 2 * len(record["passes"]))
    return _svg(figure)


def _steps(engines: Sequence[EngineResult]) -> str:
    shown = [engine for engine in engines if engine.step_seconds]
    bars = [(engine.name, engine.step_seconds) for engine in shown]
    return _stacks(bars, "milliseconds a step")


def _parts(record: Any) -> str:
    bars = [
        (f"{entry['dtype']}, {part['width']}", part["seconds"])
        for entry in record["passes"]
        for part in entry["parts"]
    ]
    return _stacks(bars, "milliseconds a pass, by weights and tokens")


def _stacks(bars: Sequence[tuple[str, dict[str, float]]], label: str) -> str:
    figure, axes = _figure(9, 0.6 + 0.38 * len(bars) + 0.6)
    left = [0.0] * len(bars)
    parts = list(dict.fromkeys(part for _, seconds in bars for part in seconds))
    names = [_label(name) for name, _ in bars]
    for part in parts:
        values = [1e3 * seconds.get(part, 0.0) for _, seconds in bars]
        axes.barh(range(len(bars)), values, left=left, label=_label(part))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _legend(axes, len(parts))
    return _svg(figure)


def _legend(axes: Any, count: int) -> None:
    columns = min(count, 3)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=8
    )
