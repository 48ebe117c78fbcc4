"""Statistics follow vLLM's definitions; every number here was counted by hand."""

from __future__ import annotations

import pytest
from helpers_core import Scripted, successor_table

from foretell import Accepted, Draft, Engine, Origin, Stats

COUNTING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def drafting(*drafts, **options):
    """A model that counts, and a drafter that makes these drafts, one a step."""
    left = iter(drafts)
    return Engine(
        successor_table(COUNTING, **options),
        drafters=[Scripted(lambda context, limit: next(left, Draft.empty()))],
    )


def test_chains_by_hand():
    engine = drafting(
        Draft.one_hot((2, 3, 4)),  # after 1: all right, and 5 as bonus
        Draft.empty(),  # after 5: plain 6
        Draft.one_hot((7, 0, 0)),  # after 6: one right, correction 8
        Draft.one_hot((1,)),  # after 8: wrong, correction 9
        eos_token_ids=[9],
    )
    result = engine.generate([0], num_draft_tokens=4)
    assert result.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert result.origins == [
        *("plain", "draft", "draft", "draft", "bonus"),
        *("plain", "draft", "correction", "correction"),
    ]
    stats = result.stats
    assert stats.num_steps == 4
    assert stats.num_drafts == 3
    assert stats.num_draft_tokens == 3 + 3 + 1
    assert stats.num_accepted_tokens == 3 + 1
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1]
    assert stats.draft_acceptance_rate == pytest.approx(4 / 7)
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.num_decode_tokens == 8
    assert stats.tokens_per_step == 2


def test_trees_count_nodes_and_positions_are_depths():
    tree = Draft.one_hot((9, 2, 8, 3, 7), (-1, 0, 0, 2, 2, 4))  # 2, then 3, then a wrong 7
    stats = drafting(tree).generate([0], num_draft_tokens=5, max_tokens=7).stats
    assert stats.num_draft_tokens == 5
    assert stats.num_accepted_tokens == 2
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]
    assert stats.draft_acceptance_rate == pytest.approx(2 / 5)


def test_tokens_cut_by_a_stop_are_not_counted():
    engine = drafting(Draft.one_hot((2, 3, 4, 5)), eos_token_ids=[3])
    result = engine.generate([0], num_draft_tokens=4)
    stats = result.stats
    assert result.token_ids == [1, 2, 3]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0, 0]
    assert stats.num_decode_tokens == 2


def test_a_cut_right_after_the_bonus_counts_the_bonus_as_no_draft():
    engine = drafting(Draft.one_hot((2, 3)), eos_token_ids=[4])
    stats = engine.generate([0], num_draft_tokens=4).stats
    assert (stats.num_accepted_tokens, stats.num_decode_tokens) == (2, 3)


def test_the_longest_draft_decides_how_many_positions_there_are():
    stats = Stats()
    stats.record(Draft.one_hot((1,)), Accepted((0, 1), (1, 2), Origin.BONUS))
    stats.record(Draft.one_hot((1, 2, 3)), Accepted((0,), (9,), Origin.CORRECTION))
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]


def test_plain_decoding_has_no_drafts():
    result = drafting().generate([0], num_draft_tokens=4, max_tokens=5)
    stats = result.stats
    assert (stats.num_steps, stats.num_drafts, stats.num_draft_tokens) == (4, 0, 0)
    assert stats.num_accepted_tokens_per_pos == []
    assert stats.draft_acceptance_rate == 0
    assert stats.mean_acceptance_length == 1
    assert stats.tokens_per_step == 1


def test_nothing_divides_by_zero():
    stats = Stats()
    assert stats.tokens_per_second == stats.tokens_per_step == 0


def test_times_add_up():
    stats = drafting(Draft.one_hot((2, 3))).generate([0], num_draft_tokens=4, max_tokens=9).stats
    assert stats.prefill_seconds > 0
    assert 0 < stats.model_seconds <= stats.decode_seconds
    assert stats.tokens_per_second == pytest.approx(8 / stats.decode_seconds)


def test_the_json_form():
    result = drafting(Draft.one_hot((2, 3))).generate([0], num_draft_tokens=4, max_tokens=4)
    record = result.to_dict()
    assert list(record) == [
        *("text", "token_ids", "finish_reason", "prompt_tokens", "seed", "stats")
    ]
    assert record["finish_reason"] == "length"
    assert type(record["finish_reason"]) is str
    assert record["prompt_tokens"] == 1
    assert list(record["stats"]) == [
        *("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
        *("num_accepted_tokens_per_pos", "draft_acceptance_rate", "mean_acceptance_length"),
        *("tokens_per_step", "prefill_seconds", "decode_seconds", "model_seconds"),
        "tokens_per_second",
    ]
    record["stats"]["num_accepted_tokens_per_pos"].append(9)
    assert result.stats.num_accepted_tokens_per_pos == [1, 1]
