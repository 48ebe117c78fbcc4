"""A generation ends at the right token, and its text at the right character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers_core import Scripted, continuation, successor_table, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import Draft, Engine, FinishReason
from foretell._stop import StopConditions


class Spelled:
    """A decoder of tokens that are texts: token i is ``texts[i]``; ``tail`` is held back."""

    def __init__(self, texts, tail=""):
        self.texts, self.tail = texts, tail

    def push(self, token):
        return self.texts[token]

    def finish(self):
        tail, self.tail = self.tail, ""
        return tail


def conditions(texts=None, *, stop=(), eos=(), ids=(), max_tokens=None, context=1000, tail=""):
    return StopConditions(
        eos_token_ids=eos,
        stop_token_ids=ids,
        stop_strings=tuple(stop),
        max_tokens=max_tokens,
        max_context_tokens=context,
        decoder=None if texts is None else Spelled(texts, tail),
    )


def run(conditions, count):
    """Push 0, 1, 2, ...; the pieces, the reason, and the text of them all."""
    pieces, reason = [], None
    for token in range(count):
        piece, reason = conditions.push(token)
        pieces.append(piece)
        if reason is not None:
            break
    pieces.append(conditions.finish())
    return pieces, reason, "".join(pieces)


def split(text, cuts):
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# --- Stop strings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "stop", "pieces"),
    [
        (["one", "two"], [], ["one", "two", ""]),
        (["one STOP two"], ["STOP"], ["one ", ""]),
        (["one S", "TO", "P two"], ["STOP"], ["one ", "", "", ""]),
        (["one S", "TO", "NE"], ["STOP"], ["one ", "", "STONE", ""]),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""]),
        (["a", "a", "a", "b"], ["aab", "aaab"], ["", "", "", "", ""]),
        (["a", "a", "a", "a", "b"], ["aab", "aaab"], ["", "", "", "a", "", ""]),
        (["x", "y"], ["xyz", "y"], ["", "x", ""]),
        (["\n", "\n"], ["\n\n"], ["", "", ""]),
        (["a", "b"], ["abc"], ["", "", "ab"]),
    ],
)
def test_what_may_become_a_stop_string_is_held_back(texts, stop, pieces):
    assert run(conditions(texts, stop=stop), len(texts))[0] == pieces


def test_of_several_stop_strings_the_one_completed_first_counts():
    # "b" is complete before "abc" is, whether they come in one token or in three.
    for texts in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        assert run(conditions(texts, stop=["abc", "b"]), len(texts))[2] == "a"
    # Of two that end together, the longer one does.
    for texts in (["xaab"], ["x", "aa", "b"]):
        assert run(conditions(texts, stop=["ab", "aab"]), len(texts))[2] == "x"


@settings(deadline=None)
@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 14), max_size=6),
)
def test_token_boundaries_do_not_matter(text, stop, cuts):
    texts = split(text, cuts)
    pieces, reason, got = run(conditions(texts, stop=stop), len(texts))
    whole = run(conditions(list(text), stop=stop), len(text))
    assert (reason, got) == whole[1:]
    assert not any(s in got for s in stop)
    assert reason == ("stop" if any(s in text for s in stop) else None)
    assert text.startswith(got)
    # Nothing is held back but what may still become a stop string.
    shown = seen = ""
    for piece, part in zip(pieces[: -2 if reason else -1], texts, strict=False):
        shown, seen = shown + piece, seen + part
        held = seen[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_a_long_stop_string_costs_no_more_for_its_length():
    stop = "ab" * 50_000 + "c"
    texts = "ab" * 30_000
    pieces, reason, got = run(conditions(texts, stop=[stop, stop[1:]], context=10**6), len(texts))
    assert (reason, got) == (None, texts)
    assert not any(pieces[:-1])


def test_text_behind_a_stop_string_is_gone_even_where_the_decoder_holds_half_a_character():
    tokenizer = tokenizer_of([b"x", b"STOP\xc3", b"\xa9"])
    for num_draft_tokens in (0, 4):
        engine = Engine(successor_table([1, 2, 0]), tokenizer=tokenizer)
        result = engine.generate(
            [2, 0, 1, 2], stop="STOP", num_draft_tokens=num_draft_tokens, max_tokens=9
        )
        assert (result.text, result.token_ids, result.finish_reason) == ("x", [0, 1], "stop")


def test_a_stop_string_completed_by_what_the_decoder_held_back():
    def ended(**options):
        return run(conditions("ab", stop=["!"], tail="c!d", **options), 2)[1:]

    assert ended(max_tokens=2) == ("stop", "abc")
    assert ended(eos=[1]) == ("stop", "ac")
    assert ended() == (None, "abc")  # cancelled between tokens: the text is cut as well


def test_half_a_character_at_the_end_is_shown_as_one_mark():
    tokenizer = tokenizer_of([b"a", b"\xe2\x82", b"\xac"])
    engine = Engine(successor_table([1, 2, 0]), tokenizer=tokenizer)
    assert engine.generate([2], max_tokens=2).text == "a\ufffd"
    assert engine.generate([2], max_tokens=3).text == "a€"
    cut = engine.generate([2], max_tokens=2, stop="\ufffd")
    assert (cut.text, cut.finish_reason) == ("a", "stop")
    assert engine.generate([2], max_tokens=3, stop="\ufffd").text == "a€"


# --- Which reason wins ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 2}, FinishReason.LENGTH),
        ({"context": 2}, FinishReason.CONTEXT),
        ({"max_tokens": 2, "context": 2}, FinishReason.LENGTH),
        ({"max_tokens": 2, "context": 2, "eos": [1]}, FinishReason.STOP),
        ({"max_tokens": 2, "ids": [1]}, FinishReason.STOP),
        ({"context": 2, "stop": ["ab"]}, FinishReason.STOP),
    ],
)
def test_a_stop_wins_over_the_length_and_that_over_the_context(options, reason):
    assert run(conditions("abc", **options), 3)[1] is reason


def test_room_counts_down_to_the_nearer_limit():
    both = conditions(max_tokens=3, context=5)
    assert both.room == 3
    both.push(0)
    assert both.room == 2
    assert conditions(max_tokens=None, context=5).room == 5


def test_the_end_of_text_token_has_no_text_but_a_stop_token_has():
    assert run(conditions("abc", eos=[1, 7]), 3)[2] == "a"
    assert run(conditions("abc", ids=[1]), 3)[2] == "ab"
    assert run(conditions("abc", eos=[1], ids=[1]), 3)[2] == "a"


def test_every_reason_has_a_sentence():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "context", "cancelled"]
    assert all(reason.message.endswith(".") for reason in FinishReason)
    assert FinishReason("stop") is FinishReason.STOP


# --- In the middle of an accepted block ----------------------------------------------

COUNTING = [1, 2, 3, 4, 5, 6, 7, 0]  # 0 1 2 ... 7 0 1 ...
LETTERS = [bytes([c]) for c in b"abcdefgh"]


def counting(**options):
    """A model that counts, a drafter that is always right, and letters."""
    model = successor_table(COUNTING, **options)
    right = Scripted(lambda context, limit: Draft.one_hot(continuation(model, context, limit)))
    return Engine(model, drafters=[right], tokenizer=tokenizer_of(LETTERS))


def stopped(engine, **options):
    """The result, equal with blocks of 6 and without, and the final cache."""
    outcomes = []
    for num_draft_tokens in (0, 1, 6):
        engine.model.sessions.clear()
        result = engine.generate([0], num_draft_tokens=num_draft_tokens, **options)
        outcomes.append(
            (result.token_ids, result.text, result.finish_reason, engine.model.sessions[0].tokens)
        )
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert result.stats.num_drafts >= 1
    return result


@pytest.mark.parametrize("eos", [[3], [3, 4], [4, 3, 7]])
def test_end_of_text_tokens(eos):
    result = stopped(counting(eos_token_ids=eos))
    assert (result.token_ids, result.text) == ([1, 2, 3], "bc")
    assert result.origins == ["plain", "draft", "draft"]
    assert result.stats.num_accepted_tokens == 2


def test_ignored_end_of_text_tokens():
    result = stopped(counting(eos_token_ids=[3]), ignore_eos=True, max_tokens=5)
    assert (result.token_ids, result.text) == ([1, 2, 3, 4, 5], "bcdef")
    result = stopped(counting(eos_token_ids=[3]), ignore_eos=True, stop_token_ids=[3])
    assert (result.token_ids, result.text) == ([1, 2, 3], "bcd")


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("d", "bc", 3),
        ("cd", "b", 3),
        ("ha", "bcdefg", 8),  # over the end of the first block of 1 + 6
        ("ghabcd", "bcdef", 11),
        (["zz", "ef", "cde"], "b", 4),
        (["efx", "fg"], "bcde", 6),
    ],
)
def test_stop_strings(stop, text, count):
    result = stopped(counting(), stop=stop)
    assert (result.text, len(result.token_ids), result.finish_reason) == (text, count, "stop")


@pytest.mark.parametrize("max_tokens", range(2, 17))
def test_length_limits(max_tokens):
    result = stopped(counting(), max_tokens=max_tokens + 1)
    assert (len(result.token_ids), result.finish_reason) == (max_tokens + 1, "length")
    result = stopped(counting(max_length=max_tokens + 2), max_tokens=None)
    assert (len(result.token_ids), result.finish_reason) == (max_tokens + 1, "context")


def test_a_stop_on_the_last_token_there_is_room_for():
    assert stopped(counting(), stop="d", max_tokens=3).finish_reason == "stop"
    assert stopped(counting(eos_token_ids=[3]), max_tokens=3).finish_reason == "stop"
    assert stopped(counting(eos_token_ids=[3], max_length=4)).finish_reason == "stop"
    assert stopped(counting(), stop="e", max_tokens=3).finish_reason == "length"


def test_nothing_of_a_stop_string_leaks_into_an_event():
    shown = ""
    for event in counting().stream([0], stop="ghabcd", num_draft_tokens=6):
        shown += event.text
        assert "bcdef".startswith(shown)
    assert shown == "bcdef"


def test_characters_split_over_tokens_stay_whole_in_events():
    pieces = [b"<", *(bytes([byte]) for byte in "é€😀".encode())]
    model = successor_table([*range(1, len(pieces)), 0])
    right = Scripted(lambda context, limit: Draft.one_hot(continuation(model, context, limit)))
    engine = Engine(model, drafters=[right], tokenizer=tokenizer_of(pieces))
    for num_draft_tokens in (0, 1, 6):
        events = list(engine.stream([0], max_tokens=11, num_draft_tokens=num_draft_tokens))
        assert [e.text for e in events if e.text] == ["é", "€", "😀", "<", "\ufffd"]


def test_stop_strings_do_not_count_before_min_tokens():
    model = successor_table([1, 2, 0])
    right = Scripted(lambda context, limit: Draft.one_hot(continuation(model, context, limit)))
    engine = Engine(model, drafters=[right], tokenizer=tokenizer_of([b"a", b"b", b"c"]))
    for num_draft_tokens in (0, 5):
        options = {"num_draft_tokens": num_draft_tokens, "max_tokens": 20}
        assert engine.generate([2], stop="bc", **options).text == "a"
        # "abc" is there after three tokens, and no reason to stop yet; the next one is.
        assert engine.generate([2], stop="bc", min_tokens=3, **options).text == "abca"
        # It began early, but is complete only with the third token.
        assert engine.generate([2], stop="bc", min_tokens=2, **options).text == "a"
        late = engine.generate([2], stop=["zz", "cab"], min_tokens=5, **options)
        assert late.text == "abcab"
