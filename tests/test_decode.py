"""Speculation changes nothing: tokens, reason, text and cache are those of plain decoding.

Plain decoding itself is compared with a few lines that know neither the package's loop nor its
stop conditions.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools

import numpy as np
import pytest
from helpers_core import (
    CountingTable,
    Fickle,
    GivenCosts,
    Scripted,
    always_wrong,
    check_stats,
    continuation,
    next_token,
    outcome,
    random_table,
    successor_table,
    tokenizer_of,
    with_costs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import (
    Capabilities,
    CapabilityError,
    CorruptModelError,
    Draft,
    Engine,
    ForetellError,
    _decode,
)
from foretell._auto_policy import AutoPolicy, Experience
from foretell._decode import Request
from foretell._draft import Context
from foretell._policy import FixedPolicy
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._sampling import RequestSampler, SamplingParams
from foretell._stop import StopConditions
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, PromptLookup, Recycling, Suffix

PIECES = (b"a", b"b", b"ab", b"aab", b" c", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"b\xe2")
STOPS = ("a", "b", "aa", "ab", "ba", "aab", "aaab", "bab", " ca", "é", "€", "\ufffd", "b\ufffd")

DRAFTERS = {
    "the target itself": lambda target, seed: DraftModel(target),
    "another model": lambda target, seed: DraftModel(
        random_table(target.vocab_size, 1, seed, max_length=target.max_length)
    ),
    "a model that is always wrong": lambda target, seed: DraftModel(always_wrong(target)),
    "a model with a short context": lambda target, seed: DraftModel(
        TableModel(target.table, max_length=6)
    ),
    "a model of fewer tokens": lambda target, seed: DraftModel(
        random_table(target.vocab_size - 1, 1, seed)
    ),
    "prompt lookup": lambda target, seed: PromptLookup(),
    "suffix": lambda target, seed: Suffix(),
    "recycling": lambda target, seed: Recycling(k=2),
    "chains": lambda target, seed: Fickle(target, seed, trees=False),
    "trees": lambda target, seed: Fickle(target, seed),
    "nothing": lambda target, seed: Scripted(lambda context, limit: Draft.empty()),
}


@st.composite
def requests(draw):
    """A model, a prompt and options, small enough for drafts and stops to hit often."""
    pieces = draw(st.permutations(PIECES))[: draw(st.integers(3, 6))]
    vocab_size = len(pieces)
    ids = st.integers(0, vocab_size - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    model = random_table(
        vocab_size,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 10**6)),
        max_length=len(prompt) + draw(st.integers(1, 40)),
        eos_token_ids=draw(st.lists(ids, max_size=2) if draw(st.booleans()) else st.just([])),
    )
    options = {
        "max_tokens": draw(st.none() | st.integers(1, 45)),
        "stop": tuple(draw(st.lists(st.sampled_from(STOPS), max_size=3))),
        "stop_token_ids": draw(st.just([]) | st.lists(ids, max_size=1)),
        "ignore_eos": draw(st.booleans()),
    }
    return model, pieces, prompt, options


def cut_at_first_completed(text, stops):
    """The text before the stop string that is complete first; the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def expected(model, pieces, prompt, *, max_tokens, stop, stop_token_ids, ignore_eos):
    """Plain decoding and every stop condition, written once more from the documentation."""
    tokens, raw = [], b""
    while True:
        token = next_token(model, [*prompt, *tokens])
        tokens.append(token)
        is_eos = not ignore_eos and token in model.eos_token_ids
        raw += b"" if is_eos else pieces[token]
        if is_eos or token in stop_token_ids:
            reason = "stop"
        elif len(tokens) == max_tokens:
            reason = "length"
        elif len(prompt) + len(tokens) == model.max_length:
            reason = "context"
        else:
            reason = None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, hit = cut_at_first_completed(decoder.decode(raw, final=reason is not None), stop)
        if hit or reason:
            return tokens, "stop" if hit else reason, text, [*prompt, *tokens[:-1]]


@settings(deadline=None, max_examples=400)
@given(requests())
def test_plain_decoding_is_what_the_documentation_says(request_):
    model, pieces, prompt, options = request_
    engine = Engine(model, drafters=[], tokenizer=tokenizer_of(pieces))
    assert outcome(engine, prompt, **options) == expected(model, pieces, prompt, **options)


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(deadline=None, max_examples=120)
@given(requests(), st.sampled_from([0, 1, 2, 5, 16, "auto"]), st.integers(0, 99))
def test_speculation_changes_nothing(kind, request_, num_draft_tokens, seed):
    model, pieces, prompt, options = request_
    drafter = DRAFTERS[kind](model, seed)
    engine = with_costs(Engine(model, drafters=[drafter], tokenizer=tokenizer_of(pieces)))
    plain = outcome(engine, prompt, num_draft_tokens=0, **options)
    assert plain == expected(model, pieces, prompt, **options)
    for _ in range(2):  # the second request meets what the first one left behind
        assert outcome(engine, prompt, num_draft_tokens=num_draft_tokens, **options) == plain


