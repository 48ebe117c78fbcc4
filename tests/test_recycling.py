"""Token recycling: the target's own second thoughts, drafted the next time."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers_core import random_table
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import Accepted, Engine, OptionError, Origin, Output
from foretell._largest import largest
from foretell._proposal import Proposal
from foretell.drafters.recycling import Recycling, RecyclingMemory

NOTHING = Proposal().draft()


def chain(*tokens):
    return Proposal(tokens, None, (0.5,) * len(tokens), ("some",) * len(tokens)).draft()


def logits(*rows, vocab_size=8):
    """A row for each list of ids, most likely first, one logit apart."""
    result = np.full((len(rows), vocab_size), -9.0, np.float32)
    for row, ids in zip(result, rows, strict=True):
        for rank, token in enumerate(ids):
            row[token] = 5 - rank
    return Output(result)


def accept(nodes, tokens):
    return Accepted(tuple(nodes), tuple(tokens), Origin.CORRECTION)


def teach(drafter, token, row):
    """Have ``token`` run in a rejected branch, with these logits after it."""
    rows = np.zeros((2, row.size), np.float32)
    rows[1] = row
    drafter.observe(chain(token), Output(rows), accept([0], [0]))


@pytest.mark.parametrize("size", [2, 7, 63, 64, 65, 600, 1000, 4096, 49152, 49160])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_largest_are_found_exactly(size, k):
    k = min(k, size)
    rng = np.random.default_rng(size + k)
    for _ in range(20):
        row = rng.permutation(size).astype(np.float32)
        ids, values = largest(np.stack((row, -row)), k)
        assert ids.tolist() == [np.argsort(-row)[:k].tolist(), np.argsort(row)[:k].tolist()]
        assert values.tolist() == [row[ids[0]].tolist(), (-row[ids[1]]).tolist()]


@settings(deadline=None)
@given(st.integers(8, 300), st.integers(2, 8), st.integers(0, 10**6))
def test_of_equal_ones_the_first_and_what_is_no_number_last(size, k, seed):
    rng = np.random.default_rng(seed)
    row = rng.integers(0, 4, size).astype(np.float32)
    row[rng.random(size) < 0.1] = np.nan
    row[rng.random(size) < 0.1] = -np.inf
    row.flags.writeable = False
    [ids], [values] = largest(row[None], k)
    known = np.where(np.isnan(row), -np.inf, row)
    assert ids.tolist() == np.argsort(-known, kind="stable")[:k].tolist()
    assert values.tolist() == known[ids].tolist()


def test_after_prefill_it_knows_what_follows_the_prompt():
    drafter = Recycling(2)
    drafter.start([3, 4])
    drafter.observe(NOTHING, logits([6, 7]), accept([0], [6]))
    proposal = drafter.suggest([3, 4, 6, 4], 2)
    assert proposal.tokens == (6, 7)
    assert proposal.parents == (-1, 0, 0)
    assert proposal.kinds == ("first, near", "second, near")


def test_rejected_branches_teach_it_too():
    drafter = Recycling(2)
    drafter.start([0])
    drafter.observe(NOTHING, logits([1, 2]), accept([0], [1]))
    drafter.observe(chain(5, 6), logits([2, 3], [7, 0], [4, 1]), accept([0], [2]))
    assert drafter.suggest([5], 1).tokens == (7,)
    assert drafter.suggest([6], 1).tokens == (4,)
    assert drafter.suggest([1], 1).tokens == (2,)
    assert drafter.suggest([2], 1).tokens == ()
    drafter.observe(NOTHING, logits([0, 1]), accept([0], [0]))
    assert drafter.suggest([2], 1).tokens == (0,)  # the token emitted last was run


def test_passes_it_does_not_see_do_it_no_harm():
    drafter = Recycling(2)
    drafter.start([0])
    drafter.observe(NOTHING, logits([1, 2]), accept([0], [1]))
    drafter.suggest([0, 1, 4, 5], 1)  # two passes later
    drafter.observe(NOTHING, logits([6, 7]), accept([0], [6]))
    assert drafter.suggest([5], 1).tokens == (6,)
    assert drafter.suggest([1], 1).tokens == ()


def test_of_a_token_run_twice_the_accepted_one_counts():
    drafter = Recycling(2)
    drafter.start([0])
    drafter.observe(NOTHING, logits([1, 2]), accept([0], [1]))
    draft = Proposal((5, 6, 5), (-1, 0, 0, 2), (0.5,) * 3, ("some",) * 3).draft()
    rows = logits([5, 6], [7, 0], [4, 1], [3, 2])
    drafter.observe(draft, rows, accept([0, 1], [5, 7]))
    assert drafter.suggest([5], 1).tokens == (7,)


def test_the_draft_is_a_tree_of_successors_of_successors():
    drafter = Recycling(2)
    drafter.start([7])
    for token, first, second in ((1, 2, 3), (2, 3, 4), (3, 5, 6)):
        row = np.full(8, -20.0, np.float32)
        row[[first, second]] = 5, 3
        teach(drafter, token, row)
    proposal = drafter.suggest([1], 6)
    assert proposal.tokens[:3] == (2, 3, 3)
    assert proposal.parents[:4] == (-1, 0, 1, 0)
    assert (5, 2) in zip(proposal.tokens, proposal.parents[1:], strict=True)


def test_how_far_ahead_the_first_one_was_is_evidence():
    drafter = Recycling(2)
    drafter.start([7])
    row = np.full(8, -20.0, np.float32)
    row[[2, 3]] = 5.0, 4.9
    teach(drafter, 1, row)
    close = drafter.suggest([1], 2)
    row[3] = -20
    drafter.suggest([7], 1)
    teach(drafter, 1, row)
    far = drafter.suggest([1], 1)
    assert close.kinds == ("first, close", "second, close")
    assert far.kinds == ("first, very far",)
    assert far.probabilities[0] > close.probabilities[0]


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 10**6), st.integers(2, 6))
def test_proposals_are_valid_and_keep_to_the_limit(limit, seed, k):
    rng = np.random.default_rng(seed)
    drafter = Recycling(k)
    drafter.start([0])
    for token in range(6):
        teach(drafter, token, 3 * rng.normal(size=6))
    proposal = drafter.suggest([1], limit)  # checks its own shape and probabilities
    assert len(proposal) <= limit
    assert proposal.draft().tokens == proposal.tokens
    for following in proposal.children:
        assert sum(proposal.probabilities[i] for i in following) <= 1 + 1e-9


def test_two_tokens_are_believed_before_one():
    drafter = Recycling(2)
    drafter.start([3, 4])
    drafter.observe(NOTHING, logits([6, 7]), accept([0], [6]))  # after 3 4
    drafter.observe(chain(4), logits([0, 1], [5, 2]), accept([0, 1], [4, 5]))  # after 4 6 and 6 4
    after_two = drafter.suggest([0, 3, 4], 1)
    assert (after_two.tokens, after_two.kinds) == ((6,), ("first, near, after two",))
    after_one = drafter.suggest([1, 4], 1)
    assert (after_one.tokens, after_one.kinds) == ((5,), ("first, near",))


def test_in_a_tree_each_node_follows_its_own_two():
    drafter = Recycling(2)
    drafter.start([1, 2])
    steep = logits([3, 4]).logits * 9
    drafter.observe(NOTHING, Output(steep), accept([0], [3]))  # after 1 2 comes 3
    other, after = logits([5, 6]).logits * 9, logits([7, 0]).logits * 9
    drafter.observe(chain(), Output(after), accept([0], [7]))  # after 2 3 comes 7
    drafter.suggest([6, 3], 1)
    drafter.observe(chain(), Output(other), accept([0], [5]))  # after 6 3 comes 5
    proposal = drafter.suggest([1, 2], 2)
    assert proposal.tokens == (3, 7)
    assert proposal.kinds == ("first, very far, after two",) * 2


def test_memory_is_bounded_and_the_oldest_are_forgotten():
    drafter = Recycling(2, RecyclingMemory(max_entries=7))
    drafter.start([0])
    for token in (1, 2, 3, 1, 4):
        teach(drafter, token, logits([5, 6]).logits)
    known = [token for token in range(8) if len(drafter.suggest([7, token], 1))]
    assert known == [0, 1, 4]  # each alone and in a pair, and the pair of 3


def test_all_it_knows_takes_two_megabytes_at_most():
    memory = RecyclingMemory()
    drafter = Recycling(memory=memory)
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        memory = RecyclingMemory()
        drafter = Recycling(memory=memory, owner="ann")
        drafter.start([0])
        for token in range(1000, 7000):
            teach(drafter, token, rng.normal(size=2000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(memory) == 8192
    assert after - before <= 2_000_000


def test_without_a_memory_a_request_knows_nothing_of_another():
    drafter = Recycling(2)
    drafter.start([3])
    drafter.observe(NOTHING, logits([6, 7]), accept([0], [6]))
    assert len(drafter.suggest([3], 2)) == 2
    assert len(drafter.spawn().suggest([3], 2)) == 0


def test_with_one_it_knows_what_its_owner_saw_and_nothing_else():
    drafter = Recycling(2, RecyclingMemory(), "ann")
    drafter.start([3])
    drafter.observe(NOTHING, logits([6, 7]), accept([0], [6]))
    assert drafter.spawn().suggest([3], 2).tokens == (6, 7)
    assert drafter.for_owner("ann").suggest([3], 2).tokens == (6, 7)
    assert len(drafter.for_owner("bob").suggest([3], 2)) == 0
    assert len(drafter.for_owner(None).suggest([3], 2)) == 0
    assert len(drafter.for_owner(None).spawn().suggest([3], 2)) == 0
    bob = drafter.for_owner("bob")
    bob.start([3])
    bob.observe(NOTHING, logits([1, 2]), accept([0], [1]))
    assert drafter.spawn().suggest([3], 2).tokens == (6, 7)
    assert bob.for_owner("bob").suggest([3], 2).tokens == (1, 2)


def test_several_threads_can_share_a_memory():
    memory = RecyclingMemory(max_entries=50)

    def work(seed):
        rng = np.random.default_rng(seed)
        drafter = Recycling(2, memory)
        drafter.start([0])
        for _ in range(300):
            teach(drafter, int(rng.integers(100)), rng.normal(size=100))
            drafter.suggest([int(rng.integers(100)), int(rng.integers(100))], 8)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(memory) == 50


def test_under_a_rule_whose_output_depends_on_drafts_a_seed_gives_the_same_again():
    engine = Engine(random_table(6, 2, seed=3), drafters=["recycling", "suffix"])
    options = {"seed": 5, "temperature": 1.0, "max_tokens": 40, "num_draft_tokens": 3}
    first = engine.generate([1, 2], verification="rejection", **options)
    engine.generate([1, 2], **{**options, "seed": 6})
    again = engine.generate([1, 2], verification="rejection", **options)
    assert again.token_ids == first.token_ids
    assert again.stats.num_draft_tokens == first.stats.num_draft_tokens > 0


def test_a_cancelled_step_teaches_without_a_token():
    drafter = Recycling(2)
    drafter.start([3])
    drafter.observe(NOTHING, logits([6, 7]), accept([0], []))
    assert drafter.suggest([3], 1).tokens == (6,)


@pytest.mark.parametrize("k", [1, 9])
def test_impossible_settings_are_refused(k):
    with pytest.raises(OptionError, match="use 2 to 8 successors"):
        Recycling(k)
    with pytest.raises(OptionError, match="use 1 or more"):
        RecyclingMemory(0)


def test_the_output_is_that_of_plain_decoding():
    engine = Engine(random_table(6, 2, seed=3), drafters=[Recycling()])
    plain = engine.generate([1, 2], num_draft_tokens=0, max_tokens=60)
    result = engine.generate([1, 2], num_draft_tokens=6, max_tokens=60)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_accepted_tokens > 10  # a table repeats itself
