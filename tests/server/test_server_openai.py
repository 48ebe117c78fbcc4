"""The official `openai` client works unchanged, and gets what the engine says."""

from __future__ import annotations

import openai
import pytest

from foretell import Engine, SamplingParams

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

OPTIONS = (
    {"temperature": 0},
    {"seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 11},
    {"seed": 3, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"seed": 4, "logit_bias": {"64": 5, "65": -100}},
    {"seed": 9, "n": 3},
    {"seed": 2, "stop": "e"},
    {"seed": 2, "stop": ["ab", "x", "q"]},
    {"seed": 8, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}},
    {"seed": 8, "extra_body": {"min_tokens": 12, "stop_token_ids": [70], "ignore_eos": True}},
)
# With a negative seed, as the API has them, modulo 2^64.
SEEDS = (-1, 0, 2**63 - 1)


def params(options, **more) -> SamplingParams:
    """The engine's parameters for a client's options."""
    given = {"temperature": 1.0, "max_tokens": 20, **options, **more}
    given.update(given.pop("extra_body", {}))
    given.pop("foretell", None)
    if "logit_bias" in given:
        given["logit_bias"] = {int(key): bias for key, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


def plainly(shared, options, **more):
    """What plain decoding gives, without a server."""
    done = shared.engine.generate(
        messages=MESSAGES, sampling=params(options, **more), num_draft_tokens=0
    )
    return list(done.completions)


REASONS = {"stop": "stop", "length": "length", "context": "length"}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_chat_completion_is_what_plain_decoding_gives(shared, options):
    answer = shared.openai().chat.completions.create(
        model="table", messages=MESSAGES, max_tokens=20, **options
    )
    expected = plainly(shared, options)
    assert [choice.message.content for choice in answer.choices] == [e.text for e in expected]
    assert [choice.finish_reason for choice in answer.choices] == [
        REASONS[e.finish_reason] for e in expected
    ]
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert all(choice.message.role == "assistant" for choice in answer.choices)
    assert answer.usage.prompt_tokens == expected[0].prompt_tokens
    assert answer.usage.completion_tokens == sum(len(e.token_ids) for e in expected)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion"
    assert answer.model == "table"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_stream_holds_the_same_text_as_the_whole(shared, options):
    expected = plainly(shared, options)
    texts, reasons, usage, origins = {}, {}, None, {}
    for chunk in shared.openai().chat.completions.create(
        model="table",
        messages=MESSAGES,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    ):
        assert chunk.object == "chat.completion.chunk"
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            assert choice.index not in reasons, "nothing follows the end of a choice"
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
                assert chunk.foretell["token_ids"] == expected[choice.index].token_ids
            elif chunk.model_extra.get("foretell"):
                origins.setdefault(choice.index, []).extend(
                    (piece["token_id"], piece["origin"]) for piece in chunk.foretell["pieces"]
                )
    assert [texts[index] for index in sorted(texts)] == [e.text for e in expected]
    assert [reasons[index] for index in sorted(reasons)] == [
        REASONS[e.finish_reason] for e in expected
    ]
    assert usage.completion_tokens == sum(len(e.token_ids) for e in expected)
    for index, pieces in origins.items():
        assert [token for token, _ in pieces] == expected[index].token_ids
        assert {origin for _, origin in pieces} <= {"draft", "correction", "bonus", "plain"}


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_are_those_of_the_api(shared, seed):
    answer = shared.openai().chat.completions.create(
        model="table", messages=MESSAGES, max_tokens=9, seed=seed
    )
    [expected] = plainly(shared, {"seed": seed % 2**64}, max_tokens=9)
    assert answer.choices[0].message.content == expected.text


def test_a_drawn_seed_is_told_and_gives_the_same_again(shared):
    create = shared.openai().chat.completions.create
    first = create(model="table", messages=MESSAGES, max_tokens=20)
    seed = first.choices[0].foretell["seed"]
    again = create(model="table", messages=MESSAGES, max_tokens=20, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_chat_logprobs(shared):
    answer = shared.openai().chat.completions.create(
        model="table", messages=MESSAGES, max_tokens=10, seed=1, logprobs=True, top_logprobs=3
    )
    [expected] = plainly(shared, {"seed": 1, "logprobs": 3}, max_tokens=10)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [e.logprob for e in expected.logprobs]
    text = shared.engine.tokenizer.token_text
    for entry, known in zip(content, expected.logprobs, strict=True):
        assert entry.token == text(known.token_id)
        assert bytes(entry.bytes) == shared.engine.tokenizer.token_bytes(known.token_id)
        assert [(t.token, t.logprob) for t in entry.top_logprobs] == [
            (text(token), value) for token, value in known.top
        ]


def test_chat_logprobs_in_a_stream_are_those_of_the_whole(shared):
    create = shared.openai().chat.completions.create
    options = {
        "model": "table",
        "messages": MESSAGES,
        "max_tokens": 20,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = create(**options).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == whole


def test_max_completion_tokens_is_max_tokens(shared):
    answer = shared.openai().chat.completions.create(
        model="table",
        messages=MESSAGES,
        max_completion_tokens=3,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_content_in_parts_and_the_developer_role(shared):
    create = shared.openai().chat.completions.create
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    answers = [
        create(model="table", max_tokens=9, temperature=0, messages=messages)
        for messages in (
            [{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}],
            [{"role": "system", "content": "Be."}, {"role": "user", "content": "Wh\ny?"}],
        )
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", ["abc", [64, 65, 66]], ids=["text", "tokens"])
def test_a_completion(shared, prompt, echo, logprobs):
    answer = shared.openai().completions.create(
        model="table", prompt=prompt, max_tokens=12, seed=6, echo=echo, logprobs=logprobs
    )
    more = {"prompt_logprobs": logprobs} if echo and logprobs is not None else {}
    sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=6, logprobs=logprobs, **more)
    expected = shared.engine.generate(prompt, sampling=sampling, num_draft_tokens=0)
    [choice] = answer.choices
    assert answer.object == "text_completion"
    assert choice.text == ("abc" if echo else "") + expected.text
    if logprobs is None:
        assert choice.logprobs is None
        return
    known = [*(expected.prompt_logprobs or []), *expected.logprobs]
    assert choice.logprobs.token_logprobs == [e and e.logprob for e in known]
    assert "".join(choice.logprobs.tokens).startswith("abc" if echo else "")
    assert len(choice.logprobs.text_offset) == len(known)
    for entry, top in zip(known, choice.logprobs.top_logprobs, strict=True):
        assert (entry is None) == (top is None)
        assert entry is None or set(top.values()) == {
            entry.logprob,
            *(value for _, value in entry.top),
        }


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_is_the_whole(shared, echo):
    create = shared.openai().completions.create
    options = {"model": "table", "prompt": ["abc", "d"], "max_tokens": 12, "seed": 6, "n": 2}
    whole = create(**options, echo=echo)
    texts: dict[int, str] = {}
    for chunk in create(**options, echo=echo, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == 4  # every prompt once


def test_scoring_a_prompt_without_generating(shared):
    answer = shared.openai().completions.create(
        model="table", prompt="abcd", max_tokens=0, echo=True, logprobs=1
    )
    [choice] = answer.choices
    assert choice.text == "abcd"
    assert len(choice.logprobs.tokens) == 4
    assert answer.usage.completion_tokens == 0


def test_models(shared):
    listed = shared.openai().models.list().data
    assert [model.id for model in listed] == ["table"]
    about = shared.openai().models.retrieve("table")
    assert about.foretell["default_drafters"] == ["suffix", "recycling"]
    assert "draft_model" not in about.foretell["drafters"]
    with pytest.raises(openai.NotFoundError) as error:
        shared.openai().models.retrieve("../../etc/passwd")
    assert error.value.code == "model_not_found"


def test_errors_are_the_clients_own(shared):
    create = shared.openai().chat.completions.create
    with pytest.raises(openai.BadRequestError) as error:
        create(model="table", messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        create(model="another", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as error:
        create(model="table", messages=MESSAGES, tools=[])
    assert error.value.param == "tools"
    assert "not supported" in error.value.body["message"]


# --- Speculation ---------------------------------------------------------------------------

SPECULATION = (
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 7},
    {"num_draft_tokens": "auto"},
    {"drafters": ["prompt_lookup"], "num_draft_tokens": 4},
    {"drafters": ["ngram"], "num_draft_tokens": 3},
    {"drafters": ["recycling", "suffix"], "num_draft_tokens": 5},
    {"verification": "match", "steps": True},
)


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 12}], ids=str)
def test_no_way_to_speculate_changes_a_token(shared, speculation, options):
    text = "abc abd abc abe " * 4
    sampling = params(options, max_tokens=40)
    expected = shared.engine.generate(text, sampling=sampling, num_draft_tokens=0)
    answer = shared.openai().completions.create(
        model="table",
        prompt=text,
        max_tokens=40,
        extra_body={"foretell": speculation},
        **options,
    )
    about = answer.choices[0].foretell
    assert about["token_ids"] == expected.token_ids
    stats = answer.usage.completion_tokens_details.foretell
    assert (stats["num_drafts"] == 0) or speculation.get("num_draft_tokens") != 0
    assert sum(stats["acceptance_histogram"]) == stats["num_drafts"]
    assert stats["num_accepted_tokens"] == about["origins"].count("draft")
    assert stats["num_accepted_tokens"] == sum(
        count * tokens for tokens, count in enumerate(stats["acceptance_histogram"])
    )


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_can_be_asked_for(shared, rule):
    answer = shared.openai().completions.create(
        model="table",
        prompt="abcabc",
        max_tokens=20,
        seed=1,
        extra_body={
            "foretell": {"verification": rule, "drafters": ["ngram"], "num_draft_tokens": 3}
        },
    )
    expected = Engine(shared.model, drafters=["ngram"]).generate(
        "abcabc", max_tokens=20, temperature=1.0, seed=1, num_draft_tokens=3, verification=rule
    )
    assert answer.choices[0].foretell["token_ids"] == expected.token_ids


def test_a_stream_of_steps_shows_each_draft_tree(shared):
    drafted, kept, tokens = 0, 0, []
    for chunk in shared.openai().completions.create(
        model="table",
        prompt="abc abd abc abe " * 4,
        max_tokens=40,
        seed=3,
        stream=True,
        extra_body={"foretell": {"steps": True, "num_draft_tokens": 6, "drafters": ["recycling"]}},
    ):
        [choice] = chunk.choices
        about = chunk.foretell
        if choice.finish_reason:
            stats = about["stats"]
            assert about["plain_seconds_per_token"] > 0
            break
        tree, pieces = about["draft"], about["pieces"]
        for index, node in enumerate(tree):
            assert -1 <= node["parent"] < index
            assert not node["kept"] or node["parent"] == -1 or tree[node["parent"]]["kept"]
        assert [n["token_id"] for n in tree if n["kept"]] == [
            piece["token_id"] for piece in pieces if piece["origin"] == "draft"
        ]
        assert (about["step"] == 0) == (not tokens)
        assert about["stats"]["num_steps"] == about["step"]
        assert "".join(piece["text"] for piece in pieces) == choice.text
        drafted += len(tree)
        kept += sum(node["kept"] for node in tree)
        tokens += [piece["token_id"] for piece in pieces]
    assert (drafted, kept) == (stats["num_draft_tokens"], stats["num_accepted_tokens"])
    assert tokens == about["token_ids"]
    assert drafted > kept > 0