@settings(deadline=None, max_examples=150)
@given(requests(), st.lists(st.sampled_from(list(DRAFTERS)), min_size=2, max_size=4), st.data())
def test_several_drafters_change_nothing(request_, kinds, data):
    model, pieces, prompt, options = request_
    drafters = [DRAFTERS[kind](model, seed) for seed, kind in enumerate(kinds)]
    engine = Engine(model, drafters=drafters, tokenizer=tokenizer_of(pieces))
    n = data.draw(st.sampled_from([1, 2, 5, 16, "auto"]))
    if data.draw(st.booleans()):  # else by the times that the table really takes
        more = data.draw(st.sampled_from([0.0, 0.1, 0.5, 2.0]))
        with_costs(engine, data.draw(st.sampled_from([1e-6, 1.0])), more)
    plain = outcome(engine, prompt, num_draft_tokens=0, **options)
    assert outcome(engine, prompt, num_draft_tokens=n, **options) == plain


@settings(deadline=None, max_examples=60)
@given(requests(), st.integers(1, 4))
def test_chunks_of_the_prompt_change_nothing(request_, chunk):
    model, pieces, prompt, options = request_
    engine = Engine(model, drafters=[Fickle(model, 0)], tokenizer=tokenizer_of(pieces))
    whole = outcome(engine, prompt, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_decode, "PREFILL_CHUNK", chunk)
        assert outcome(engine, prompt, **options) == whole


# --- Several requests in one pass ----------------------------------------------------


def make_request(
    model, prompt, drafters, *, num_draft_tokens=4, max_tokens=20, cancelled=None, experience=None
):
    stops = StopConditions(
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=(),
        stop_strings=(),
        max_tokens=max_tokens,
        max_context_tokens=model.max_length - len(prompt),
        decoder=None,
    )
    if experience is None:
        policy = FixedPolicy(model, drafters, num_draft_tokens)
    else:
        policy = AutoPolicy(model, drafters, experience)
    is_cancelled = cancelled or (lambda: False)
    sampler = RequestSampler(SamplingParams())
    return Request(model.new_session(), list(prompt), sampler, policy, stops, is_cancelled)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=6),
            st.sampled_from(list(DRAFTERS)),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_requests_that_share_their_passes_equal_their_single_runs(seed, parts, auto):
    model = random_table(4, 2, seed, eos_token_ids=[3])
    experience = Experience(costs=GivenCosts(1.0, 0.1)) if auto else None

    def make(part):
        prompt, kind, max_tokens = part
        drafters = [DRAFTERS[kind](model, seed), *([Suffix(), Recycling(k=2)] if auto else [])]
        return make_request(model, prompt, drafters, max_tokens=max_tokens, experience=experience)

    together = [make(part) for part in parts]
    for request in together:
        _decode.prefill(model, [request])
    while running := [r for r in together if r.finish is None]:
        before = model.num_passes
        emitted = _decode.step(model, running)
        assert len(emitted) == len(running)
        if all(
            not isinstance(drafter, DraftModel) for r in running for drafter in r.policy.drafters
        ):
            assert model.num_passes == before + 1
    for part, request in zip(parts, together, strict=True):
        plain = make_request(model, part[0], [], max_tokens=part[2])
        for alone in (make(part), plain):
            for _ in _decode.decode(model, [alone]):
                pass
            assert request.tokens == alone.tokens
            assert request.finish is alone.finish
            assert np.array_equal(request.session.keys_values(), alone.session.keys_values())


# --- Cancelling ----------------------------------------------------------------------


def after(calls):
    """A cancel flag that is set from its ``calls``-th look on."""
    looks = itertools.count(1)
    return lambda: next(looks) >= calls


