"""`foretell generate --compare`: both ways measured, and an honest verdict."""

from __future__ import annotations

import json

import pytest

from foretell import FinishReason, Generation, Stats
from foretell.cli._compare import ROUNDS, Comparison


def test_the_text_then_both_speeds_the_ratio_and_equality(run):
    ran = run("generate", "hello", "--compare", "--max-tokens", "60", seconds=0.002)
    text, _, plain, speculative, same, verdict = ran.out.splitlines()
    assert ran.code == 0
    assert text.startswith("fox jumpsfox jumps")
    assert plain.startswith("plain:        ")
    assert plain.endswith(" tokens/s")
    assert "tokens per step" in speculative
    assert same == f"same tokens:  yes, all 60 in {2 * ROUNDS} runs"
    assert verdict.startswith("speculation paid here: ")


def test_json_has_both_runs(run):
    ran = run("generate", "hello", "--compare", "--json", "--max-tokens", "60", seconds=0.001)
    result = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert result["equal"] is True
    assert result["speedup"] > 1
    assert result["plain"]["token_ids"] == result["speculative"]["token_ids"]
    assert result["plain"]["stats"]["num_drafts"] == 0
    assert result["speculative"]["stats"]["num_drafts"] > 0
    assert [len(speeds) for speeds in result["rounds"].values()] == [ROUNDS, ROUNDS]


def test_a_planted_error_is_found(run):
    ran = run("generate", "hello", "--compare", "--max-tokens", "60", faulty=True)
    assert ran.code == 1
    assert "same tokens:  NO: a speculative run has " in ran.out


def test_a_planted_error_is_found_in_json(run):
    ran = run("generate", "hello", "--compare", "--json", "--max-tokens", "60", faulty=True)
    assert (ran.code, json.loads(ran.out)["equal"]) == (1, False)


@pytest.mark.parametrize("interrupt_at", [5, 40, 80])
def test_ctrl_c_ends_it_without_a_verdict(run, interrupt_at):
    arguments = ["generate", "hello", "--compare", "--max-tokens", "30"]
    ran = run(*arguments, interrupt_at=interrupt_at)
    assert (ran.code, ran.err) == (130, "")
    assert ran.out.count("\n") == 1
    ran = run(*arguments, "--json", interrupt_at=interrupt_at)
    assert ran.code == 130
    assert json.loads(ran.out)["speedup"] is None


def result(
    speed: float,
    tokens: int = 100,
    *,
    drafts: int = 10,
    ids: list[int] | None = None,
    text: str = "",
    reason: FinishReason = FinishReason.STOP,
) -> Generation:
    stats = Stats(num_decode_tokens=tokens, decode_seconds=tokens / speed, num_drafts=drafts)
    return Generation(text, [1] * (tokens + 1) if ids is None else ids, reason, 5, stats)


@pytest.mark.parametrize(
    ("speed", "verdict"),
    [
        (142.4, "speculation paid here: 1.42x"),
        (102.1, "speculation paid here: 1.02x"),
        (101.9, "speculation made no difference here: 1.02x"),
        (98.1, "speculation made no difference here: 0.98x"),
        (93, "speculation did not pay here: 0.93x"),
    ],
)
def test_the_verdict_says_whether_speculation_paid(speed, verdict):
    assert Comparison([result(100)], [result(speed)]).verdict == verdict


def test_the_verdict_on_a_short_answer_is_that_it_is_too_short():
    comparison = Comparison([result(100, 4)], [result(120, 4)])
    assert comparison.verdict == ("too short to tell whether speculation pays: 1.20x over 4 tokens")


def test_the_verdict_without_a_draft_is_that_nothing_was_drafted():
    comparison = Comparison([result(100)], [result(99, drafts=0)])
    assert comparison.verdict == "nothing was drafted here, so speculation could not pay: 0.99x"


def test_an_answer_of_one_token_has_no_speedup():
    one = Generation("", [1], FinishReason.STOP, 5, Stats())
    comparison = Comparison([one], [one])
    assert comparison.speedup is None
    assert comparison.verdict == "nothing to compare: the first token was the whole answer"
    assert comparison.report()


def test_the_speedup_is_that_of_the_median_runs():
    plain = [result(100), result(10), result(101)]
    assert Comparison(plain, [result(150), result(900), result(150)]).speedup == 1.5


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (result(1, ids=[1, 2, 3]), None),
        (result(1, ids=[1, 9, 3]), "has 9 as token 2, the first plain run 2"),
        (result(1, ids=[1, 2]), "has 2 tokens, the first plain run 3"),
        (result(1, ids=[1, 2, 3], text="x"), "has the same tokens but another text"),
        (
            result(1, ids=[1, 2, 3], reason=FinishReason.LENGTH),
            "ended with 'length', the first plain run 'stop'",
        ),
    ],
)
def test_any_difference_of_any_run_is_told(other, difference):
    first = result(1, ids=[1, 2, 3])
    speculative = Comparison([first, first], [first, other])
    plain = Comparison([first, other], [first, first])
    assert speculative.difference == (difference and f"a speculative run {difference}")
    assert plain.difference == (difference and f"a plain run {difference}")
