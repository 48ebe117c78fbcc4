"""Sampling on the command line: its options reach the engine, and its seed can be had again."""

from __future__ import annotations

import json

import pytest

WARM = ["--temperature", "1.5", "--max-tokens", "30"]


def test_a_seed_gives_the_same_text_with_and_without_speculation(run):
    first = run("generate", "hello", *WARM, "--seed", "7")
    assert first.code == 0
    assert run("generate", "hello", *WARM, "--seed", "7", "--num-draft-tokens", "0") == first
    assert run("generate", "hello", *WARM, "--seed", "8").out != first.out


def test_a_drawn_seed_is_reported_and_reproduces(run):
    first = json.loads(run("generate", "hello", *WARM, "--json").out)
    again = json.loads(run("generate", "hello", *WARM, "--json", "--seed", str(first["seed"])).out)
    assert again["token_ids"] == first["token_ids"]
    assert json.loads(run("generate", "hello", "--json").out)["seed"] is None


@pytest.mark.parametrize("option", [["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]])
def test_truncation_to_the_best_token(run, option):
    assert run("generate", "hello", *WARM, *option).out == ("fox jumps" * 4)[:30] + "\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--top-p", "0.5"], "--top-p 0.5 changes"),
        (["--top-k", "3"], "--top-k 3 changes"),
        (["--min-p", "0.1"], "--min-p 0.1 changes"),
        (["--seed", "0"], "--seed 0 changes"),
        (["--verification", "block"], "--verification block changes"),
        (["--seed", "3", "--temperature", "0"], "--seed 3 changes"),
        (["--seed", "3", "--top-p", "0.5"], "--top-p 0.5 and --seed 3 change"),
    ],
)
def test_what_would_be_ignored_at_temperature_0_is_refused(run, command, options, told):
    ran = run(command, *options, stdin=b"hello")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f"error: {told} nothing at temperature 0, where the best token is always taken; add "
        "--temperature X, for example 0.7\n"
    )


def test_what_is_off_anyway_may_be_said_at_temperature_0(run):
    off = ["--top-p", "1", "--top-k", "0", "--min-p", "0", "--verification", "match"]
    assert run("generate", "hello", *off, "--max-tokens", "9").out == "fox jumps\n"


def test_comparing_sampled_runs_settles_their_seed(run):
    ran = run("generate", "hello", *WARM, "--compare", "--json")
    result = json.loads(ran.out)
    assert (ran.code, result["equal"]) == (0, True)
    assert result["plain"]["seed"] == result["speculative"]["seed"] is not None


def test_what_promises_no_equal_tokens_is_not_compared(run):
    ran = run("generate", "hello", *WARM, "--compare", "--verification", "block")
    assert (ran.code, ran.out) == (2, "")
    assert "--verification block does not promise" in ran.err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--temperature", "inf"], "temperature is inf; use a finite number from 0"),
        (["--seed", str(2**64)], "seed is 18446744073709551616; use a whole number"),
    ],
)
def test_impossible_values(run, option, message):
    ran = run("generate", "hello", "--temperature", "1", *option)
    assert ran.code == 2
    assert message in ran.err


def test_a_conversation_samples_too(run):
    options = ["--temperature", "1.5", "--max-tokens", "20", "--seed", "3"]
    first = run("chat", *options, "--verification", "match", stdin=b"hi\n")
    assert first.code == 0
    assert run("chat", *options, stdin=b"hi\n") == first
