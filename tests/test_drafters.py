"""Drafters propose what they should, cheaply, and keep to their own request."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_core import (
    CountingTable,
    always_wrong,
    continuation,
    random_table,
    successor_table,
    tokenizer_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import CapabilityError, Draft, Engine, OptionError, VocabularyMismatchError
from foretell.drafters import DraftModel, PromptLookup, TextDraft

# --- Prompt lookup -------------------------------------------------------------------


def naive_lookup(context, limit, longest, shortest):
    """Search from the back, longest n-gram first."""
    for length in range(longest, shortest - 1, -1):
        wanted = context[len(context) - length :] if length <= len(context) else None
        for start in range(len(context) - length - 1, -1, -1):
            if context[start : start + length] == wanted:
                return context[start + length :][:limit]
    return []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(1, 6), min_size=1, max_size=10),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_the_index_equals_a_naive_search(tokens, growth, shortest, more, limit):
    lookup = PromptLookup(shortest + more, shortest)
    lookup.start(tokens[:1])
    length = 1
    for step in growth:
        context = tokens[:length]
        draft = lookup.propose(context, limit)
        assert list(draft.tokens) == naive_lookup(context, limit, shortest + more, shortest)
        assert draft.parents is None
        length += step


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # three tokens win over two
        ([2, 3, 9, 2, 3, 8, 2, 3], [8, 2, 3]),  # the most recent place wins
        ([1, 5, 4, 6, 4], [6, 4]),
        ([1, 2, 3], []),
        ([7], []),
        ([7, 7], [7]),
        ([7, 7, 7], [7]),
    ],
)
def test_longest_match_first_then_the_most_recent(context, tokens):
    assert PromptLookup().propose(context, 4) == Draft.one_hot(tuple(tokens))


def test_the_prompt_is_looked_up_for_the_first_draft_already():
    engine = Engine(successor_table([1, 2, 3, 0]), drafters=["prompt_lookup"])
    stats = engine.generate([0, 1, 2, 3, 0], num_draft_tokens=4, max_tokens=5).stats
    assert stats.num_drafts == stats.num_steps == 1
    assert stats.num_accepted_tokens == 3


class Watched(list):
    """A list that counts the elements read from it."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Watched.read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_reads_no_more_of_a_long_context_than_of_a_short_one():
    lookup, context, reads = PromptLookup(), Watched(), []
    for token in np.random.default_rng(0).integers(50, size=2000).tolist():
        context.append(token)
        Watched.read = 0
        lookup.propose(context, 4)
        reads.append(Watched.read)
    assert max(reads) <= 3 + 2 + 1 + 6 + 4  # three n-grams to index, three to look up, a draft


def test_a_draft_model_reads_no_more_of_a_long_context_than_of_a_short_one():
    drafter, context, reads = DraftModel(random_table(4, 1, seed=0)), Watched(), []
    for token in np.random.default_rng(0).integers(4, size=300).tolist():
        context.append(token)
        Watched.read = 0
        drafter.propose(context, 4)
        reads.append(Watched.read)
    assert max(reads) <= 3


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (3, 0), (-1, -1)])
def test_impossible_ngram_lengths_are_refused(longest, shortest):
    with pytest.raises(OptionError, match="1 <= min_ngram <= max_ngram"):
        PromptLookup(longest, shortest)


def test_spawn_keeps_the_settings_and_nothing_else():
    lookup = PromptLookup(5, 2)
    lookup.propose([1, 2, 3, 1, 2], 4)
    twin = lookup.spawn()
    assert twin.propose([1, 2], 4) == Draft.empty()
    assert twin.propose([9, 1, 2, 3, 1, 2], 1) == Draft.one_hot((3,))
    assert twin.propose([9, 1, 2, 3, 1, 2, 9], 1) == Draft.empty()  # one token is too few


# --- Draft model ---------------------------------------------------------------------


def test_a_draft_model_says_what_it_would_say_itself():
    model = random_table(6, 2, seed=4)
    drafter = DraftModel(model)
    for context in ([1], [1, 2, 3], [1, 2, 3, 4, 5]):
        assert drafter.propose(context, 4) == Draft.one_hot(tuple(continuation(model, context, 4)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 5)), max_size=8))
