"""`foretell tune`: settings that are tried, what is said of them, and what is kept."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import fake_engine
from test_cli_terminal import Terminal

from foretell import ContextLengthError, Stats
from foretell.bench._statistics import Estimate
from foretell.bench._tune import (
    PLAIN,
    Finding,
    Measured,
    Setting,
    Tuning,
    _finding,
    settings_for,
    tune,
)
from foretell.bench._workload import BUILT_IN, Question
from foretell.cli._tune import show

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "json.md").read_text("utf-8")
QUICK = {"max_tokens": 24, "repetitions": 2, "lengths": (1, 4)}


@pytest.fixture(scope="module")
def tuning():
    return tune(fake_engine(seconds=0.001), BUILT_IN.questions[:2], **QUICK)


def test_every_drafter_that_fits_is_tried_at_every_length(tuning):
    tried = {(f.setting.drafter, f.setting.length) for f in tuning.findings}
    names = ("suffix", "recycling", "prompt_lookup", "ngram")
    assert tried == {(name, length) for name in names for length in (1, 4)} | {("default", "auto")}
    draft = fake_engine()
    draft.draft = draft.model
    assert "draft_model" in {setting.drafter for setting in settings_for(draft)}


def test_outputs_are_compared(tuning):
    assert tuning.equal
    assert not tune(fake_engine(faulty=True), BUILT_IN.questions[:1], **QUICK).equal


def test_acceptance_is_that_of_a_text_that_repeats_itself(tuning):
    lookup = next(f for f in tuning.findings if f.setting == Setting("prompt_lookup", 4))
    assert 0.3 < lookup.acceptance_rate <= 1.0
    assert lookup.tokens_per_step > 1.5
    assert list(lookup.acceptance) == sorted(lookup.acceptance, reverse=True)


def test_what_to_expect_follows_from_acceptance_and_the_curve():
    """2 tokens a step, half of the steps with 3 drafted tokens, in passes of 4 that cost double."""
    plain, drafting = Measured(PLAIN), Measured(Setting("suffix", 3))
    plain.stats["q"] = [Stats(num_steps=20, num_decode_tokens=20, decode_seconds=2.0)]
    drafting.stats["q"] = [
        Stats(
            num_steps=10,
            num_drafts=5,
            num_draft_tokens=15,
            num_accepted_tokens=10,
            num_accepted_tokens_per_pos=[5, 3, 2],
            num_decode_tokens=20,
            decode_seconds=1.6,
        )
    ]
    for stats in (plain.stats["q"][0], drafting.stats["q"][0]):
        stats.model_seconds = stats.decode_seconds
    found = _finding(drafting, plain, {1: 0.1, 3: 0.15, 5: 0.25})
    assert found.expected == pytest.approx(2 * 0.1 / (0.5 * 0.2 + 0.5 * 0.1))
    assert found.measured.value == pytest.approx(2.0 / 1.6)
    assert found.acceptance == (1.0, 0.6, 0.4)
    assert found.acceptance_rate == pytest.approx(10 / 15)


def test_findings_are_sorted_and_the_curve_is_of_real_passes(tuning):
    values = [finding.measured.value for finding in tuning.findings]
    assert values == sorted(values, reverse=True)
    assert min(tuning.curve) == 1
    assert all(seconds >= 0.001 for seconds in tuning.curve.values())


def test_the_json_is_documented(tuning):
    part = DOCUMENT[DOCUMENT.index("# What tune found") :]
    told = tuning.to_dict()
    for name in {*told, *told["settings"][0]}:
        assert f"`{name}`" in part, name


def finding(drafter, length, value, low=None, high=None):
    estimate = Estimate(value, low or value - 0.01, high or value + 0.01)
    return Finding(Setting(drafter, length), 0.5, (0.5,), 0.5, 1.5, value, estimate)


def advice(*findings):
    return Tuning({1: 0.1}, 10.0, findings, True, False, 3, None).advice


def test_the_advice_follows_from_the_numbers():
    default = finding("default", "auto", 1.3)
    assert "The default is best here, with 1.30" in advice(default, finding("suffix", 1, 1.1))
    assert "--drafter suffix --num-draft-tokens 4, with 1.60" in advice(
        finding("suffix", 4, 1.6), default
    )
    assert "No setting is clearly better" in advice(finding("suffix", 4, 1.4, 1.2, 1.6), default)
    assert "Nothing pays here" in advice(finding("default", "auto", 0.99), finding("ngram", 1, 0.9))
    assert "Too little" in advice()
    assert finding("suffix", 1, 1.1).verdict == "pays"
    assert finding("suffix", 1, 0.9).verdict == "no"
    assert finding("suffix", 1, 1.0, 0.9, 1.1).verdict == "unclear"


def test_wide_intervals_are_said_and_what_to_do_about_them():
    default = finding("default", "auto", 1.3)
    more = "The intervals are too wide to tell more: use --prompts with 20 or more like yours."
    assert more not in advice(default, finding("suffix", 1, 1.1))
    assert more in advice(finding("default", "auto", 1.05, 0.9, 1.3))
    assert more in advice(finding("suffix", 4, 1.4, 1.2, 1.6), default)
    assert more not in advice(finding("suffix", 4, 1.31), default)
    assert more not in advice(finding("suffix", 4, 1.6), default)
    assert more in advice(finding("default", "auto", 0.99, 0.8, 1.2))
    many = Tuning({}, 1.0, (finding("default", "auto", 1.05, 0.9, 1.3),), True, False, 30, None)
    assert "use more prompts, or more --repetitions" in many.advice


@pytest.mark.parametrize("columns", ["80", None])
def test_all_fits_into_80_columns_whether_seen_or_piped(columns, monkeypatch, capsys):
    """The widest of everything: nothing is cut, and the verdict is there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    names = ("prompt_lookup", "draft_model", "early_exit:10", "recycling")
    findings = [finding(name, 8, 10.25, 0.93, 10.31) for name in names]
    findings += [finding("default", "auto", 1.2), finding("ngram", 1, 0.7)]
    show(Tuning({1: 0.1, 17: 0.2}, 100.0, tuple(findings), True, False, 3, None))
    said = capsys.readouterr().out
    assert "…" not in said
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    [head] = [line for line in lines if line.startswith("drafter")]
    assert head.split() == "drafter N accepted a step expected measured 95%".split()
    for one in findings:
        name, verdict = one.setting.drafter, one.verdict
        [line] = [line for line in lines if re.match(rf"{name} ", line)]
        assert line.split()[-1] == verdict, line
        assert f"{one.measured.low:.2f}-{one.measured.high:.2f}" in line


