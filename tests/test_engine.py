"""The text API: what it takes, what it refuses, and that requests never meet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers_core import (
    Fickle,
    Scripted,
    chat_tokenizer,
    continuation,
    next_token,
    random_table,
    successor_table,
    tokenizer_of,
)

from foretell import (
    ContextLengthError,
    Draft,
    EmptyPromptError,
    Engine,
    InputError,
    ModelNotFoundError,
    OptionError,
    SamplingParams,
    Tokenizer,
    TokenizerError,
)
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, PromptLookup, Recycling, Suffix


@pytest.fixture
def engine():
    return Engine(random_table(4, 2, seed=3, max_length=50))


# --- Prompts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        [np.int64(1), 2, np.int32(3)],
    ],
    ids=str,
)
def test_prompts_of_ids(engine, prompt):
    result = engine.generate(prompt, max_tokens=5)
    assert result.token_ids == continuation(engine.model, [1, 2, 3], 5)
    assert result.prompt_tokens == 3
    assert all(type(token) is int for token in result.token_ids)


def test_a_generator_is_a_prompt_too(engine):
    assert engine.encode(token for token in [1, 2, 3]) == [1, 2, 3]


def test_the_caller_s_prompt_is_not_changed(engine):
    prompt = [1, 2, 3]
    engine.generate(prompt, max_tokens=5)
    assert prompt == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["", [], (), range(0), np.array([], dtype=int)], ids=repr)
def test_empty_prompts_are_refused(engine, prompt):
    with pytest.raises(EmptyPromptError, match=r"empty|no tokens"):
        engine.stream(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 4], r"holds 4, .*\(0\.\.3\)"),
        ([-1], "holds -1"),
        ([1, 2.0], r"holds 2\.0"),
        ([1, 2.5], r"holds 2\.5"),
        ([True], "holds True"),
        ([1, "2"], "holds '2'"),
        ([1, None], "holds None"),
        (["one", "two"], "holds 'one'"),
        (np.array([1.0, 2.0]), "holds "),
        (np.array([[1, 2]]), "holds "),
        (7, "the prompt is 7; pass text"),
        (b"text", "pass text or a list of token ids"),
        (bytearray(b"text"), "pass text or a list of token ids"),
        ({1, 2}, "pass text or a list of token ids"),
        ({1: 2}, "pass text or a list of token ids"),
        ({1: 2}.keys(), "pass text or a list of token ids"),
    ],
    ids=str,
)
def test_prompts_that_are_none_are_refused(engine, prompt, message):
    with pytest.raises(InputError, match=message):
        engine.stream(prompt)


def test_a_number_too_long_to_show_is_still_refused_in_words(engine):
    with pytest.raises(InputError, match="<int that cannot be shown>, which is not a token id"):
        engine.stream([10**5000])
    with pytest.raises(OptionError, match="seed is <int that cannot be shown>"):
        engine.stream([1], seed=10**5000)


def test_either_a_prompt_or_messages(engine):
    for arguments in ({}, {"prompt": [1], "messages": [{"role": "user", "content": "hi"}]}):
        with pytest.raises(InputError, match="either a prompt or messages"):
            engine.stream(**arguments)


@pytest.mark.parametrize("length", [50, 51, 500])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine, length):
    with pytest.raises(ContextLengthError, match=rf"\b{length} tokens.*\b50\b"):
        engine.stream([1] * length)
    assert engine.generate([1] * 49).finish_reason == "context"


def test_text_needs_a_tokenizer(engine):
    with pytest.raises(TokenizerError, match=r"a text prompt needs .*tokenizer="):
        engine.stream("hello")
    with pytest.raises(TokenizerError, match="messages needs"):
        engine.stream(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(TokenizerError, match="stop needs"):
        engine.stream([1], stop="x")
    assert engine.generate([1], max_tokens=3).text == ""


# --- Options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": -1},
        {"num_draft_tokens": True},
        {"num_draft_tokens": 1.0},
        {"num_draft_tokens": "4"},
        {"num_draft_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_length": 5},
        {"Stop": "x"},
        {"sampling": {"max_tokens": 3}},
    ],
    ids=str,
)
def test_errors_are_raised_by_stream_itself(engine, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        engine.stream([1], **options)
    with pytest.raises(OptionError):
        engine.generate([1], **options)
    assert engine.model.num_passes == 0


def test_sampling_and_options_together(engine):
    params = SamplingParams(max_tokens=3)
    assert len(engine.generate([1], sampling=params).token_ids) == 3
    assert len(engine.generate([1], sampling=params, max_tokens=4).token_ids) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafters": ["prompt-lookup"]}, "unknown drafter 'prompt-lookup'; the drafters are"),
        ({"drafters": [PromptLookup]}, "unknown drafter"),
        ({"drafters": "prompt_lookup"}, r"drafters=\['prompt_lookup'\]"),
        ({"drafters": PromptLookup()}, "use a list"),
        ({"drafters": ["draft_model"]}, r"needs a draft model: pass one \(draft="),
        ({"drafters": ["prompt_lookup"], "draft": random_table(4, 1, 0)}, "not among the drafters"),
    ],
    ids=["name", "class", "string", "object", "no model", "no name"],
)
def test_drafters_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        Engine(random_table(4, 1, 0), **arguments)


@pytest.mark.parametrize("model", [5, None, b"model", "x" * 5000, "\0", "\ud800", []])
def test_what_names_no_model_is_refused(model):
    with pytest.raises((OptionError, ModelNotFoundError), match=r"give a folder|cannot be looked"):
        Engine(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": []}, r"dtype is \[\]"),
        ({"cache_dtype": {}}, r"cache_dtype is \{\}"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
    ],
)
def test_settings_of_another_kind_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        Engine("nowhere", **arguments)


@pytest.mark.parametrize("tokenizer", [5, b"tokenizer.json", [], "x" * 5000])
def test_what_names_no_tokenizer_is_refused(engine, tokenizer):
    with pytest.raises((OptionError, TokenizerError), match=r"give the path|cannot be looked"):
        Engine(engine.model, tokenizer=tokenizer)


def test_the_default_drafters_need_no_training_and_a_draft_model_joins_them():
    target = random_table(4, 1, 0)
    assert [type(d) for d in Engine(target).drafters] == [Suffix, Recycling]
    with_draft = Engine(target, draft=target)
    assert [type(d) for d in with_draft.drafters] == [Suffix, Recycling, DraftModel]
    both = Engine(target, draft=target, drafters=["prompt_lookup", "draft_model"])
    assert [type(d) for d in both.drafters] == [PromptLookup, DraftModel]


# --- Tokenizers ----------------------------------------------------------------------


def test_the_tokenizer_is_the_argument_or_the_model_s(tmp_path):
    model = successor_table([1, 0])
    model.tokenizer = tokenizer_of([b"a", b"b"])
    assert Engine(model).generate([0], max_tokens=3).text == "bab"
    other = tokenizer_of([b"x", b"y"])
    assert Engine(model, tokenizer=other).generate([0], max_tokens=3).text == "yxy"
    other.inner.save(str(tmp_path / "tokenizer.json"))
    from_file = Engine(model, tokenizer=tmp_path / "tokenizer.json")
    assert isinstance(from_file.tokenizer, Tokenizer)
    assert from_file.generate([0], max_tokens=3).text == "yxy"


def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused():
    with pytest.raises(TokenizerError, match=r"ids up to 2, .*only 2 embeddings"):
        Engine(successor_table([1, 0]), tokenizer=tokenizer_of([b"a", b"b", b"c"]))


def test_text_and_messages():
    model = random_table(131, 1, seed=0)
    engine = Engine(model, tokenizer=chat_tokenizer())
    ids = engine.encode("abc")
    assert engine.tokenizer.decode(ids) == "abc"
    result = engine.generate("abc", max_tokens=20)
    assert result.token_ids == continuation(model, ids, 20)
    assert result.text == engine.tokenizer.decode(result.token_ids)
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.encode(messages=messages) == engine.tokenizer.encode(
        rendered, add_special_tokens=False
    )
    assert engine.generate(messages=messages, max_tokens=3).token_ids == continuation(
        model, engine.encode(messages=messages), 3
    )


# --- Streams -------------------------------------------------------------------------


def test_a_stream_is_the_generation_in_pieces():
    engine = Engine(successor_table([1, 2, 0]), tokenizer=tokenizer_of([b"a", b"b", b"c"]))
    events = list(engine.stream([0, 1, 2, 0], num_draft_tokens=4, max_tokens=6))
    result = engine.generate([0, 1, 2, 0], num_draft_tokens=4, max_tokens=6)
    *tokens, last = events
    assert [e.token_id for e in tokens] == result.token_ids == [1, 2, 0, 1, 2, 0]
    assert [e.text for e in tokens] == list("bcabca")
    assert [e.step for e in tokens] == [0, 1, 1, 1, 1, 2]
    assert [e.origin for e in tokens] == result.origins
    assert last.result.text == result.text == "bcabca"
    assert last.finish_reason == "length"
    assert last.token_id is last.origin is None


def test_closing_a_stream_stops_the_generation(engine):
    for tokens in range(1, 5):
        stream = engine.stream([1, 2], num_draft_tokens=1)
        for _ in range(tokens):
            next(stream)
        passes = engine.model.num_passes
        stream.close()
        assert list(stream) == []
        assert engine.model.num_passes == passes
    assert engine.generate([1, 2], max_tokens=9).token_ids == continuation(engine.model, [1, 2], 9)


# --- Requests of one engine ----------------------------------------------------------


def every_drafter():
    target = random_table(4, 2, seed=8)
    return [
        Engine(target, drafters=["prompt_lookup"]),
        Engine(target, draft=random_table(4, 1, seed=9), drafters=["suffix", "draft_model"]),
        Engine(target, drafters=[Fickle(target, 1)]),
        Engine(target, draft=target, drafters=[Fickle(target, 1), "prompt_lookup", "draft_model"]),
    ]


@pytest.mark.parametrize("engine", every_drafter())
def test_interleaved_streams_do_not_influence_each_other(engine):
    prompts = [[1, 2], [3, 3, 3, 3], [0]]
    options = {"num_draft_tokens": 4, "max_tokens": 30}
    alone = [list(engine.stream(prompt, **options)) for prompt in prompts]
    streams = [engine.stream(prompt, **options) for prompt in prompts]
    together = [[] for _ in prompts]
    for turn in range(31):
        for which in (turn % 3, (turn + 1) % 3, (turn + 2) % 3):
            together[which].append(next(streams[which]))
    for one, other in zip(together, alone, strict=True):
        # The same drafts even, so nothing was carried over from one request to another.
        assert [(e.token_id, e.origin, e.step) for e in one] == [
            (e.token_id, e.origin, e.step) for e in other
        ]


@pytest.mark.parametrize("engine", every_drafter())
def test_threads_give_the_results_of_one_thread(engine):
    prompts = [[i % 4, i % 3, i % 2] for i in range(24)]

    def run(prompt):
        result = engine.generate(prompt, num_draft_tokens=4, max_tokens=60)
        return result.token_ids, result.origins

    alone = [run(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, prompts)) == alone


class Failing(Scripted):
    """Fails in one of its methods at the third step, while told to."""

    where = None

    def __init__(self):
        super().__init__(lambda context, limit: Draft.one_hot((0,)))
        self.calls = 0

    def spawn(self):
        if Failing.where == "spawn":
            raise RuntimeError("spawn")
        return Failing()

    def start(self, prompt):
        if Failing.where == "start":
            raise RuntimeError("start")

    def propose(self, context, limit):
        self.calls += 1
        if Failing.where == "propose" and self.calls == 3:
            raise RuntimeError("propose")
        return super().propose(context, limit)

    def observe(self, draft, output, accepted):
        if Failing.where == "observe" and self.calls == 3:
            raise RuntimeError("observe")


@pytest.mark.parametrize("where", ["spawn", "start", "propose", "observe"])
def test_an_exception_in_a_drafter_ends_its_request_alone(engine, monkeypatch, where):
    engine = Engine(engine.model, drafters=[Failing()])
    good = continuation(engine.model, [1, 2], 12)
    other = engine.stream([1, 2], num_draft_tokens=4, max_tokens=12)
    tokens = [next(other).token_id]
    monkeypatch.setattr(Failing, "where", where)
    with pytest.raises(RuntimeError, match=where) as raised:
        engine.generate([1, 2], num_draft_tokens=4, max_tokens=12)
    if where in ("spawn", "propose"):
        assert "drafter 'scripted'" in raised.value.__notes__[0]
    session = engine.model.sessions[-1]
    assert session.tokens == [1, 2, *good][: session.length]
    monkeypatch.setattr(Failing, "where", None)
    tokens += [event.token_id for event in other]
    assert tokens[:-1] == good
    assert engine.generate([1, 2], max_tokens=12).token_ids == good


def test_drafters_see_every_pass():
    seen = []

    class Watching(Scripted):
        def spawn(self):
            return Watching(self.script)

        def start(self, prompt):
            seen.append(("start", list(prompt)))

        def observe(self, draft, output, accepted):
            seen.append((draft.tokens, output.logits.shape, accepted.tokens))

    model = random_table(4, 1, seed=0)
    right = Watching(lambda context, limit: Draft.one_hot((next_token(model, context),)[:limit]))
    engine = Engine(model, drafters=[right])
    tokens = engine.generate([1, 2], num_draft_tokens=4, max_tokens=4).token_ids
    assert tokens == continuation(model, [1, 2], 4)
    assert seen == [
        ("start", [1, 2]),
        ((), (1, 4), (tokens[0],)),
        ((tokens[1],), (2, 4), tuple(tokens[1:3])),
        ((), (1, 4), (tokens[3],)),
    ]


def test_a_table_must_be_square():
    for shape in [(3,), (3, 4), (2, 2, 3)]:
        with pytest.raises(InputError, match="equal axes"):
            TableModel(np.zeros(shape))
