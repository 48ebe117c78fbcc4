"""Match keeps what the target itself would have said, and says where each token came from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell import Accepted, CorruptModelError, Draft, InputError, Origin
from foretell._sampling import RequestSampler, SamplingParams
from foretell._verify import match


def says(*tokens, vocab_size=8):
    """Logits rows whose largest entries are ``tokens``."""
    return np.eye(vocab_size, dtype=np.float32)[list(tokens)]


def greedy(logits, history=(), position=0):
    return RequestSampler(SamplingParams()).choose(logits, list(history), position)


def matched(draft, logits, history=(2,)):
    verdict = match(draft, logits, RequestSampler(SamplingParams()), list(history))
    return Accepted.of(draft, verdict)


# --- Match ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "target", "nodes", "tokens", "origins"),
    [
        ((), [3], [0], [3], ["plain"]),
        ((3,), [3, 4], [0, 1], [3, 4], ["draft", "bonus"]),
        ((3,), [5, 4], [0], [5], ["correction"]),
        ((3, 4, 5), [3, 4, 5, 6], [0, 1, 2, 3], [3, 4, 5, 6], ["draft"] * 3 + ["bonus"]),
        ((3, 4, 5), [3, 7, 5, 6], [0, 1], [3, 7], ["draft", "correction"]),
        ((3, 4, 5), [1, 4, 5, 6], [0], [1], ["correction"]),
    ],
)
def test_chains(draft, target, nodes, tokens, origins):
    accepted = matched(Draft.one_hot(draft), says(*target))
    assert list(accepted.nodes) == nodes
    assert list(accepted.tokens) == tokens
    assert accepted.origins == tuple(origins)
    assert accepted.num_accepted == origins.count("draft")


TREE = Draft.one_hot(tokens=(3, 4, 5, 3, 6), parents=(-1, 0, 0, 1, 2, 3))
#   0 -- 1 (3) -- 3 (5) -- 5 (6)
#     `- 2 (4) -- 4 (3)


@pytest.mark.parametrize(
    ("target", "nodes", "tokens", "last"),
    [
        ([3, 5, 0, 6, 0, 7], [0, 1, 3, 5], [3, 5, 6, 7], Origin.BONUS),
        ([4, 0, 3, 0, 7, 0], [0, 2, 4], [4, 3, 7], Origin.BONUS),
        ([4, 0, 5, 0, 0, 0], [0, 2], [4, 5], Origin.CORRECTION),  # 5 is a child of 1 alone
        ([3, 5, 0, 0, 0, 0], [0, 1, 3], [3, 5, 0], Origin.CORRECTION),
        ([6, 0, 0, 0, 0, 0], [0], [6], Origin.CORRECTION),
    ],
)
def test_trees(target, nodes, tokens, last):
    accepted = matched(TREE, says(*target))
    assert (list(accepted.nodes), list(accepted.tokens)) == (nodes, tokens)
    assert accepted.last_origin is last


def test_choose_sees_the_history_that_plain_decoding_would_have():
    seen = []

    class Recording(RequestSampler):
        def choose(self, logits, history, position):
            seen.append((list(history), position))
            return super().choose(logits, history, position)

    history = [2, 1]
    list(match(Draft.one_hot((3, 4)), says(3, 4, 5), Recording(SamplingParams()), history))
    assert seen == [([2, 1], 2), ([2, 1, 3], 3), ([2, 1, 3, 4], 4)]
    assert history == [2, 1]


@given(st.lists(st.integers(0, 9), max_size=6), st.slices(8), st.integers(-9, 9))
def test_the_history_behaves_like_the_list_of_its_tokens(history, part, index):
    seen = []

    class Recording(RequestSampler):
        def choose(self, logits, history, position):
            seen.append((history[part], list(reversed(history)), len(history), 3 in history))
            if -len(history) <= index < len(history):
                seen.append(history[index])
            else:
                with pytest.raises(IndexError):
                    history[index]
            return super().choose(logits, history, position)

    list(match(Draft.one_hot((3, 4)), says(3, 4, 5), Recording(SamplingParams()), history))
    expected = []
    for tokens in (history, [*history, 3], [*history, 3, 4]):
        expected.append((tokens[part], tokens[::-1], len(tokens), 3 in tokens))
        if -len(tokens) <= index < len(tokens):
            expected.append(tokens[index])
    assert seen == expected


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_what_is_emitted_is_the_target_s_own_words(draft, target):
    accepted = matched(Draft.one_hot(tuple(draft)), says(*target))
    agreeing = 0
    while agreeing < len(draft) and draft[agreeing] == target[agreeing]:
        agreeing += 1
    assert list(accepted.tokens) == target[: agreeing + 1]
    assert accepted.nodes == tuple(range(agreeing + 1))


# --- The greedy choice ---------------------------------------------------------------


def test_a_tie_goes_to_the_lowest_id():
    assert greedy(np.array([1, 3, 3, 3], dtype=np.float32), [], 0) == 1
    assert greedy(np.zeros(4, dtype=np.float32), [], 0) == 0
    assert greedy(np.array([-0.0, 0.0], dtype=np.float32), [], 0) == 0


def test_nan_is_an_error_that_names_token_and_position():
    for row in ([0, np.nan, 9], [np.inf, np.nan, -np.inf], [9, np.nan, np.nan]):
        with pytest.raises(CorruptModelError, match="NaN for token 1 at position 7"):
            greedy(np.array(row, dtype=np.float32), [], 7)


def test_nan_after_a_disagreement_is_never_looked_at():
    logits = says(5, 4)
    logits[1] = np.nan
    assert matched(Draft.one_hot((3,)), logits).tokens == (5,)


# --- Cutting -------------------------------------------------------------------------


def test_a_cut_leaves_what_plain_decoding_would_have_cached():
    verdict = [(4, Origin.DRAFT), (3, Origin.DRAFT), (7, Origin.BONUS)]
    assert Accepted.of(TREE, verdict) == Accepted((0, 2, 4), (4, 3, 7), Origin.BONUS)
    cut = Accepted.of(TREE, verdict[:2])
    assert cut == Accepted((0, 2), (4, 3), Origin.DRAFT)
    assert cut.num_accepted == 2
    assert Accepted.of(TREE, verdict[:1]) == Accepted((0,), (4,), Origin.DRAFT)
    nothing = Accepted.of(TREE, ())
    assert nothing.nodes == (0,)  # emitted before
    assert nothing.origins == ()
    assert nothing.num_accepted == 0


def test_nothing_behind_the_end_is_looked_at():
    logits = says(3, 4, 5)
    logits[1] = np.nan
    verdict = match(Draft.one_hot((3, 4)), logits, RequestSampler(SamplingParams()), [2])
    assert next(verdict) == (3, Origin.DRAFT)
    with pytest.raises(CorruptModelError, match="position 2"):
        next(verdict)


# --- Drafts --------------------------------------------------------------------------


def test_a_draft_knows_its_children_leaves_and_depth():
    assert TREE.child(0, 4) == 2
    assert TREE.child(1, 4) is None
    assert [TREE.is_leaf(node) for node in range(6)] == [False] * 4 + [True] * 2
    assert (len(TREE), TREE.depth) == (5, 3)
    chain = Draft.one_hot((3, 3))
    assert [chain.child(node, 3) for node in range(3)] == [1, 2, None]
    assert [chain.is_leaf(node) for node in range(3)] == [False, False, True]
    assert (chain.depth, Draft.empty().depth, len(Draft.empty())) == (2, 0, 0)


def test_the_first_branch_of_a_tree():
    assert TREE.first_branch() == Draft.one_hot((3, 5, 6))
    bushy = Draft.one_hot((1, 2, 3, 4), (-1, 0, 0, 2, 1), probabilities=(0.5, 0.4, 0.3, 0.2))
    assert bushy.first_branch() == Draft.one_hot((1, 4), probabilities=(0.5, 0.2))
    chain = Draft.one_hot((3, 4), probabilities=(0.5, 0.4))
    assert chain.first_branch() is chain
    assert Draft.one_hot((), (-1,)).first_branch() == Draft.empty()


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((3, 4), (-1, 0), "3 tokens need 3 parents"),
        ((3, 4), (-1, 0, 2), "node 2 has parent 2"),
        ((3, 4), (-1, 0, -2), "node 2 has parent -2"),
        ((3, 4), (0, 0, 0), "node 0 has parent 0"),
        ((3, 4), (-1, 0, -1), "must follow node 0"),
        ((3, 3), (-1, 0, 0), "same token twice"),
    ],
)
def test_impossible_trees_are_refused(tokens, parents, message):
    with pytest.raises(InputError, match=message):
        Draft.one_hot(tokens, parents)


def test_probabilities_are_as_many_as_tokens():
    with pytest.raises(InputError, match="2 drafted tokens need as many probabilities, got 1"):
        Draft.one_hot((3, 4), probabilities=(0.5,))
