"""`foretell generate --compare`: both ways measured, and an honest verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from foretell import FinishReason, Generation, Stats
from foretell.cli._compare import ROUNDS, Comparison


def test_the_text_then_both_speeds_the_ratio_and_equality(run):
    ran = run("generate", "hello", "--compare", "--max-tokens", "60", seconds=0.002)
    text, _, plain, speculative, same, verdict, total = ran.out.splitlines()
    assert ran.code == 0
    assert text.startswith("fox jumpsfox jumps")
    assert plain.startswith("plain:        ")
    assert plain.endswith(" tokens/s")
    assert "tokens per step" in speculative
    assert same == f"same tokens:  yes, all 60 in {2 * ROUNDS} runs"
    assert re.fullmatch(
        r"(speculation paid|no clear difference) here: "
        r"\d\.\d\dx in the median round \(\d\.\d\dx to \d\.\d\dx in 5 rounds\)",
        verdict,
    )
    assert re.fullmatch(
        r"\(decoding alone, after the first token; \d\.\d\dx with the time to read the prompt\)",
        total,
    )


def test_an_answer_of_one_token_leaves_nothing_to_compare(run):
    ran = run("generate", "hello", "--compare", "--max-tokens", "1")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "f\n\nsame tokens:  yes, all 1 in 10 runs\n"
        "nothing to compare: the first token was the whole answer\n"
    )


# What pays is for the policy to find out, so drafting is asked for.
ALWAYS = ("--max-tokens", "60", "--num-draft-tokens", "4")


def test_json_has_both_runs(run):
    ran = run("generate", "hello", "--compare", "--json", *ALWAYS, seconds=0.002)
    result = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert result["equal"] is True
    assert result["speedup"] > 1  # 4 tokens a pass of 2 ms
    assert result["total_speedup"] > 0
    assert f" here: {result['speedup']:.2f}x in the median round (" in result["verdict"]
    assert result["plain"]["token_ids"] == result["speculative"]["token_ids"]
    assert result["plain"]["stats"]["num_drafts"] == 0
    assert result["speculative"]["stats"]["num_drafts"] > 0
    assert [len(speeds) for speeds in result["rounds"].values()] == [ROUNDS, ROUNDS]


def test_a_planted_error_is_found(run):
    ran = run("generate", "hello", "--compare", *ALWAYS, faulty=True)
    assert ran.code == 1
    assert "same tokens:  NO: a speculative run has " in ran.out


def test_a_planted_error_is_found_in_json(run):
    ran = run("generate", "hello", "--compare", "--json", *ALWAYS, faulty=True)
    assert (ran.code, json.loads(ran.out)["equal"]) == (1, False)


@pytest.mark.parametrize("interrupt_at", [5, 40, 80])
def test_ctrl_c_ends_it_without_a_verdict(run, interrupt_at):
    arguments = ["generate", "hello", "--compare", "--max-tokens", "30"]
    ran = run(*arguments, interrupt_at=interrupt_at)
    assert (ran.code, ran.err) == (130, "")
    assert ran.out.count("\n") == 1
    ran = run(*arguments, "--json", interrupt_at=interrupt_at)
    assert ran.code == 130
    result = json.loads(ran.out)
    assert result["speedup"] is None
    assert result["verdict"] == "stopped by Ctrl-C"


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
    ("speeds", "verdict"),
    [
        (
            (141, 142, 143),
            "speculation paid here: 1.42x in the median round (1.41x to 1.43x in 3 rounds)",
        ),
        (
            (101, 102, 103),
            "speculation paid here: 1.02x in the median round (1.01x to 1.03x in 3 rounds)",
        ),
        (
            (99, 104, 140),
            "no clear difference here: 1.04x in the median round (0.99x to 1.40x in 3 rounds)",
        ),
        (
            (80, 96, 101),
            "no clear difference here: 0.96x in the median round (0.80x to 1.01x in 3 rounds)",
        ),
        (
            (100, 100, 100),
            "no clear difference here: 1.00x in the median round (1.00x to 1.00x in 3 rounds)",
        ),
        (
            (80, 93, 99),
            "speculation did not pay here: 0.93x in the median round (0.80x to 0.99x in 3 rounds)",
        ),
    ],
)
def test_speculation_paid_only_if_every_round_says_so(speeds, verdict):
    plain = [result(100) for _ in speeds]
    assert Comparison(plain, [result(speed) for speed in speeds]).verdict == verdict


def test_every_round_is_compared_with_its_own_plain_run():
    plain = [result(100), result(50), result(10)]
    comparison = Comparison(plain, [result(120), result(60), result(12)])
    assert (
        comparison.verdict
        == "speculation paid here: 1.20x in the median round (1.20x to 1.20x in 3 rounds)"
    )


def test_the_total_includes_the_time_to_read_the_prompt():
    runs = [result(100), result(200)]  # 1 s and 0.5 s
    for run in runs:
        run.stats.prefill_seconds = 1.0
    comparison = Comparison(runs[:1], runs[1:])
    assert (comparison.speedup, comparison.total_speedup) == (2.0, pytest.approx(2 / 1.5))


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


def test_the_speedup_is_that_of_the_median_round():
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


def keys(value: object) -> set[str]:
    """Every name in a JSON value but those in "policy", which have a page of their own."""
    if isinstance(value, dict):
        return set(value).union(*(keys(value[name]) for name in value if name != "policy"))
    return set()


def test_every_field_is_explained(run):
    page = (Path(__file__).resolve().parent.parent / "docs" / "json.md").read_text("utf-8")
    page = page.partition("\n## ")[0]  # what follows is about other commands
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*?\|", page, re.M))))
    found = set()
    for options in ([], ["--compare"]):
        ran = run("generate", "hello", "--json", "--max-tokens", "9", *options)
        found |= keys(json.loads(ran.out))
    assert found | {"policy", "num_near_ties"} == explained  # not of every backend and policy
