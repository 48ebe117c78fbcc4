"""The kit on the real rules, on wrong ones, and on rules it has never seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretell._sampling import RequestSampler
from foretell._verify import RULES, Origin
from foretell.check import Result, Verdict, check
from foretell.check._choices import every_table
from foretell.check._definition import next_token
from foretell.check._exact import enumerated
from foretell.check._on_tables import (
    exact,
    planted_exactly,
    planted_sampled,
    statistical,
    table_jobs,
)
from foretell.check._planted import PLANTED
from foretell.check._scenarios import DRAFTERS, KINDS, scenario

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
PAIRS = [(error, rule) for error in PLANTED for rule in RULES.values() if error.applies_to(rule)]
every_planted_error = pytest.mark.parametrize(
    ("error", "rule"), PAIRS, ids=[f"{error.name}, {rule.name}" for error, rule in PAIRS]
)
SAMPLED = [
    (error, rule)
    for error, rule in PAIRS
    if error.sampled_table is not None and error.is_error_under(rule)
]


@every_rule
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_is_exact_with_every_drafter(rule, kind):
    case = exact(rule, kind, seed=7)
    assert case.result is Result.PASSED, case.detail
    assert case.numbers["total_variation"] < 1e-12
    assert case.numbers["drafters"][: len(DRAFTERS)] == list(DRAFTERS)


@every_rule
def test_longer_drafts_are_exact_too(rule):
    longer = replace(scenario("sampling", seed=3, max_tokens=5), num_draft_tokens=3)
    assert enumerated(longer, rule).exact


def test_match_is_a_walk_through_every_table_of_choices():
    for vocab_size, depth, trees in ((2, 2, True), (3, 3, False), (2, 4, False)):
        found = every_table(RULES["match"], vocab_size, depth, trees=trees)
        assert found.different == 0
        assert found.tables > found.drafts > 20


@every_planted_error
def test_a_planted_error_is_called_one_exactly_where_it_is_one(error, rule):
    for seed in range(2):
        found = planted_exactly(error, rule, seed)
        assert found.was_found == error.is_error_under(rule), found.detail


@pytest.mark.parametrize(
    ("error", "rule"), SAMPLED, ids=[f"{error.name}, {rule.name}" for error, rule in SAMPLED]
)
def test_a_sample_shows_a_planted_error(error, rule):
    found = planted_sampled(error, rule, seed=1, false_alarm=1e-6)
    assert found.was_found, found.detail


@every_rule
def test_a_sample_of_the_right_decoder_raises_no_alarm(rule):
    case = statistical(rule, "processors", seed=5, false_alarm=1e-6, samples=400)
    assert case.result is Result.PASSED, case.detail


def test_every_error_says_where_it_is_one():
    for error in PLANTED:
        assert error.about
        harmful = [rule.name for rule in RULES.values() if error.is_error_under(rule)]
        assert harmful or error.name == "draft cache one token behind"
    wrong_q = next(error for error in PLANTED if error.name == "q before the processors")
    assert not wrong_q.is_error_under(RULES["match"])
    assert wrong_q.is_error_under(RULES["rejection"])


def test_the_definition_agrees_with_the_sampler():
    for kind in KINDS:
        for seed in range(5):
            one = scenario(kind, seed=seed, vocab_size=4)
            rng = np.random.default_rng(seed)
            for length in range(4):
                output = rng.integers(3, size=length).tolist()  # 3 would end it
                history = [*one.prompt, *output]
                sampler = RequestSampler(
                    one.params, prompt_length=len(one.prompt), eos_token_ids=one.eos_token_ids
                )
                row = one.table[tuple(([0, *history])[-2:])]
                ours = next_token(one.table, one.prompt, output, one.params, one.eos_token_ids)
                assert sampler.distribution(row, history, len(history)) == pytest.approx(
                    ours, abs=1e-12
                )


# --- Rules nobody has seen -----------------------------------------------------------


def trusting(draft, logits, sampler, history):
    """A wrong rule: every draft is kept."""
    for token in draft.tokens:
        yield token, Origin.DRAFT
    last = sampler.distribution(logits[-1], [*history, *draft.tokens], len(history) + len(draft))
    yield sampler.draws(len(history)).recover(len(draft), last), Origin.CORRECTION


def test_a_new_rule_is_tested_like_the_others(monkeypatch):
    new = replace(RULES["rejection"], name="new")
    monkeypatch.setitem(RULES, "new", new)
    names = [job.name for job in table_jobs(RULES, 0, quick=True)]
    for kind in KINDS:
        assert f"exact: new, {kind}" in names
    assert "statistical: new, negative control" in names
    report = check(quick=True, rules={"new": new})
    assert report.verdict is Verdict.LOSSLESS
    assert {case.method for case in report.cases} == {"exact", "statistical"}
    assert {planted.name for planted in report.planted} >= {
        "q of another token",
        "penalties once per block",
    }


@pytest.mark.parametrize("same_tokens", [False, True])
def test_a_wrong_new_rule_is_a_violation(same_tokens):
    rule = replace(RULES["rejection"], name="wrong", verify=trusting, same_tokens=same_tokens)
    failed = [exact(rule, kind, 0, quick=True).result for kind in KINDS]
    assert Result.FAILED in failed


# --- The report ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    return check(quick=True, seed=3)


def test_the_report_without_a_model(report):
    record = report.to_dict()
    assert record["verdict"] == "lossless"
    assert record["seeds"]["tables"] == 3
    assert record["model"] is None
    assert {"engine", "versions", "cases", "planted", "seconds"} <= set(record)
    assert all(planted["is_error"] == planted["was_found"] for planted in record["planted"])
    controls = [one for one in report.planted if one.method == "statistical"]
    assert [one.rule for one in controls] == list(RULES)
    assert "false alarm" in next(c.detail for c in report.cases if c.method == "statistical")


def test_a_kit_that_misses_an_error_says_that_it_is_blind(report):
    missed = replace(report.planted[1], was_found=not report.planted[1].was_found)
    blind = replace(report, planted=(missed,))
    assert blind.verdict is Verdict.BLIND
    assert blind.verdict.exit_code == 2
