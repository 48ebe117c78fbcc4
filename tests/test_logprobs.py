"""Log-probabilities are the target's own, and the same bits with and without speculation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from helpers_core import Fickle
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell import Engine, TokenLogprobs, _prefill
from foretell._logprobs import log_softmax, token_logprobs
from foretell.backends.table import TableModel


def naive(row, token):
    """From the definition, in exact summation."""
    best = max(row)
    return row[token] - best - math.log(math.fsum(math.exp(x - best) for x in row))


def row_after(model, tokens):
    return model.table[tuple([0] * model.order + list(tokens))[-model.order :]]


# --- One row -------------------------------------------------------------------------


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=9),
    st.integers(0, 8),
    st.integers(-1, 12),
)
def test_a_row_by_its_definition(values, token, count):
    token %= len(values)
    row = np.array(values, np.float32)
    entry = token_logprobs(row, token, count)
    assert entry.logprob == pytest.approx(naive(row.tolist(), token), abs=1e-12)
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    assert entry.rank == order.index(token) + 1
    wanted = len(row) if count < 0 else min(count, len(row))
    assert [t for t, _ in entry.top] == order[:wanted]
    for t, logprob in entry.top:
        assert logprob == token_logprobs(row, t, 0).logprob


def test_a_large_row():
    row = np.random.default_rng(0).normal(size=49_152).astype(np.float32)
    entry = token_logprobs(row, 5, 20)
    order = np.argsort(-row, kind="stable")
    assert [token for token, _ in entry.top] == order[:20].tolist()
    assert entry.logprob == pytest.approx(naive(row.tolist(), 5), abs=1e-12)
    whole = token_logprobs(row, 5, -1)
    assert [token for token, _ in whole.top] == order.tolist()
    assert math.fsum(math.exp(logprob) for _, logprob in whole.top) == pytest.approx(1, abs=1e-12)


def test_neither_place_nor_neighbours_of_a_row_matter():
    rows = np.random.default_rng(0).normal(size=(9, 1003)).astype(np.float32)
    for row in rows:
        assert token_logprobs(row, 7, 5) == token_logprobs(np.array(row), 7, 5)


def test_infinite_logits():
    row = np.array([0, -np.inf, 1], np.float32)
    entry = token_logprobs(row, 1, 3)
    assert entry.logprob == -math.inf
    assert [token for token, _ in entry.top] == [2, 0, 1]
    assert entry.to_dict()["logprob"] is None
    json.dumps(entry.to_dict(), allow_nan=False)
    row = np.array([0, np.inf, np.inf], np.float64)
    assert log_softmax(row).tolist() == [-math.inf, -math.log(2), -math.log(2)]


# --- Generations ---------------------------------------------------------------------

PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 2, "repetition_penalty": 1.4, "logit_bias": {1: 3}},
]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.sampled_from(PARAMS),
    st.integers(0, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_they_are_the_raw_rows_and_speculation_changes_no_bit(
    seed, prompt, params, count, n, trees
):
    model = TableModel.random(5, 2, seed=seed)
    model.eos_token_ids = (4,)
    options = {"logprobs": count, "prompt_logprobs": count, "n": n, "seed": seed, **params}
    engine = Engine(model, drafters=[Fickle(model, seed, trees=trees)])
    plain = engine.generate(prompt, num_draft_tokens=0, max_tokens=25, **options)
    result = engine.generate(prompt, num_draft_tokens=5, max_tokens=25, **options)
    for ours, theirs in zip(result.completions, plain.completions, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
        assert ours.prompt_logprobs == plain.prompt_logprobs
        tokens = [*prompt, *ours.token_ids]
        entries = [*ours.prompt_logprobs, *ours.logprobs]
        assert entries[0] is None
        for position in range(1, len(tokens)):
            row = row_after(model, tokens[:position])
            assert entries[position] == token_logprobs(row, tokens[position], count)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_other_rules_report_the_target_s_own_too(verification):
    model = TableModel.random(5, 2, seed=1)
    engine = Engine(model, draft=TableModel.random(5, 2, seed=2))
    result = engine.generate(
        [1, 2],
        num_draft_tokens=4,
        temperature=1,
        max_tokens=60,
        logprobs=2,
        seed=4,
        verification=verification,
    )
    assert {"draft", "correction", "bonus"} <= set(result.origins)
    tokens = [1, 2, *result.token_ids]
    for index, entry in enumerate(result.logprobs):
        assert entry == token_logprobs(row_after(model, tokens[: index + 2]), tokens[index + 2], 2)


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_the_prompt_s_do_not_depend_on_its_chunks(monkeypatch, chunk):
    model = TableModel.random(5, 2, seed=1)
    whole = Engine(model).generate([1, 2, 3, 4, 0, 1], prompt_logprobs=1, max_tokens=2)
    monkeypatch.setattr(_prefill, "SCORED_CHUNK", chunk)
    parts = Engine(model).generate([1, 2, 3, 4, 0, 1], prompt_logprobs=1, max_tokens=2)
    assert parts.prompt_logprobs == whole.prompt_logprobs
    assert parts.token_ids == whole.token_ids


def test_a_long_prompt_never_holds_all_its_rows():
    class Watching(TableModel):
        most = 0

        def forward(self, rows):
            output = super().forward(rows)
            self.most = max(self.most, len(output.logits))
            return output

    model = Watching(TableModel.random(5, 2, seed=1).table, max_length=3000)
    result = Engine(model).generate([1] * 2000, prompt_logprobs=0, max_tokens=1)
    assert len(result.prompt_logprobs) == 2000
    assert model.most <= 64


def test_events_carry_them():
    model = TableModel.random(5, 2, seed=1)
    events = list(Engine(model).stream([1, 2], logprobs=1, max_tokens=9))
    assert [event.logprobs for event in events[:-1]] == events[-1].result.logprobs
    assert all(isinstance(event.logprobs, TokenLogprobs) for event in events[:-1])


def test_nothing_is_reported_unasked():
    result = Engine(TableModel.random(5, 2, seed=1)).generate([1, 2], max_tokens=9)
    assert result.logprobs is result.prompt_logprobs is None
    assert {"logprobs", "prompt_logprobs"}.isdisjoint(result.to_dict())


def test_the_json_form():
    model = TableModel.random(5, 2, seed=1)
    result = Engine(model).generate([1, 2], max_tokens=2, logprobs=1, prompt_logprobs=0)
    record = json.loads(json.dumps(result.to_dict()))
    assert record["prompt_logprobs"][0] is None
    assert record["prompt_logprobs"][1]["top"] == []
    first = record["logprobs"][0]
    assert first["token_id"] == first["top"][0]["token_id"] == result.token_ids[0]
    assert first["rank"] == 1


def test_a_chat_scores_its_whole_prompt_again():
    from fake_engine import fake_engine

    chat = fake_engine().chat()
    chat.send("hi", max_tokens=3)
    turn = chat.send("and?", max_tokens=3, prompt_logprobs=0, logprobs=0)
    assert len(turn.prompt_logprobs) == turn.prompt_tokens
    assert len(turn.logprobs) == 3
