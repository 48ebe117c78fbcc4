"""What is tested on small tables: the rules and the decoder around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from foretell._verify import Rule
from foretell.check._choices import every_table
from foretell.check._exact import TOLERANCE, enumerated
from foretell.check._job import Job
from foretell.check._planted import PLANTED, PlantedError
from foretell.check._report import Case, Planted, Result
from foretell.check._scenarios import DRAFTERS, KINDS, scenario
from foretell.check._statistical import FALSE_ALARM, SAMPLES, sampled, sampled_with
from foretell.check._statistics import Fit

CONTROL = "bonus token from q"
"""The planted error that every sample must show in the same run."""


def table_jobs(rules: Mapping[str, Rule], seed: int, quick: bool) -> list[Job]:
    """Every test of every rule, quick ones first."""
    jobs: list[Job] = []
    for rule in rules.values():
        for kind in KINDS:
            jobs.append(
                Job(f"exact: {rule.name}, {kind}", 1, _bind(exact, rule, kind, seed, quick))
            )
        if rule.same_tokens:
            jobs.append(Job(f"choices: {rule.name}", 2, _bind(choices, rule, quick)))
    for error, rule in product(PLANTED, rules.values()):
        if error.applies_to(rule):
            jobs.append(
                Job(f"planted: {error.name}", 0.2, _bind(planted_exactly, error, rule, seed))
            )
    kinds = ("processors",) if quick else ("processors", "end")
    tests = len(rules) * (len(kinds) + 1)
    for rule in rules.values():
        for kind in kinds:
            jobs.append(
                Job(
                    f"statistical: {rule.name}, {kind}",
                    4,
                    _bind(statistical, rule, kind, seed, FALSE_ALARM / tests),
                )
            )
        jobs.append(
            Job(
                f"statistical: {rule.name}, negative control",
                3,
                _bind(planted_sampled, _control(), rule, seed, FALSE_ALARM / tests),
            )
        )
    return jobs


def _bind(function: Callable[..., Case | Planted], *arguments: Any) -> Callable[[], Sequence[Any]]:
    return lambda: [function(*arguments)]


def _control() -> PlantedError:
    return next(error for error in PLANTED if error.name == CONTROL)


def exact(rule: Rule, kind: str, seed: int, quick: bool = False) -> Case:
    """All that can happen, for every drafter: the joint distribution of the next tokens."""
    drafters = [*DRAFTERS, "bush"] if rule.trees else list(DRAFTERS)
    runs = [(drafter, 2) for drafter in drafters]
    if not quick:
        runs.append(("near", 3))
    worst, count, different, example = 0.0, 0, 0, None
    for drafter, vocab_size in runs:
        found = enumerated(scenario(kind, drafter, seed=seed, vocab_size=vocab_size), rule)
        worst, count = max(worst, found.total_variation), count + found.worlds
        different += found.different
        if not found.exact and example is None:
            example = f"{drafter} drafter: {found.example or 'wrong distribution'}"
    passed = worst < TOLERANCE and not different
    detail = f"{len(runs)} drafters, {count} worlds: total variation {worst:.1e}"
    if example is not None:
        detail += f"; {different} worlds differ; {example}"
    return Case(
        "exact",
        kind,
        rule.name,
        Result.PASSED if passed else Result.FAILED,
        detail,
        {
            "total_variation": worst,
            "tolerance": TOLERANCE,
            "worlds": count,
            "different": different,
            "drafters": [drafter for drafter, _ in runs],
        },
    )


def choices(rule: Rule, quick: bool = False) -> Case:
    """Every table of choices, for every chain and every tree of some sizes."""
    sizes = [(3, 2, False)] if quick else [(3, 3, False), (2, 4, False)]
    if rule.trees:
        sizes += [(2, 2, True)] if quick else [(2, 2, True), (3, 2, True)]
    found = [every_table(rule, size, depth, trees=trees) for size, depth, trees in sizes]
    different = sum(one.different for one in found)
    drafts, tables = sum(one.drafts for one in found), sum(one.tables for one in found)
    detail = f"{drafts} chains and trees, {tables} tables: {different} differ"
    example = next((one.example for one in found if one.example), None)
    return Case(
        "exact",
        "every table of choices",
        rule.name,
        Result.FAILED if different else Result.PASSED,
        detail if example is None else f"{detail}; {example}",
        {"drafts": drafts, "tables": tables, "different": different},
    )


def statistical(
    rule: Rule, kind: str, seed: int, false_alarm: float, samples: int = SAMPLES
) -> Case:
    """Sampled outputs of the engine against their exact probabilities."""
    found = sampled(
        scenario(kind, "near", seed=seed, vocab_size=3),
        rule,
        seed=seed,
        samples=samples,
        false_alarm=false_alarm,
    )
    return Case(
        "statistical",
        kind,
        rule.name,
        Result.PASSED if found.fits else Result.FAILED,
        _described(found),
        _numbers(found),
    )


def planted_exactly(error: PlantedError, rule: Rule, seed: int) -> Planted:
    """A planted error under enumeration."""
    chosen = scenario(error.scenario, "random", seed=seed, vocab_size=error.vocab_size)
    try:
        found = enumerated(chosen, rule, error.parts())
        was_found = not found.exact
        detail = f"total variation {found.total_variation:.1e}"
        if found.different:
            detail += f", {found.different} of {found.worlds} worlds differ"
    except Exception as raised:  # a wrong decoder may break in any way, which is found as well
        was_found, detail = True, f"raised {type(raised).__name__}: {raised}"
    return planted_result(error, rule, "exact", was_found, detail)


def planted_sampled(
    error: PlantedError, rule: Rule, seed: int, false_alarm: float, samples: int = SAMPLES
) -> Planted:
    """A planted error in a sample, on tables on which it shows."""
    assert error.sampled_table is not None
    chosen = scenario(
        error.scenario, "random", seed=error.sampled_table, vocab_size=error.vocab_size
    )
    found = sampled_with(
        chosen, rule, error.parts(), seed=seed, samples=samples, false_alarm=false_alarm
    )
    return planted_result(error, rule, "statistical", not found.fits, _described(found))


def planted_result(
    error: PlantedError, rule: Rule, method: str, was_found: bool, detail: str
) -> Planted:
    """What became of a planted error."""
    return Planted(
        error.name,
        error.about,
        rule.name,
        method,
        error.is_error_under(rule),
        was_found,
        detail,
    )


def _described(found: Fit) -> str:
    return (
        f"{found.samples} samples: chi-square {found.chi_square:.1f} with {found.degrees} degrees "
        f"of freedom, p {found.p_value:.2g}; total variation {found.total_variation:.3f} (chance "
        f"alone about {found.noise_floor:.3f}); false alarm {found.false_alarm:.1e}"
    )


def _numbers(found: Fit) -> dict[str, Any]:
    return {
        "samples": found.samples,
        "chi_square": found.chi_square,
        "degrees_of_freedom": found.degrees,
        "p_value": found.p_value,
        "total_variation": found.total_variation,
        "noise_floor": found.noise_floor,
        "total_variation_bound": found.bound,
        "false_alarm": found.false_alarm,
    }
