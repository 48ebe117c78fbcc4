"""``foretell check``: the conformance kit, its tables and its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foretell._errors import EmptyPromptError, InputError, OptionError
from foretell.check import Endpoint, Report, Result, compare_engines
from foretell.check import check as run_kit
from foretell.cli import _load
from foretell.cli._terminal import make_console, visible

STYLES: Final = {
    Result.PASSED: "green",
    Result.NEAR_TIE: "yellow",
    Result.FAILED: "bold red",
    Result.UNDECIDED: "yellow",
    Result.SKIPPED: "dim",
}


@dataclass(frozen=True)
class Others:
    """Which other engine to check instead of this one, if any."""

    endpoint: str | None = None
    reference: str | None = None
    transformers: bool = False


def check(
    options: _load.ModelOptions,
    others: Others,
    prompts: Path | None,
    *,
    quick: bool,
    as_json: bool,
    seed: int,
) -> int:
    """Run the kit, show the report, return the exit code of its verdict."""
    if (others.endpoint is None) != (others.reference is None):
        raise OptionError(
            "--endpoint and --reference belong together: the server with speculation, and the "
            "same without"
        )
    if others.transformers and others.endpoint is not None:
        raise OptionError("pass --transformers or --endpoint, not both")
    texts = None if prompts is None else read_prompts(prompts)
    with _progress() as progress:
        if others.endpoint is not None or others.transformers:
            report = _check_others(options, others, texts, quick, seed, progress)
        else:
            engine = _load.load_engine(options)
            report = run_kit(
                engine, texts, seed=seed, quick=quick, source=options.model, progress=progress
            )
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return report.verdict.exit_code


def read_prompts(file: Path) -> list[str]:
    """The lines of a file; blank ones are left out. Raises InputError."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"cannot read --prompts {file}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError(f"{file} is not valid UTF-8; convert it to UTF-8 first") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise EmptyPromptError(f"{file} holds no prompt; put one on each line")
    return prompts


def show(report: Report) -> None:
    """Two tables and the verdict, for people."""
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    cases = Table(title="Guarantees", title_justify="left", expand=True)
    # What a narrow terminal shows best, the beginning of a line, is how it came out.
    for column in ("result", "rule", "method"):
        cases.add_column(column, no_wrap=True)
    cases.add_column("case", ratio=2)
    cases.add_column("found", ratio=3)
    for case in report.cases:
        result = Text(str(case.result), STYLES[case.result])
        cases.add_row(
            result, case.rule or "", case.method, Text(case.name), Text(visible(case.detail))
        )
    console.print(cases)
    if report.planted:
        planted = Table(title="Planted errors", title_justify="left", expand=True)
        for column in ("result", "rule", "method"):
            planted.add_column(column, no_wrap=True)
        planted.add_column("error", ratio=2)
        planted.add_column("found", ratio=3)
        for error in report.planted:
            word = ("caught" if error.is_error else "harmless") if error.right else "WRONG"
            planted.add_row(
                Text(word, "green" if error.right else "bold red"),
                error.rule,
                error.method,
                error.name,
                Text(visible(error.detail)),
            )
        console.print(planted)
    verdict = report.verdict
    style = "bold green" if verdict.exit_code == 0 else "bold red"
    console.print(Text(f"{verdict}: ", style) + Text(verdict.message, "default"))
    console.print(Text(_summary(report), "dim"))


def _summary(report: Report) -> str:
    passed = sum(case.result is Result.PASSED for case in report.cases)
    parts = [f"{passed} of {len(report.cases)} cases passed"]
    skipped = sum(case.result is Result.SKIPPED for case in report.cases)
    parts += [f"{skipped} skipped"] if skipped else []
    if report.planted:
        right = sum(planted.right for planted in report.planted)
        parts.append(f"{right} of {len(report.planted)} planted errors judged rightly")
    model = report.about.get("model")
    if isinstance(model, dict):
        found = model.get("files_hash") or model.get("logits_hash")
        parts += [f"model {found[:19]}"] if found else []
    return ", ".join([*parts, f"{report.seconds:.0f} s"])


def _check_others(
    options: _load.ModelOptions,
    others: Others,
    prompts: Sequence[str] | None,
    quick: bool,
    seed: int,
    progress: Callable[[float, str], None],
) -> Report:
    from foretell.check._others import PROMPTS, OtherEngine

    reference: OtherEngine
    engine: OtherEngine
    if others.endpoint is not None and others.reference is not None:
        reference, engine = Endpoint(others.reference), Endpoint(others.endpoint)
    else:
        from foretell.check._transformers import pair

        if options.model == "demo":
            raise OptionError("--transformers needs --model: a folder, or a name on the hub")
        reference, engine = pair(options.model, options.draft, dtype=options.dtype)
    return compare_engines(
        reference,
        engine,
        prompts or PROMPTS,
        samples=50 if quick else 200,
        seed=seed,
        progress=progress,
    )


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr, where someone is watching."""
    if not sys.stderr.isatty():
        yield lambda share, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("checking"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(file=sys.stderr),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, name: bar.update(task, completed=share, description=visible(name))
