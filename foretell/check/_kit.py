"""The whole check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from foretell._engine import Engine, Prompt
from foretell._verify import RULES, Rule
from foretell.check._about import about_engine, versions
from foretell.check._on_models import model_jobs
from foretell.check._on_tables import table_jobs
from foretell.check._report import Case, Planted, Report

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, 0 to 1, and what comes next."""


def check(
    engine: Engine | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    seed: int = 0,
    quick: bool = False,
    rules: Mapping[str, Rule] | None = None,
    source: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Test every rule on small tables, and ``engine``, if there is one, on its own model.

    ``prompts`` are texts or lists of token ids; without any, two of the kit's own. ``seed`` draws
    tables and samples; ``quick`` takes fewer of everything. ``rules`` are all of RULES. ``source``
    is where the model came from, for its hash. Raises ForetellError where it cannot run at all;
    whatever it finds is in the report.
    """
    began = perf_counter()
    rules = dict(RULES if rules is None else rules)
    jobs = [*table_jobs(rules, seed, quick)]
    about: dict[str, Any] = {
        "engine": {"name": "foretell"},
        "versions": versions(),
        "model": None,
    }
    if engine is not None:
        about |= about_engine(engine, source)
        jobs += model_jobs(engine, prompts, rules, seed, quick)
    about["seeds"] = {"tables": seed, "samples": seed, "sampled requests": seed}
    about["quick"] = quick
    cases: list[Case] = []
    planted: list[Planted] = []
    whole, done = sum(job.weight for job in jobs), 0.0
    for job in jobs:
        if progress is not None:
            progress(done / whole, job.name)
        for found in job.run():
            if isinstance(found, Case):
                cases.append(found)
            else:
                planted.append(found)
        done += job.weight
    if progress is not None:
        progress(1.0, "done")
    return Report(about, tuple(cases), tuple(planted), perf_counter() - began)
