"""A conversation keeps its cache, and answers as if it had kept nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_core import (
    CountingTable,
    Fickle,
    Scripted,
    always_wrong,
    chat_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import (
    Capabilities,
    ContextLengthError,
    Draft,
    EmptyPromptError,
    Engine,
    InputError,
    OptionError,
    SamplingParams,
    Tokenizer,
)
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, PromptLookup

TOKENIZER = chat_tokenizer()
END = 2  # <|im_end|>
LETTERS = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc,.\n"]


def talkative(seed=0, **options) -> CountingTable:
    """A model that babbles letters, and now and then ends its turn."""
    rng = np.random.default_rng(seed)
    table = np.zeros((131, 131), dtype=np.float32)
    table[:, LETTERS] = rng.normal(size=(131, len(LETTERS)))
    table[:, END] = rng.normal(size=131) - 0.5
    return CountingTable(table, eos_token_ids=[END], **options)


DRAFTERS = {
    "the target itself": lambda model: DraftModel(model),
    "another model": lambda model: DraftModel(talkative(seed=99)),
    "a model that is always wrong": lambda model: DraftModel(always_wrong(model)),
    "prompt lookup": lambda model: PromptLookup(),
    "trees": lambda model: Fickle(model, 3),
}


def fresh(model, messages, **options):
    """The same conversation in a new session, without speculation."""
    engine = Engine(model, drafters=[], tokenizer=TOKENIZER)
    return engine.generate(messages=messages, num_draft_tokens=0, **options)


def check_cache(chat, messages, result):
    """The cache holds the turn's prompt and answer, all but the last token."""
    prompt = chat.engine.encode(messages=messages)
    assert chat.session.tokens == [*prompt, *result.token_ids[:-1]]


