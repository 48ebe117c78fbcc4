"""Sampled output is the same with and without speculation, whatever is asked of a request.

Plain decoding itself is compared with a few lines on the slow and plain second way to choose.
"""

from __future__ import annotations

import naive_sampling as naive
import numpy as np
import pytest
from helpers_core import Fickle, Scripted, random_table, tokenizer_of, with_costs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_decode import PIECES, STOPS

from foretell import Draft, Engine, ForetellError, SamplingParams
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, Ngram, PromptLookup, Recycling, Suffix

DRAFTERS = {
    "the target itself": lambda target, seed: DraftModel(target),
    "another model": lambda target, seed: DraftModel(random_table(target.vocab_size, 1, seed)),
    "a model of fewer tokens": lambda target, seed: DraftModel(
        random_table(target.vocab_size - 1, 1, seed)
    ),
    "a model of more tokens": lambda target, seed: DraftModel(
        random_table(target.vocab_size + 2, 1, seed), target.vocab_size
    ),
    "n-grams": lambda target, seed: Ngram(),
    "prompt lookup": lambda target, seed: PromptLookup(),
    "chains": lambda target, seed: Fickle(target, seed, trees=False),
    "trees": lambda target, seed: Fickle(target, seed),
}


@st.composite
def requests(draw):
    """A model, a prompt, and any parameters at all."""

    def maybe(default, strategy):
        return draw(st.just(default) | strategy)

    pieces = draw(st.permutations(PIECES))[: draw(st.integers(3, 6))]
    ids = st.integers(0, len(pieces) - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    model = random_table(
        len(pieces),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 10**6)),
        max_length=len(prompt) + draw(st.integers(8, 40)),
        eos_token_ids=draw(st.lists(ids, max_size=1)),
    )
    model.table *= draw(st.sampled_from([1, 4]))
    biases = st.floats(-3, 3) | st.just(float("-inf"))
    options = {
        "temperature": draw(st.sampled_from([0, 1e-6, 0.5, 1.0, 2.0, 100.0])),
        "top_p": maybe(1.0, st.sampled_from([0.0, 0.3, 0.9])),
        "top_k": maybe(0, st.sampled_from([1, 2, 100])),
        "min_p": maybe(0.0, st.sampled_from([0.1, 0.5])),
        "repetition_penalty": maybe(1.0, st.sampled_from([0.7, 1.2, 2.0])),
        "presence_penalty": maybe(0.0, st.floats(-2, 2)),
        "frequency_penalty": maybe(0.0, st.floats(-2, 2)),
        "logit_bias": maybe({}, st.dictionaries(ids, biases, max_size=2)),
        "min_tokens": maybe(0, st.integers(1, 6)),
        "max_tokens": draw(st.integers(6, 45)),
        "stop": tuple(draw(st.lists(st.sampled_from(STOPS), max_size=2))),
        "stop_token_ids": maybe([], st.lists(ids, max_size=1)),
        "ignore_eos": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "n": maybe(1, st.integers(2, 3)),
        "logprobs": maybe(None, st.integers(0, 3)),
    }
    return model, pieces, prompt, options


def outcome(engine, prompt, options, **more):
    """Everything that speculation must not change, an error included; and the statistics."""
    engine.model.sessions.clear()
    try:
        result = engine.generate(prompt, **options, **more)
    except ForetellError as error:
        return type(error), str(error)
    return [
        (c.token_ids, c.text, c.finish_reason, c.seed, c.logprobs) for c in result.completions
    ], engine.model.sessions[0].tokens


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(deadline=None, max_examples=80)
@given(requests(), st.sampled_from([1, 2, 5, 16, "auto"]), st.integers(0, 99))
def test_speculation_changes_nothing(kind, request_, num_draft_tokens, seed):
    model, pieces, prompt, options = request_
    drafters = [DRAFTERS[kind](model, seed), Suffix(), Recycling(k=2)]
    engine = with_costs(Engine(model, drafters=drafters, tokenizer=tokenizer_of(pieces)), 1.0, 0.1)
    plain = outcome(engine, prompt, options, num_draft_tokens=0)
    assert outcome(engine, prompt, options, num_draft_tokens=num_draft_tokens) == plain


@settings(deadline=None, max_examples=200)
@given(requests())
def test_plain_decoding_is_what_the_documentation_says(request_):
    model, pieces, prompt, options = request_
    options = {**options, "n": 1, "stop": (), "top_p": 1.0}
    params = SamplingParams(**options)
    tokens = list(prompt)
    engine = Engine(model, drafters=[], tokenizer=tokenizer_of(pieces))
    try:
        result = engine.generate(prompt, **options)
    except ForetellError:
        assume(False)
    for token in result.token_ids:
        row = model.table[tuple([0] * model.order + tokens)[-model.order :]]
        processed = naive.processed(row.tolist(), tokens, params, len(prompt), model.eos_token_ids)
        assert token == naive.choose(processed, params, options["seed"], len(tokens))
        tokens.append(token)