@pytest.mark.parametrize("calls", range(1, 8))
def test_a_cancelled_generation_is_a_prefix(calls, monkeypatch):
    monkeypatch.setattr(_decode, "PREFILL_CHUNK", 2)
    model = random_table(4, 2, seed=5)
    prompt = [1, 2, 3, 0, 1]
    engine = Engine(model, drafters=[Fickle(model, 1)])
    whole = engine.generate(prompt, max_tokens=30, num_draft_tokens=0).token_ids
    model.sessions.clear()
    events = list(engine.stream(prompt, max_tokens=30, is_cancelled=after(calls)))
    result = events[-1].result
    check_stats(result)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == whole[: len(result.token_ids)]
    assert (result.token_ids == []) == (calls <= 3)  # two looks between chunks, one at the end
    # The cache is that of some prefix, and of everything emitted once there was something.
    cached = model.sessions[0].tokens
    assert cached == [*prompt, *result.token_ids][: len(cached)]
    if result.token_ids:
        assert len(cached) == len(prompt) + len(result.token_ids)


def test_cancelling_plain_decoding_needs_no_rollback():
    table = random_table(4, 2, seed=5).table
    model = TableModel(table, capabilities=Capabilities(rollback=False, tree=False))
    events = list(Engine(model).stream([1, 2], num_draft_tokens=0, is_cancelled=after(4)))
    assert events[-1].finish_reason == "cancelled"
    assert len(events[-1].result.token_ids) == 3


def test_text_held_back_is_given_out_when_cancelled():
    model = successor_table([1, 0])
    engine = Engine(model, tokenizer=tokenizer_of([b"a", b"b"]))
    events = list(engine.stream([1], stop="aba!", num_draft_tokens=0, is_cancelled=after(4)))
    assert [e.text for e in events] == ["", "", "", "aba"]
    assert events[-1].result.text == "aba"


# --- Damaged models, missing capabilities --------------------------------------------


def table_with_nan_after(token):
    table = np.eye(5)[[1, 2, 3, 4, 0]].astype(np.float32)
    table[token, 2] = np.nan
    return TableModel(table)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_nan_logits_are_an_error_that_names_the_position(num_draft_tokens):
    model = table_with_nan_after(3)
    engine = Engine(model, drafters=[DraftModel(TableModel(np.eye(5)[[1, 2, 3, 4, 0]]))])
    with pytest.raises(CorruptModelError, match=r"NaN.* position 4\b"):
        engine.generate([0, 1], num_draft_tokens=num_draft_tokens)
    with pytest.raises(CorruptModelError, match=r"NaN.* position 1\b"):
        engine.generate([3], num_draft_tokens=num_draft_tokens)


def test_nan_in_a_rejected_branch_does_not_matter():
    model = table_with_nan_after(4)  # never reached: 0 1 2 3 is all there is room for
    engine = Engine(model, drafters=[Scripted(lambda context, limit: Draft.one_hot((4,)))])
    assert engine.generate([0], max_tokens=3).token_ids == [1, 2, 3]


def test_infinite_logits_are_no_error():
    table = np.full((2, 2), -np.inf, dtype=np.float32)
    table[0, 1] = np.inf
    table[1, 0] = -1e38
    assert Engine(TableModel(table)).generate([0], max_tokens=3).token_ids == [1, 0, 1]


def test_a_row_without_any_token_is_an_error_that_names_the_position():
    table = np.zeros((2, 2), dtype=np.float32)
    table[0] = -np.inf
    with pytest.raises(CorruptModelError, match="-inf for every token at position 2"):
        Engine(TableModel(table)).generate([1], max_tokens=3)


def test_a_model_without_rollback_is_refused_before_the_first_token():
    model = TableModel(random_table(3, 1, 0).table, capabilities=Capabilities(rollback=False))
    engine = Engine(model, drafters=["prompt_lookup"])
    with pytest.raises(CapabilityError, match=r"rollback.*num_draft_tokens=0"):
        engine.stream([0, 1])
    assert len(engine.generate([0, 1], num_draft_tokens=0, max_tokens=5).token_ids) == 5
    assert model.num_passes == 5
    without_drafters = Engine(model, drafters=[])
    assert len(without_drafters.generate([0, 1], max_tokens=5).token_ids) == 5


def test_a_draft_model_without_rollback_is_refused_by_the_engine():
    draft = TableModel(random_table(3, 1, 0).table, capabilities=Capabilities(rollback=False))
    with pytest.raises(CapabilityError, match="rollback"):
        Engine(random_table(3, 1, 0), draft=draft)