turns = st.lists(
    st.tuples(
        st.text("abc \n", min_size=1, max_size=8),
        st.integers(1, 12),
        st.lists(st.sampled_from(["a", "bb", "ab", ",", "\n\n", ".c"]), max_size=2).map(tuple),
        st.sampled_from([0, 1, 2, 5, 16]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.none() | st.just("be brief"), turns)
def test_every_turn_equals_a_fresh_plain_conversation(kind, seed, system, turns):
    model = talkative(seed)
    chat = Engine(model, drafters=[DRAFTERS[kind](model)], tokenizer=TOKENIZER).chat(system)
    plain = Engine(model, drafters=[], tokenizer=TOKENIZER).chat(system)
    for text, max_tokens, stop, num_draft_tokens in turns:
        options = {"max_tokens": max_tokens, "stop": stop}
        messages = [*chat.messages, {"role": "user", "content": text}]
        expected = fresh(model, messages, **options)
        for one, n in ((chat, num_draft_tokens), (plain, 0)):
            result = one.send(text, num_draft_tokens=n, **options)
            assert result.token_ids == expected.token_ids
            assert result.text == expected.text
            assert result.finish_reason is expected.finish_reason
            assert result.prompt_tokens == expected.prompt_tokens
            assert one.messages == [*messages, {"role": "assistant", "content": result.text}]
            check_cache(one, messages, result)


def conversation(**options):
    model = talkative(**options)
    return Engine(model, drafters=[Fickle(model, 3)], tokenizer=TOKENIZER).chat()


def check_next_turn(chat, text="b"):
    """The next turn is what it would be in a fresh session."""
    messages = [*chat.messages, {"role": "user", "content": text}]
    expected = fresh(chat.engine.model, messages, max_tokens=9)
    result = chat.send(text, max_tokens=9)
    assert result.token_ids == expected.token_ids
    check_cache(chat, messages, result)
    assert chat.messages[-2:] == [
        {"role": "user", "content": text},
        {"role": "assistant", "content": expected.text},
    ]


def test_a_turn_runs_no_more_than_what_is_new():
    chat = conversation()
    chat.send("a" * 40, max_tokens=9)
    before, cached = chat.engine.model.num_rows, chat.session.length
    result = chat.send("b", max_tokens=9, num_draft_tokens=0)
    rows = chat.engine.model.num_rows - before
    assert rows <= (result.prompt_tokens - cached) + 1 + len(result.token_ids)
    assert cached > 40


def test_messages_begin_with_the_system_prompt():
    chat = conversation().engine.chat("be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    chat.send("a", max_tokens=3)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]


def test_a_turn_that_was_closed_does_not_count():
    chat = conversation()
    chat.send("a", max_tokens=9)
    messages = list(chat.messages)
    for tokens in range(4):
        stream = chat.stream("c" * (tokens + 1), max_tokens=30)
        for _ in range(tokens):
            next(stream)
        stream.close()
        assert chat.messages == messages
    check_next_turn(chat)


def test_a_turn_that_still_runs_is_closed_by_the_next():
    chat = conversation()
    chat.send("a", max_tokens=9)
    messages = list(chat.messages)
    for tokens in range(4):
        old = chat.stream("c", max_tokens=30)
        for _ in range(tokens):
            next(old)
        new = chat.stream("b", max_tokens=9)
        assert list(old) == []
        expected = fresh(
            chat.engine.model, [*messages, {"role": "user", "content": "b"}], max_tokens=9
        )
        assert [e.token_id for e in new][:-1] == expected.token_ids
        chat.messages = list(messages)


def test_a_cancelled_turn_counts_with_what_was_said():
    for looks in range(1, 6):
        chat = conversation()
        chat.send("a", max_tokens=9)
        count = itertools.count(1)
        result = chat.send(
            "c", is_cancelled=lambda count=count, looks=looks: next(count) >= looks, max_tokens=30
        )
        if result.finish_reason == "cancelled":
            assert chat.messages[-1] == {"role": "assistant", "content": result.text}
        check_next_turn(chat)


@pytest.mark.parametrize("where", ["propose", "observe"])
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_after_an_exception_in_a_turn_the_next_one_is_right(where, step):
    model = talkative()
    right = Fickle(model, 3)
    fails = [False]

    class Failing(Scripted):
        def __init__(self):
            super().__init__(lambda context, limit: Draft.empty())
            self.right, self.calls = right.spawn(), 0

        def spawn(self):
            return Failing()

        def propose(self, context, limit):
            self.calls += 1
            if fails[0] and where == "propose" and self.calls > step:
                raise RuntimeError(where)
            return self.right.propose(context, limit)

        def observe(self, draft, output, accepted):
            if fails[0] and where == "observe" and self.calls >= step:
                raise RuntimeError(where)

    chat = Engine(model, drafters=[Failing()], tokenizer=TOKENIZER).chat()
    chat.send("a", max_tokens=9, ignore_eos=True)
    messages = list(chat.messages)
    fails[0] = True
    with pytest.raises(RuntimeError, match=where):
        chat.send("c", num_draft_tokens=4, max_tokens=30, ignore_eos=True)
    fails[0] = False
    assert chat.messages == messages
    check_next_turn(chat, "c")


def test_a_refused_turn_changes_nothing():
    chat = conversation(max_length=200)
    chat.send("a", max_tokens=9)
    messages, cached = list(chat.messages), chat.session.length
    for error, text, options in [
        (EmptyPromptError, "", {}),
        (OptionError, "b", {"max_tokens": 0}),
        (OptionError, "b", {"num_draft_tokens": -1}),
        (OptionError, "b", {"colour": "red"}),
        (ContextLengthError, "b" * 500, {}),
    ]:
        with pytest.raises(error):
            chat.stream(text, **options)
        assert chat.messages == messages
    assert chat.session.length <= cached
    check_next_turn(chat)


def test_options_of_a_turn_are_those_of_generate():
    chat = conversation()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(chat.send("a", sampling=params).token_ids) == 3
    assert len(chat.send("a", sampling=params, max_tokens=2).token_ids) == 2


def test_the_context_fills_up_and_says_so():
    chat = conversation(max_length=60)
    result = chat.send("a", ignore_eos=True, max_tokens=None)
    assert result.finish_reason == "context"
    assert result.prompt_tokens + len(result.token_ids) == 60
    with pytest.raises(ContextLengthError, match=r"\b60\b.*shorten the prompt"):
        chat.stream("b")


def test_edited_messages_are_read_again_from_where_they_differ():
    chat = conversation()
    chat.send("aaaa", max_tokens=9)
    chat.send("bbbb", max_tokens=9)
    chat.messages[2:] = []
    check_next_turn(chat)
    chat.messages.clear()
    check_next_turn(chat)


def test_a_model_without_rollback_can_hold_a_conversation():
    table = talkative().table
    model = TableModel(table, eos_token_ids=[END], capabilities=Capabilities(rollback=False))
    chat = Engine(model, drafters=[], tokenizer=TOKENIZER).chat()
    for text in ("a", "b", "c"):
        messages = [*chat.messages, {"role": "user", "content": text}]
        expected = fresh(model, messages, max_tokens=9)
        assert chat.send(text, max_tokens=9).token_ids == expected.token_ids


def test_a_model_without_a_chat_template_cannot():
    engine = Engine(talkative(), tokenizer=Tokenizer(TOKENIZER.inner))
    with pytest.raises(InputError, match="no chat template"):
        engine.chat().stream("a")