def test_its_cache_follows_any_context_that_grows(growth):
    model = random_table(4, 3, seed=4)
    drafter, context = DraftModel(model), [0]
    for tokens, limit in growth:
        context += tokens
        assert drafter.propose(context, limit).tokens == tuple(continuation(model, context, limit))


def test_it_may_be_started_again_with_another_prompt():
    model = random_table(4, 3, seed=4)
    drafter = DraftModel(model)
    for context in ([1, 2, 3, 0], [1, 2, 0, 0, 3], [3], [1, 2, 0, 0, 3, 1]):
        drafter.start(context)
        assert drafter.propose(context, 3).tokens == tuple(continuation(model, context, 3))


def test_after_full_acceptance_it_runs_only_what_it_has_not_seen():
    target = random_table(5, 2, seed=1)
    draft = CountingTable(target.table)
    stats = (
        Engine(target, draft=draft, drafters=["draft_model"])
        .generate([1, 2, 3], num_draft_tokens=4, max_tokens=21)
        .stats
    )
    assert (stats.num_steps, stats.num_accepted_tokens) == (4, 16)
    # First the prompt and a token; then, of the 5 tokens of a step, the last draft and the bonus
    # are new to it. Each step then runs 3 drafted tokens one by one (the fourth is never run).
    assert draft.num_rows == (4 + 3) + 3 * (2 + 3)
    assert draft.num_passes == 4 * 4


def test_after_a_rejection_it_runs_only_the_correction():
    target = random_table(5, 2, seed=1)
    draft = CountingTable(always_wrong(target).table)
    stats = (
        Engine(target, draft=draft, drafters=["draft_model"])
        .generate([1, 2, 3], max_tokens=8, num_draft_tokens=3)
        .stats
    )
    assert stats.num_accepted_tokens == 0
    assert draft.num_rows == (4 + 2) + (1 + 2) * 3 + (1 + 1) + 1  # drafts of 3, 3, 3, 3, 2, 1


def test_nothing_is_run_before_it_is_asked():
    draft = CountingTable(random_table(4, 1, 0).table)
    engine = Engine(random_table(4, 1, 0), draft=draft, drafters=["draft_model"])
    engine.generate([1, 2], num_draft_tokens=0)
    engine.generate([1, 2], num_draft_tokens=4, max_tokens=1)
    assert draft.num_rows == 0


@pytest.mark.parametrize("max_length", [1, 2, 3, 6, 9])
def test_it_stops_drafting_where_its_own_context_ends(max_length):
    target = random_table(4, 2, seed=2)
    draft = CountingTable(target.table, max_length=max_length)
    engine = Engine(target, draft=draft, drafters=["draft_model"])
    plain = engine.generate([1, 2], max_tokens=20, num_draft_tokens=0)
    result = engine.generate([1, 2], num_draft_tokens=4, max_tokens=20)
    assert result.token_ids == plain.token_ids
    # Its context holds max_length tokens; the one after them can still be drafted.
    drafted = [i for i, origin in enumerate(result.origins) if origin == "draft"]
    assert max(drafted, default=-1) + 2 <= max(max_length, 1)
    assert bool(drafted) == (max_length >= 3)


