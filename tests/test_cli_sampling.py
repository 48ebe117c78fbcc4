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


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_every_rule_is_greedy_at_temperature_0(run, rule):
    ran = run("generate", "hello", "--verification", rule, "--max-tokens", "30")
    assert ran.out == ("fox jumps" * 4)[:30] + "\n"


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
    ran = run("generate", "hello", *option)
    assert ran.code == 2
    assert message in ran.err


def test_a_conversation_samples_too(run):
    options = ["--temperature", "1.5", "--max-tokens", "20", "--seed", "3"]
    first = run("chat", *options, "--verification", "match", stdin=b"hi\n")
    assert first.code == 0
    assert run("chat", *options, stdin=b"hi\n") == first
