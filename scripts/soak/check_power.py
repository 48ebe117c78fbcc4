"""Measure how often `foretell check` finds planted errors, and how often what is not there.

    python scripts/soak/check_power.py --seeds 100 --clean 200 --output check_power.json
    python scripts/soak/check_power.py --table check_power.json

Three parts. *Power*: every planted error under every rule, by enumeration on tables drawn by each
seed, and by samples of the kit's own size where a sample shows it. *False alarms*: the kit's tests
on the right decoder, with every seed its own tables, samples and model. *Tail*: how often p-values
of true samples of a scenario fall below what they say. The record is written after every part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretell import Engine
from foretell._verify import RULES
from foretell.backends.table import TableModel
from foretell.check import Case, Result
from foretell.check._about import versions
from foretell.check._definition import joint
from foretell.check._on_models import model_jobs
from foretell.check._on_tables import exact, planted_exactly, planted_sampled, statistical
from foretell.check._planted import PLANTED, PlantedError
from foretell.check._scenarios import KINDS, scenario
from foretell.check._statistical import FALSE_ALARM, SAMPLES
from foretell.check._statistics import fit
from foretell.drafters import DraftModel

TESTS = 3 * len(RULES)  # statistical tests of a whole run of the kit
LEVELS = (1e-2, 1e-3, 1e-4, 1e-5)


def by_enumeration(task: tuple[int, str, int]) -> dict[str, Any]:
    index, name, seeds = task
    error, rule = PLANTED[index], RULES[name]
    found = sum(planted_exactly(error, rule, seed).was_found for seed in range(seeds))
    return _row(error, name, found, seeds)


def by_samples(task: tuple[int, str, int]) -> dict[str, Any]:
    index, name, seeds = task
    error, level = PLANTED[index], FALSE_ALARM / TESTS
    found = sum(planted_sampled(error, RULES[name], s, level).was_found for s in range(seeds))
    return _row(error, name, found, seeds)


def _row(error: PlantedError, rule: str, found: int, seeds: int) -> dict[str, Any]:
    is_error = error.is_error_under(RULES[rule])
    row = {"error": error.name, "rule": rule, "is_error": is_error, "found": found, "of": seeds}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def clean_run(seed: int) -> list[tuple[int, Case]]:
    cases = [exact(rule, kind, seed, quick=True) for rule in RULES.values() for kind in KINDS]
    cases += [statistical(rule, "processors", seed, FALSE_ALARM / TESTS) for rule in RULES.values()]
    draft = DraftModel(TableModel.random(40, 1, seed=seed + 1000))
    engine = Engine(TableModel.random(40, 2, seed=seed), drafters=[draft])
    found = [one for job in model_jobs(engine, None, RULES, seed, True) for one in job.run()]
    return [(seed, one) for one in cases + found if isinstance(one, Case)]


RIGHT = (Result.PASSED, Result.SKIPPED)
"""A drafter that had nothing to say about a table is skipped."""


def false_alarms(runs: Sequence[list[tuple[int, Case]]]) -> dict[str, Any]:
    cases = [(seed, case) for run in runs for seed, case in run]
    wrong = [(seed, case) for seed, case in cases if case.result not in RIGHT]
    p_values = [case.numbers["p_value"] for _, case in cases if case.method == "statistical"]
    variations = [c.numbers["total_variation"] for _, c in cases if c.method == "exact"]
    return {
        "runs": len(runs),
        "cases": len(cases),
        "alarms": [{"seed": seed, **case.to_dict()} for seed, case in wrong],
        "worst_exact_total_variation": max(variations),
        "statistical_tests": len(p_values),
        "smallest_p_value": min(p_values),
    }


def tail(samples: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    chosen = scenario("processors", "near", seed=0, vocab_size=3)
    expected = joint(chosen.table, chosen.prompt, chosen.params, chosen.eos_token_ids)
    p = np.array(list(expected.values()))
    found = np.array(
        [
            fit(dict(zip(expected, counts, strict=True)), expected, FALSE_ALARM / TESTS).p_value
            for counts in rng.multinomial(SAMPLES, p / p.sum(), size=samples).tolist()
        ]
    )
    return {
        "samples": samples,
        "of": SAMPLES,
        "below": {f"{level:g}": int((found < level).sum()) for level in LEVELS},
    }


def table(record: dict[str, Any]) -> str:
    """The table of `docs/losslessness.md`."""
    sampled = {(row["error"], row["rule"]): row for row in record.get("sampling", [])}
    lines = [
        "| planted | rule | is an error | found by enumeration | found by samples |",
        "|---|---|---|---|---|",
    ]
    for row in record["enumeration"]:
        other = sampled.get((row["error"], row["rule"]))
        cells = [
            row["error"],
            f"`{row['rule']}`",
            "yes" if row["is_error"] else "no",
            f"{row['found']} of {row['of']}",
            f"{other['found']} of {other['of']}" if other else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--tail", type=int, default=200_000)
    parser.add_argument("--output", type=Path, default=Path("check_power.json"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", type=Path, help="print the table of a record, measure nothing")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return 0
    record: dict[str, Any] = {
        "command": f"python scripts/soak/check_power.py --seeds {options.seeds} "
        f"--clean {options.clean} --tail {options.tail}",
        "versions": versions(),
        "samples": SAMPLES,
        "false_alarm": FALSE_ALARM,
    }
    pairs = [
        (index, rule.name, options.seeds)
        for index, error in enumerate(PLANTED)
        for rule in RULES.values()
        if error.applies_to(rule)
    ]
    sampled = [
        (index, name, seeds)
        for index, name, seeds in pairs
        if PLANTED[index].sampled_table is not None and PLANTED[index].is_error_under(RULES[name])
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        parts: dict[str, Callable[[], Any]] = {
            "enumeration": lambda: pool.map(by_enumeration, pairs, chunksize=1),
            "false_alarms": lambda: false_alarms(pool.map(clean_run, range(options.clean))),
            "tail": lambda: tail(options.tail),
            "sampling": lambda: pool.map(by_samples, sampled, chunksize=1),
        }
        for name, part in parts.items():
            record[name] = part()
            options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    wrong = [row for row in record["enumeration"] if row["found"] != row["of"] * row["is_error"]]
    wrong += [row for row in record["sampling"] if row["found"] < 0.99 * row["of"]]
    return 1 if wrong or record["false_alarms"]["alarms"] else 0


if __name__ == "__main__":
    sys.exit(main())