@settings(deadline=None, max_examples=60)
@given(requests(), st.sampled_from(["rejection", "block"]), st.sampled_from(["n-grams", "chains"]))
def test_other_rules_keep_every_other_promise(request_, rule, kind):
    model, pieces, prompt, options = request_
    engine = Engine(model, drafters=[DRAFTERS[kind](model, 1)], tokenizer=tokenizer_of(pieces))
    got = outcome(engine, prompt, options, verification=rule)
    if isinstance(got[0], list):
        assert outcome(engine, prompt, options, verification=rule) == got
        for tokens, _, reason, _, _ in got[0]:
            assert len(tokens) <= options["max_tokens"]
            ended = reason == "stop" and not options["stop"]
            ends = {*options["stop_token_ids"]}
            ends |= set() if options["ignore_eos"] else {*model.eos_token_ids}
            assert not ends & set(tokens[:-1])
            assert not ended or tokens[-1] in ends
            banned = [t for t, bias in options["logit_bias"].items() if bias == float("-inf")]
            assert not set(banned) & set(tokens)
        first = got[0][0][0]
        assert got[1] == [*prompt, *first][: len(got[1])]
        assert len(got[1]) == len(prompt) + len(first) - 1


def test_penalties_count_every_token_of_a_block():
    model = TableModel(np.tile(np.array([3, 2.9, 2.8, 0], np.float32), (4, 1)))
    right = {3: (0, 1, 2), 0: (1, 2, 0), 1: (2, 0, 1), 2: (0, 1, 2)}
    engine = Engine(model, drafters=[Scripted(lambda c, n: Draft.one_hot(right[c[-1]][:n]))])
    result = engine.generate([3], frequency_penalty=1, num_draft_tokens=4, max_tokens=7)
    assert result.token_ids == [0, 1, 2, 0, 1, 2, 0]
    assert result.stats.num_accepted_tokens > 3


def test_nan_behind_the_end_is_no_error():
    table = np.eye(5)[[1, 2, 3, 4, 0]].astype(np.float32)
    table[3, 2] = np.nan
    model = TableModel(table, eos_token_ids=[3])
    drafter = Scripted(lambda context, limit: Draft.one_hot((2, 3, 4)[:limit]))
    for temperature in (0, 1e-6):
        for num_draft_tokens in (0, 3):
            result = Engine(model, drafters=[drafter]).generate(
                [0], temperature=temperature, num_draft_tokens=num_draft_tokens
            )
            assert result.token_ids == [1, 2, 3]


def test_a_chat_draws_the_same_with_and_without_speculation():
    from fake_engine import fake_engine

    texts = []
    for num_draft_tokens in (0, 4):
        chat = fake_engine().chat()
        options = {"temperature": 1.5, "seed": 3, "max_tokens": 20}
        texts.append(
            [chat.send(text, num_draft_tokens=num_draft_tokens, **options).text for text in "ab"]
        )
    assert texts[0] == texts[1]
    with pytest.raises(ForetellError, match="n is 2, but a conversation"):
        chat.send("c", n=2)


# --- A real model --------------------------------------------------------------------


def everything(completion):
    return completion.token_ids, completion.text, completion.finish_reason, completion.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3-odd"])
def test_the_cpu_backend_samples_the_same_with_and_without_speculation(family, dtype, tmp_path):
    from families import tiny_checkpoint

    from foretell.backends import cpu

    folder = tiny_checkpoint(tmp_path, family)
    model = cpu.load(folder, dtype=dtype, threads=2)
    other = cpu.load(folder, dtype="bfloat16" if dtype == "float32" else "float32", threads=1)
    prompt = np.random.default_rng(0).integers(model.vocab_size, size=70).tolist()
    options = {
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "n": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "seed": 11,
        "max_tokens": 60,
        "ignore_eos": True,
    }
    plain = Engine(model, drafters=[]).generate(prompt, **options)
    for drafters in (
        [DraftModel(other)],
        [Ngram()],
        [PromptLookup()],
        [Ngram(2), DraftModel(other)],
        [Suffix(), Recycling(), DraftModel(other)],
    ):
        engine = with_costs(Engine(model, drafters=drafters), 1.0, 0.1)
        for num_draft_tokens in (1, 4, 9, "auto"):
            result = engine.generate(prompt, num_draft_tokens=num_draft_tokens, **options)
            for ours, theirs in zip(result.completions, plain.completions, strict=True):
                assert everything(ours) == everything(theirs)
            assert result.prompt_logprobs == plain.prompt_logprobs
    near = Engine(model, drafters=[DraftModel(other)])
    near = near.generate(prompt, num_draft_tokens=4, **options)
    assert near.stats.draft_acceptance_rate > 0.5