def test_the_backend_reaches_the_engine(run, monkeypatch):
    seen = []
    options = ["--max-tokens", "8", "--repetitions", "1", "--json"]

    def load(options):
        seen.append(options)
        return fake_engine(options)

    ran = run("tune", "a table", *options, "--backend", "cpu", "--exact", load=load)
    assert ran.code == 0, ran.err
    assert (seen[0].backend, seen[0].exact) == ("cpu", True)


def test_every_exit_of_a_model_that_can_be_left_is_tried():
    engine = fake_engine()
    engine.model.capabilities = replace(engine.model.capabilities, early_exit=11)
    tried = {setting.drafter for setting in settings_for(engine)}
    assert {"early_exit:2", "early_exit:3", "early_exit:4", "early_exit:6"} <= tried


def test_what_passes_cost_is_kept_for_engines_to_come(tmp_path):
    engine = fake_engine(seconds=0.001)
    engine.model.identity = "a table"
    engine = type(engine)(engine.model)
    found = tune(engine, BUILT_IN.questions[:1], **QUICK)
    saved = json.loads(Path(found.profile).read_text("utf-8"))
    assert {"1", "2", "4", "9"} <= set(saved["passes"]["rows"])
    assert type(engine)(engine.model)._experience.costs.known


def test_a_prompt_that_does_not_fit_is_found_before_any_work():
    engine = fake_engine()
    asked = []
    engine.model.forward = asked.append
    long = Question("2", "x", ("x" * engine.model.max_length,))
    with pytest.raises(ContextLengthError):
        tune(engine, [BUILT_IN.questions[0], long], **QUICK)
    assert asked == []


def test_the_command_shows_a_table_and_json(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ["a table", "--max-tokens", "16", "--repetitions", "1"]
    ran = run("tune", *options)
    assert ran.code == 0, ran.err
    assert "plain decoding:" in ran.out
    assert "prompt_lookup" in ran.out
    assert re.search(r"(pays|no|unclear)$", ran.out, re.MULTILINE)
    told = json.loads(run("tune", *options, "--json").out)
    assert told["format"] == "foretell-tune/1"
    assert told["prompts"] == len(BUILT_IN.questions)


def test_ctrl_c_shows_what_was_complete(run):
    ran = run("tune", "a table", "--max-tokens", "16", "--json", interrupt_at=400)
    assert ran.code == 130
    told = json.loads(ran.out)
    assert told["interrupted"]
    assert told["pass_seconds"]


def test_prompts_are_read_and_refused_like_those_of_bench(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n", "utf-8")
    options = ["--max-tokens", "8", "--repetitions", "1", "--json"]
    assert json.loads(run("tune", "x", "--prompts", str(path), *options).out)["prompts"] == 2
    ran = run("tune", "x", "--prompts", "/nowhere.txt")
    assert (ran.code, "cannot read /nowhere.txt" in ran.err) == (2, True)


def test_a_terminal_sees_what_is_left_and_ctrl_c_shows_what_there_is():
    command = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
    command += ['{"seconds": 0.01}', "tune", "a table", "--max-tokens", "8"]
    terminal = Terminal([*command, "--repetitions", "50"], COLUMNS="120")
    terminal.until(r"left:")
    terminal.until(r"suffix, 4")
    terminal.press_ctrl_c()
    terminal.until(r"interrupted: what was complete is shown")
    code, _ = terminal.end()
    assert code == 130
