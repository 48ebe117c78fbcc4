"""``foretell tune``: what pays here, as a table or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from foretell.bench._statistics import Estimate
from foretell.bench._tune import Tuning, settings_for, tune
from foretell.bench._workload import BUILT_IN, read_workload
from foretell.cli import _load
from foretell.cli._bench import bar
from foretell.cli._errors import ExitCode
from foretell.cli._interrupt import Interrupt
from foretell.cli._terminal import make_console, visible

STYLES: Final = {"pays": "green", "no": "red"}


def run(
    options: _load.ModelOptions,
    prompts: Path | None,
    *,
    max_tokens: int,
    repetitions: int,
    as_json: bool,
) -> int:
    """Measure and show; after Ctrl-C what there was until then."""
    workload = BUILT_IN if prompts is None else read_workload(prompts)
    engine = _load.load_engine(options)
    total = repetitions * len(workload.questions) * len(settings_for(engine))
    with Interrupt() as interrupt, bar(total) as progress:
        tuning = tune(
            engine,
            workload.questions,
            max_tokens=max_tokens,
            repetitions=repetitions,
            progress=progress,
            is_cancelled=interrupt,
        )
    if as_json:
        sys.stdout.write(json.dumps(tuning.to_dict(), indent=2) + "\n")
    else:
        show(tuning)
    if tuning.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if tuning.equal else ExitCode.DIFFERED


def show(tuning: Tuning) -> None:
    """The curve, the table and the advice, for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    curve = "  ".join(f"{width}: {1e3 * seconds:.1f}" for width, seconds in tuning.curve.items())
    console.print(Text(f"milliseconds of a pass of k tokens   {curve}"))
    console.print(Text(f"plain decoding: {tuning.plain_tokens_per_second:.1f} tokens/s"))
    # It all fits into 80 columns, the verdict first of all.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in ("drafter", "N", "accepted", "a step", "expected", "measured", "95%"):
        table.add_column(column, no_wrap=True)
    table.add_column("", no_wrap=True, min_width=len("unclear"))
    for finding in tuning.findings:
        length = finding.setting.length
        table.add_row(
            str(finding.setting.drafter),
            "auto" if length == "auto" else str(length),
            f"{finding.acceptance_rate:.0%}",
            f"{finding.tokens_per_step:.2f}",
            f"{finding.expected:.2f}x",
            f"{finding.measured.value:.2f}x",
            _interval(finding.measured),
            Text(finding.verdict, STYLES.get(finding.verdict, "")),
        )
    console.print(table)
    console.print(
        Text(
            "N: --num-draft-tokens; a step: tokens; expected, measured: over plain, greedy",
            "dim",
        )
    )
    if not tuning.equal:
        console.print(Text("OUTPUTS DIFFERED: please report this", "bold red"))
    if tuning.interrupted:
        console.print(Text("interrupted: what was complete is shown", "yellow"))
    console.print(Text(tuning.advice, "bold"))
    if tuning.profile is not None:
        console.print(
            Text(f"what passes cost here is kept in {visible(tuning.profile)}", "dim"),
            soft_wrap=True,
        )


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.2f}-{estimate.high:.2f}"
