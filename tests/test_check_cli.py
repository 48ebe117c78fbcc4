"""`foretell check` as a command: tables, JSON, exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from test_check_others import serving

from foretell.check import Case as KitCase
from foretell.check import Planted, Report, Result, Verdict
from foretell.cli import _check

PASSED = KitCase("exact", "sampling", "match", Result.PASSED, "nothing differs")
FAILED = replace(PASSED, result=Result.FAILED, detail="token 3 is 5 instead of 4")
MISSED = Planted("bonus token from q", "", "match", "exact", True, False, "")


@pytest.fixture
def finds(monkeypatch):
    """Put a finished report in the place of the kit; what it was asked is kept."""
    asked = {}

    def put(*cases, planted=()):
        def kit(engine, prompts, **options):
            asked.update(options, prompts=prompts)
            return Report({"seeds": {}, "model": {"files_hash": "sha256:12"}}, cases, planted, 1.0)

        monkeypatch.setattr(_check, "run_kit", kit)
        return asked

    return put


def test_exit_codes_are_those_of_the_verdict(run, finds):
    finds(PASSED)
    assert run("check").code == 0
    finds(PASSED, FAILED)
    assert run("check").code == 1
    finds(PASSED, planted=(MISSED,))
    ran = run("check")
    assert ran.code == 2
    assert "blind" in ran.out


def test_the_table_is_for_people(run, finds, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    finds(PASSED, FAILED, planted=(replace(MISSED, was_found=True),))
    ran = run("check")
    assert "token 3 is 5 instead of 4" in ran.out
    assert "caught" in ran.out
    assert "violation: A guarantee is broken" in ran.out
    assert "1 of 2 cases passed, 1 of 1 planted errors judged rightly, model sha256:12" in ran.out
    assert ran.err == ""


def test_on_80_columns_the_verdict_of_a_line_comes_first(run, finds, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    skipped = replace(PASSED, result=Result.SKIPPED)
    finds(PASSED, FAILED, skipped, planted=(replace(MISSED, was_found=True),))
    ran = run("check")
    lines = [line for line in ran.out.splitlines() if "\u2026" not in line]
    assert lines == ran.out.splitlines()
    first = [re.match(r"[^\w]*([\w-]+)", line) for line in lines]
    words = [match[1] for match in first if match]
    for word in ("passed", "failed", "skipped", "caught"):
        assert word in words
    assert "1 of 3 cases passed, 1 skipped" in " ".join(ran.out.split())


def test_json_is_one_object(run, finds):
    finds(PASSED, planted=(replace(MISSED, was_found=True),))
    record = json.loads(run("check", "--json").out)
    assert record["verdict"] == "lossless"
    assert record["cases"][0]["detail"] == "nothing differs"
    assert record["planted"][0]["was_found"] is True


def test_options_reach_the_kit(run, finds, tmp_path):
    asked = finds(PASSED)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n\nsecond\n", "utf-8")
    run("check", "--quick", "--seed", "7", "--prompts", str(prompts), "--model", "m.gguf")
    assert (asked["prompts"], asked["quick"], asked["seed"]) == (["first", "second"], True, 7)
    assert asked["source"] == "m.gguf"


def test_the_real_kit_runs_on_an_engine(run):
    ran = run("check", "--quick", "--json", "--model", "a table")
    record = json.loads(ran.out)
    assert ran.code == 0, ran.out
    assert record["verdict"] == "lossless"
    assert {case["method"] for case in record["cases"]} == {"exact", "statistical", "bitwise"}


def test_endpoints_are_compared(run):
    with serving() as (_, plain), serving(swaps_at=2) as (_, other):
        same = run("check", "--quick", "--endpoint", plain, "--reference", plain, "--json")
        differs = run("check", "--quick", "--endpoint", other, "--reference", plain)
    assert same.code == 0
    assert json.loads(same.out)["verdict"] == str(Verdict.LOSSLESS)
    assert differs.code == 1
    assert "violation" in differs.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://127.0.0.1:9"], "--endpoint and --reference belong together"),
        (["--transformers"], "--transformers needs --model"),
        (["--prompts", "/nowhere/at.all"], "cannot read --prompts"),
        (
            ["--transformers", "--endpoint", "http://a", "--reference", "http://b"],
            "not both",
        ),
    ],
)
def test_what_cannot_run_says_so(run, arguments, message):
    ran = run("check", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_a_file_without_prompts_is_an_error(run, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("\n \n", "utf-8")
    assert "holds no prompt" in run("check", "--prompts", str(file)).err
    file.write_bytes(b"\xff\xfe\xff")
    assert "not valid UTF-8" in run("check", "--prompts", str(file)).err


def test_help_documents_the_exit_codes(run):
    said = " ".join(run("check", "--help").out.split())
    assert "Exit codes: 0 every guarantee held; 1 one is broken; 2 could not run" in said