@pytest.mark.parametrize("seed", range(5))
def test_a_model_without_trees_gets_the_first_branch(seed):
    target = random_table(4, 2, seed)
    model = TableModel(target.table, capabilities=Capabilities(tree=False))
    engine = Engine(model, drafters=[Fickle(target, seed)])
    plain = engine.generate([1, 2], num_draft_tokens=0, max_tokens=40)
    speculative = engine.generate([1, 2], num_draft_tokens=8, max_tokens=40)
    assert speculative.token_ids == plain.token_ids
    assert speculative.stats.num_accepted_tokens > 0


# --- Drafters that misbehave ---------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.one_hot((1,) * 5), "5 tokens where 3 were allowed"),
        (Draft.one_hot((1, 4)), r"outside 0\.\.3"),
        (Draft.one_hot((-1,)), r"outside 0\.\.3"),
    ],
)
def test_an_impossible_draft_is_an_error_and_the_engine_lives_on(draft, message):
    model = random_table(4, 2, seed=3)
    bad = [False]
    good = continuation(model, [0, 1], 10)
    engine = Engine(
        model, drafters=[Scripted(lambda context, limit: draft if bad[0] else Draft.one_hot((0,)))]
    )
    stream = engine.stream([0, 1], num_draft_tokens=3, max_tokens=10)
    tokens = [next(stream).token_id, next(stream).token_id]
    session = model.sessions[-1]
    bad[0] = True
    with pytest.raises(ForetellError, match=f"'scripted' proposed.*{message}"):
        tokens.extend(event.token_id for event in stream)
    assert tokens == good[: len(tokens)]
    assert session.tokens == [0, 1, *tokens][: session.length]
    bad[0] = False
    assert engine.generate([0, 1], max_tokens=10).token_ids == good


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (lambda: None, "'scripted' proposed None; it must return a Draft"),
        (lambda: [1], r"'scripted' proposed \[1\]; it must return a Draft"),
        (lambda: Draft.one_hot(5), "'scripted' proposed no valid draft: a draft's tokens are 5"),
        (lambda: Draft.one_hot(["a"]), "'scripted'.*tokens hold 'a', which is no whole number"),
        (lambda: Draft.one_hot([1.0]), r"'scripted'.*tokens hold 1\.0"),
        (lambda: Draft.one_hot([True]), "'scripted'.*tokens hold True"),
        (lambda: Draft.one_hot([10**5000]), "'scripted' proposed a token id outside"),
        (lambda: Draft.one_hot([1, 2], [-1, 0, 0.5]), r"'scripted'.*parents hold 0\.5"),
        (lambda: Draft.one_hot([1, 2], [-1, 0, None]), "'scripted'.*parents hold None"),
        (lambda: Draft.one_hot([1], None, ["a"]), r"'scripted'.*probability.*\('a',\)"),
        (lambda: Draft.one_hot([1], None, [float("nan")]), r"'scripted'.*probability.*nan"),
        (lambda: Draft.sampled([1], [["a"]]), "'scripted'.*q holds no rows"),
        (lambda: Draft((1,), q=[[1.0]]), "'scripted'.*must be an array"),
    ],
)
def test_what_is_no_draft_is_an_error_that_names_the_drafter(propose, message):
    model = random_table(4, 2, seed=3)
    engine = Engine(model, drafters=[Scripted(lambda context, limit: propose())])
    with pytest.raises(ForetellError, match=message):
        engine.generate([0, 1], num_draft_tokens=4, max_tokens=10)
    assert model.sessions[-1].tokens == [0, 1]


@pytest.mark.parametrize(
    "suggest",
    [
        lambda: None,
        lambda: Draft.empty(),
        lambda: Proposal((1,), None, ("a",), ("kind",)),
        lambda: Proposal((1,), (-1, 0.0), (0.5,), ("kind",)),
        lambda: Proposal((True,), None, (0.5,), ("kind",)),
        lambda: Proposal((1,), None, (0.5,), (None,)),
    ],
)
def test_evidence_that_is_none_is_an_error_that_names_the_drafter(suggest):
    class Guess(EvidenceDrafter):
        def spawn(self):
            return self

        def suggest(self, context, limit):
            return suggest()

    engine = with_costs(Engine(random_table(4, 2, seed=3), drafters=[Guess()]))
    for n in (4, "auto"):
        with pytest.raises(ForetellError, match="drafter 'Guess' proposed"):
            engine.generate([0, 1], num_draft_tokens=n, max_tokens=10)


def test_a_drafter_that_spawns_none_is_an_error_that_names_it():
    class Barren(Scripted):
        name = "barren"

        def spawn(self):
            return None

    engine = Engine(random_table(4, 2, seed=3), drafters=[Barren(None)])
    with pytest.raises(ForetellError, match="'barren' spawned None, which is no Drafter"):
        engine.generate([0, 1], max_tokens=10)


