"""``foretell bench``: engines side by side, the record, and the report."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from foretell._errors import InputError
from foretell._hub import files_hash
from foretell.bench._engines import Places, expand, parse
from foretell.bench._html import html
from foretell.bench._llama_server_worker import spec_types
from foretell.bench._markdown import markdown
from foretell.bench._model_text import ModelText
from foretell.bench._peer import make_peer
from foretell.bench._record import check_places, load, save, to_text, write
from foretell.bench._results import results_of
from foretell.bench._run import Plan, Run
from foretell.bench._workload import BUILT_IN, Workload, only, read_workload
from foretell.cli._errors import ExitCode
from foretell.cli._interrupt import Interrupt
from foretell.cli._terminal import announced, note, visible

SECONDS_BETWEEN_SAVES: Final = 5.0


@dataclass(frozen=True)
class Options:
    """What to compare, on what, and where the results go."""

    places: Places
    engines: Sequence[str]
    dtype: str
    workload: Path | None
    categories: Sequence[str]
    per_category: int | None
    max_tokens: int
    repetitions: int
    chat: bool
    passes: bool
    output: Path | None
    page: Path | None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def bench(options: Options, *, as_json: bool) -> int:
    """Measure, save, report. Everything that can be wrong is found before anything is loaded."""
    check_places([options.output, options.page], [options.workload])
    if options.page is not None:
        require_plots()
    workload = workload_of(options)
    places = options.places
    drafts = places.draft is not None
    types = cache(lambda: spec_types(places.llama_server, draft=drafts))
    specs = parse(options.engines or ["foretell"], options.dtype, draft=drafts, spec_types=types)
    asked = {
        word: {spec.name for spec in expand(word, options.dtype, drafts, types)}
        for word in options.engines
    }
    with announced() as tell:
        text = text_of(places, tell)
    plan = Plan(
        workload=workload,
        engines=specs,
        text=text,
        stop_token_ids=text.stop_token_ids,
        max_length=text.max_length,
        max_tokens=options.max_tokens,
        threads=places.threads,
        repetitions=options.repetitions,
        chat=options.chat,
        sampling=options.sampling,
        passes={} if options.passes else None,
    )
    with Interrupt() as interrupt, bar(plan.num_requests) as show:
        saved = time.monotonic()

        def progress(what: str, done: int) -> None:
            nonlocal saved
            show(what, done)
            if options.output is not None and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                saved = time.monotonic()
                save({**run.record, "interrupted": True}, options.output)

        run = Run(plan, lambda group: make_peer(group, places), progress, interrupt)
        run.record["command"] = command_line(sys.argv[1:])
        source = Path(places.model)
        run.record["model"] = {
            "source": source.name if source.exists() else places.model,
            "hash": hash_of(places.model),
            "draft": None if places.draft is None else Path(places.draft).name,
        }
        try:
            record = run.run()
        except BaseException:
            if options.output is not None:
                save({**run.record, "interrupted": True}, options.output)
            raise
    return finish(record, options, as_json, asked)


def finish(
    record: dict[str, Any], options: Options, as_json: bool, asked: Mapping[str, Set[str]]
) -> int:
    """Save and show what there is, and say how it ended; ``asked`` are the engines by word."""
    results, failure = results_of(record), None
    try:
        if options.output is not None:
            save(record, options.output)
        if options.page is not None:
            write(html([results]), options.page)
    except InputError as error:  # what was measured can still be shown
        failure = error
    sys.stdout.write(to_text(record) if as_json else visible(markdown(results, screen_width())))
    if failure is not None:
        raise failure
    if record["interrupted"]:
        return ExitCode.INTERRUPTED
    if not results.engines:
        reasons = "; ".join(f"{e['name']}: {e['reason']}" for e in record["skipped"])
        raise InputError(f"nothing was measured ({reasons or 'no question fits the context'})")
    for engine in results.engines:
        if engine.kind == "foretell" and engine.differing:
            note(f"{engine.name} gave other tokens than plain decoding: please report this")
            return ExitCode.DIFFERED
    told = {engine.name for engine in results.engines}
    silent = [word for word, names in asked.items() if not names & told]
    if silent:
        raise InputError(
            "; ".join(f"no result of --engine {word}" for word in silent) + why(record)
        )
    return ExitCode.OK


def why(record: Mapping[str, Any]) -> str:
    """The reasons for engines without a result, each once."""
    reasons = [f"{entry['name']}: {entry['reason']}" for entry in record["skipped"]]
    reasons += [f"{entry['engine']}: {entry['error']}" for entry in record["failures"]]
    return f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""


def screen_width() -> int | None:
    """Columns of the terminal; None where the report goes into a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def report(records: Sequence[Path], page: Path | None, *, as_json: bool) -> int:
    """What records say, as Markdown, as JSON, or as a page."""
    check_places([page], records)
    if page is not None:
        require_plots()
    results = [results_of(load(path)) for path in records]
    if page is not None:
        write(html(results), page)
    if as_json:
        found = [one.to_dict() for one in results]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        width = screen_width()
        sys.stdout.write(visible("\n".join(markdown(one, width) for one in results)))
    return ExitCode.OK


def require_plots() -> None:
    """Raise MissingExtraError before the work instead of after it."""
    from foretell.bench._plots import require_matplotlib

    require_matplotlib()


def workload_of(options: Options) -> Workload:
    """The questions asked for."""
    workload = BUILT_IN if options.workload is None else read_workload(options.workload)
    if options.categories:
        workload = only(workload, options.categories)
    return workload if options.per_category is None else workload.sample(options.per_category)


def text_of(places: Places, progress: Callable[[str], None]) -> ModelText:
    """The tokenizer; tests put another one here."""
    tokenizer = None if places.tokenizer is None else Path(places.tokenizer)
    return ModelText.of(places.model, tokenizer, progress, places.loading)


def hash_of(source: str) -> str | None:
    """Of the model's files."""
    return files_hash(source)


PRIVATE: Final = (
    "--model --draft --workload --output --html --tokenizer --transformers-python "
    "--openvino-python --llama-server"
).split()


def command_line(words: Sequence[str]) -> str:
    """How it was called; of places on this machine only the last part is kept."""
    kept: list[str] = []
    for word in words:
        option, sign, value = word.partition("=")
        if kept and kept[-1] in PRIVATE:
            word = Path(word).name
        elif sign and option in PRIVATE:
            word = f"{option}={Path(value).name}"
        kept.append(word)
    return shlex.join(["foretell", *kept])


@contextmanager
def bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar with the remaining time on stderr, where someone is watching."""
    if not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(file=sys.stderr),
        transient=True,
    ) as shown:
        task = shown.add_task("", total=total)
        yield lambda what, done: shown.update(task, completed=done, description=visible(what))