def test_a_padded_draft_vocabulary_is_never_proposed_from():
    target = successor_table([1, 2, 0])
    table = np.zeros((8, 8))
    table[:, 7] = 9  # it would love to say its padding
    table[[0, 1, 2], [1, 2, 0]] = 1
    tokenizer = tokenizer_of([b"a", b"b", b"c"])
    draft = successor_table([0] * 8)
    draft.table[:] = table
    draft.tokenizer = tokenizer
    engine = Engine(target, draft=draft, drafters=["draft_model"], tokenizer=tokenizer)
    result = engine.generate([0], num_draft_tokens=4, max_tokens=11)
    assert result.token_ids == [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert result.stats.draft_acceptance_rate == 1


def test_text_with_ids_the_draft_model_lacks_is_not_drafted_for():
    target = successor_table([1, 2, 3, 0])
    draft = CountingTable(successor_table([1, 2, 0]).table)  # knows 0, 1, 2
    draft.tokenizer = tokenizer_of([b"a", b"b", b"c", b"d"])
    engine = Engine(target, draft=draft, drafters=["draft_model"], tokenizer=draft.tokenizer)
    result = engine.generate([0], num_draft_tokens=4, max_tokens=9)
    assert result.token_ids == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert result.stats.num_drafts == 1  # before the first 3


# --- The vocabulary ------------------------------------------------------------------


def with_tokenizer(vocab_size, pieces):
    model = random_table(vocab_size, 1, 0)
    model.tokenizer = tokenizer_of(pieces)
    return model


def test_a_draft_model_of_other_tokens_drafts_text():
    target = successor_table([1, 2, 3, 0])  # abcdabcd...
    target.tokenizer = tokenizer_of([b"a", b"b", b"c", b"d"])
    draft = successor_table([3, 0, 1, 2])  # the same letters, numbered from the other end
    draft.tokenizer = tokenizer_of([b"d", b"c", b"b", b"a"])
    engine = Engine(target, draft=draft, drafters=["draft_model"])
    result = engine.generate([0], num_draft_tokens=3, max_tokens=13)
    assert result.token_ids == [1, 2, 3, 0] * 3 + [1]
    assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens == 9
    assert isinstance(engine.drafters[0], TextDraft)


def test_longer_tokens_of_the_draft_model_are_cut_into_the_targets():
    target = successor_table([1, 2, 3, 0])
    target.tokenizer = tokenizer_of([b"a", b"b", b"c", b"d"])
    pieces = [b"a", b"b", b"c", b"d", b"ab", b"cd"]
    draft = successor_table([1, 2, 3, 4, 5, 4])  # d ab cd ab cd ...
    draft.tokenizer = tokenizer_of(pieces, merges=[("a", "b"), ("c", "d")])
    engine = Engine(target, draft=draft, drafters=["draft_model"])
    result = engine.generate([0, 1, 2, 3], num_draft_tokens=4, max_tokens=16)
    assert result.token_ids == [0, 1, 2, 3] * 4
    assert result.stats.num_accepted_tokens >= 9


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.9, "seed": 4}])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_of_other_tokens_never_change_the_output(seed, setting):
    target = random_table(4, 2, seed)
    target.tokenizer = tokenizer_of([b"a", b"b", b"c", b"\xc3"])  # half a character among them
    draft = random_table(3, 1, seed + 50)
    draft.tokenizer = tokenizer_of([b"c", b"a", b"b"])
    engine = Engine(target, draft=draft, drafters=["draft_model"])
    plain = engine.generate([0, 2], num_draft_tokens=0, max_tokens=60, **setting)
    drafted = engine.generate([0, 2], num_draft_tokens=4, max_tokens=60, **setting)
    assert drafted.token_ids == plain.token_ids


def test_equal_tokens_in_padded_vocabularies_are_fine():
    pieces = [b"a", b"b", b"c"]
    for target_size, draft_size in ((3, 8), (8, 3), (3, 3)):
        target = with_tokenizer(target_size, pieces)
        engine = Engine(target, draft=with_tokenizer(draft_size, pieces), drafters=["draft_model"])
        plain = engine.generate([0], num_draft_tokens=0, max_tokens=30)
        assert engine.generate([0], num_draft_tokens=4, max_tokens=30).token_ids == plain.token_ids


def test_without_tokenizers_the_sizes_must_agree():
    with pytest.raises(VocabularyMismatchError, match="4 token ids, the target 3"):
        Engine(random_table(3, 1, 0), draft=random_table(4, 1, 0))


# --- The target's own first layers ---------------------------------------------------


def test_a_model_that_cannot_be_left_early_says_which_can():
    with pytest.raises(CapabilityError, match="backend='transformers'"):
        Engine(random_table(3, 1, 0), drafters=["early_exit"])


@pytest.mark.parametrize("name", ["early_exit:", "early_exit:two", "early_exit:-1", "suffix:2"])
def test_a_number_of_layers_is_a_number_of_layers(name):
    with pytest.raises(OptionError, match="unknown drafter"):
        Engine(random_table(3, 1, 0), drafters=[name])