MEDDLING = (
    lambda tokens: tokens.append(2),
    lambda tokens: tokens.clear(),
    lambda tokens: tokens.sort(),
    lambda tokens: tokens.__setitem__(0, 2),
    lambda tokens: tokens.__delitem__(-1),
    lambda tokens: tokens.__iadd__([2]),
    lambda tokens: tokens[:].append(2),
    lambda tokens: np.asarray(tokens).fill(2),
)


@pytest.mark.parametrize("meddle", MEDDLING)
def test_a_drafter_cannot_change_what_it_is_shown(meddle):
    """Neither the tokens, nor the logits: of its own request and of those beside it."""

    class Meddler(Scripted):
        def spawn(self):
            return Meddler(self.script)

        def start(self, prompt):
            self.meddle_with(prompt)

        def propose(self, context, limit):
            self.meddle_with(context)
            return Draft.one_hot((context[-1],))

        def observe(self, draft, output, accepted):
            with pytest.raises(ValueError, match="read-only"):
                output.logits[:] = 0.0

        def meddle_with(self, tokens):
            with contextlib.suppress(AttributeError):
                meddle(tokens)

    options = {"max_tokens": 10, "n": 3, "temperature": 1.0, "seed": 1, "logprobs": 2}
    engine = Engine(random_table(4, 2, seed=3), drafters=[Meddler(None)])
    plain = engine.generate([0, 1], num_draft_tokens=0, **options)
    drafted = engine.generate([0, 1], num_draft_tokens=4, **options)
    for one, other in zip(plain.completions, drafted.completions, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_a_context_reads_like_a_list():
    tokens = [5, 6, 7, 6]
    context = Context(tokens)
    tokens.append(8)
    assert (len(context), context[-1], context[1:3], context[::-1]) == (5, 8, [6, 7], tokens[::-1])
    assert (list(context), list(reversed(context))) == (tokens, tokens[::-1])
    assert (context.index(7), context.count(6), 8 in context, 9 in context) == (2, 2, True, False)
    assert context == tokens
    assert context == Context([5, 6, 7, 6, 8])
    assert context != [5]
    assert context != 5
    assert np.asarray(context).tolist() == tokens
    assert np.asarray(context, np.int32).dtype == np.int32
    assert repr(context) == "Context([5, 6, 7, 6, 8])"


def test_a_drafter_is_never_asked_for_more_than_there_is_room_for():
    limits = []

    def script(context, limit):
        limits.append((len(context), limit))
        return Draft.empty()

    model = random_table(4, 2, seed=3, max_length=12)
    engine = Engine(model, drafters=[Scripted(script)])
    engine.generate([0, 1], num_draft_tokens=4, max_tokens=None)
    # 9 more tokens fit after the first, of which the target itself gives the last of a block.
    assert limits == [(3, 4), (4, 4), (5, 4), (6, 4), (7, 4), (8, 3), (9, 2), (10, 1)]
    limits.clear()
    engine.generate([0, 1], num_draft_tokens=4, max_tokens=4)
    assert limits == [(3, 2), (4, 1)]


def test_one_token_takes_one_pass():
    model = CountingTable(random_table(4, 2, seed=3).table)
    result = Engine(model).generate([0, 1, 2], max_tokens=1)
    assert result.finish_reason == "length"
    assert result.origins == ["plain"]
    assert (model.num_passes, model.num_rows, result.stats.num_steps) == (1, 3, 0)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 16])
def test_the_context_is_filled_to_its_last_position(num_draft_tokens):
    model = random_table(4, 2, seed=3, max_length=9)
    engine = Engine(model, draft=TableModel(model.table, max_length=9))
    for length in (1, 7, 8):
        result = engine.generate([1] * length, num_draft_tokens=num_draft_tokens, max_tokens=None)
        assert len(result.token_ids) == 9 - length
        assert result.finish_reason == "context"
    both = engine.generate([1] * 7, num_draft_tokens=num_draft_tokens, max_tokens=2)
    assert both.finish_reason == "length"


def test_a_perfect_draft_model_makes_a_step_of_every_block():
    model = random_table(5, 2, seed=1)
    engine = Engine(model, draft=model)
    result = engine.generate([1, 2], num_draft_tokens=4, max_tokens=21)
    assert result.stats.num_steps == 4
    assert result.stats.tokens_per_step == 5
    assert result.origins == ["plain"] + (["draft"] * 4 + ["bonus"]) * 4
