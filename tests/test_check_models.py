"""The bitwise part on models of one's own, right and broken ones."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_core import chat_tokenizer

from foretell import Capabilities, Engine, InputError, OptionError, SamplingParams
from foretell._verify import RULES
from foretell.backends.table import TableModel
from foretell.check import Result, Verdict, check
from foretell.check._bitwise import difference, gap, run, scored
from foretell.check._on_models import _encoded, model_jobs
from foretell.check._planted import MisrollingModel
from foretell.check._replay import Replay
from foretell.drafters import DraftModel


def bitwise(engine, prompts=None, *, quick=True, rules=RULES):
    found = [one for job in model_jobs(engine, prompts, rules, 0, quick) for one in job.run()]
    return [one for one in found if hasattr(one, "result")], [
        one for one in found if not hasattr(one, "result")
    ]


class Wider(TableModel):
    """A model whose rows depend on how many share the pass: what row invariance forbids."""

    step = 0.0

    def forward(self, rows):
        output = super().forward(rows)
        if len(rows[0].tokens) > 1:
            output.logits[:, 1] += self.step
        return output


def test_a_right_model_passes_and_the_controls_are_caught():
    model = TableModel.random(30, 2, seed=1)
    engine = Engine(model, draft=TableModel.random(30, 1, seed=2))
    cases, controls = bitwise(engine, quick=False)
    assert {case.result for case in cases} == {Result.PASSED}
    assert {case.rule for case in cases} == set(RULES)
    names = {case.name for case in cases}
    assert {"greedy, draft_model", "sampled, half right tree", "greedy, perfect"} <= names
    assert sum(case.numbers["drafted"] for case in cases) > 100
    assert [control.was_found for control in controls] == [True, True]


@pytest.mark.parametrize("quick", [True, False])
def test_every_drafter_has_something_to_say_about_the_built_in_prompts(quick):
    """On the demo model, whose answers are the ones a newcomer sees checked."""
    cases, _ = bitwise(Engine("demo"), quick=quick, rules={"match": RULES["match"]})
    assert {case.result for case in cases} == {Result.PASSED}
    for name in ("suffix", "recycling", "prompt_lookup", "ngram"):
        for way in ("greedy", "sampled"):
            [case] = [case for case in cases if case.name == f"{way}, {name}"]
            assert case.numbers["accepted"] > 0, case
            assert case.numbers["drafted"] >= case.numbers["accepted"], case
            said = f"{case.numbers['drafted']} drafted, {case.numbers['accepted']} accepted"
            assert said in case.detail


def test_a_drafter_that_drafted_nothing_was_not_tested():
    """No two tokens of prompt and answer are alike, so there is nothing to look up."""
    table = np.zeros((40, 40), np.float32)
    table[range(40), [*range(1, 40), 0]] = 9.0
    cases, _ = bitwise(Engine(TableModel(table)), [[1, 2, 3]])
    [lookup] = [c for c in cases if (c.name, c.rule) == ("greedy, prompt_lookup", "match")]
    assert lookup.result is Result.SKIPPED
    assert lookup.detail == "drafted nothing in 8 tokens, so this shows nothing"
    [ngram] = [c for c in cases if (c.name, c.rule) == ("greedy, perfect", "match")]
    assert ngram.result is Result.PASSED


def test_only_what_a_rule_guarantees_is_reported():
    cases, _ = bitwise(Engine(TableModel.random(30, 2, seed=1)))
    promised = {(case.rule, case.name.split(",")[0]): case.numbers["promised"] for case in cases}
    assert promised[("match", "sampled")] == "same tokens"
    assert promised[("rejection", "greedy")] == "same tokens"
    assert promised[("block", "sampled")] == "same distribution"


def test_a_model_that_rounds_by_the_width_of_the_pass_is_a_violation():
    model = Wider(TableModel.random(30, 2, seed=1).table)
    model.step = 1e-4
    cases, _ = bitwise(Engine(model))
    failed = [case for case in cases if case.result is Result.FAILED]
    assert any("log-probabilities differ from output token" in case.detail for case in failed)
    model.step = 3.0
    cases, _ = bitwise(Engine(model))
    case = next(c for c in cases if c.result is Result.FAILED and "instead of" in c.detail)
    assert "the two best logits there are" in case.detail
    first = case.numbers["differences"][0]
    assert first["what"] == "tokens"
    assert first["gap"] > 0
    assert first["expected"] != first["got"]


def test_a_cache_that_is_wrong_where_no_token_shows_it_is_found():
    table = np.zeros((4, 4), np.float32)
    table[:, 1] = 9.0  # says 1 whatever comes before
    engine = Engine(TableModel(table))
    sampling = SamplingParams(max_tokens=6)
    plain = run(engine, [2], sampling)
    drafter = Replay([2, *plain.result.token_ids], 4, 1.0)
    for surplus in (1, -1):
        broken = run(
            engine,
            [2],
            sampling,
            model=MisrollingModel(engine.model, surplus),
            drafter=drafter,
            num_draft_tokens=2,
        )
        assert broken.result.token_ids == plain.result.token_ids
        found = difference(plain, broken)
        assert found is not None
        assert found.what == "cache"


def test_scoring_gives_what_plain_decoding_computed():
    engine = Engine(TableModel.random(12, 2, seed=4))
    plain = run(engine, [1, 2, 3], SamplingParams(temperature=1.0, seed=5, max_tokens=20))
    assert difference(plain, scored(engine.model, [1, 2, 3], plain.result)) is None
    assert gap(plain.logprobs[0]) >= 0


def test_a_model_that_cannot_roll_back_is_skipped_with_the_reason():
    table = TableModel.random(9, 1, seed=1).table
    model = TableModel(table, capabilities=Capabilities(rollback=False))
    cases, controls = bitwise(Engine(model))
    assert [case.result for case in cases] == [Result.SKIPPED]
    assert "cannot roll back" in cases[0].detail
    assert controls == []


def test_a_model_without_trees_is_checked_on_chains():
    table = TableModel.random(9, 1, seed=1).table
    cases, _ = bitwise(Engine(TableModel(table, capabilities=Capabilities(tree=False))))
    assert {case.result for case in cases} == {Result.PASSED}


def test_prompts_are_texts_or_ids():
    engine = Engine(TableModel.random(131, 1, seed=1), tokenizer=chat_tokenizer(131))
    chat, ids = _encoded(engine, ["hello", [1, 2, 3]])
    assert ids == [1, 2, 3]
    assert chat == engine.encode(messages=[{"role": "user", "content": "hello"}])
    bare = Engine(TableModel.random(9, 1, seed=1))
    assert all(0 <= token < 9 for prompt in _encoded(bare, None) for token in prompt)
    with pytest.raises(InputError, match="no tokenizer"):
        _encoded(bare, ["hello"])
    for prompts in ("hello", []):
        with pytest.raises(OptionError, match="pass a list"):
            _encoded(engine, prompts)


def test_a_replay_drafts_the_text_with_mistakes():
    text = list(range(10, 20))
    assert Replay(text, 50, 0.0).propose(text[:3], 4).tokens == (13, 14, 15, 16)
    wrong = Replay(text, 50, 1.0).propose(text[:3], 4).tokens
    assert all(a != b for a, b in zip(wrong, text[3:7], strict=True))
    tree = Replay(text, 50, 0.5, trees=True).propose(text[:3], 7)
    assert len(tree) == 7
    assert tree.child(0, 13) is not None
    assert len(Replay(text, 50, 0.0).propose(text, 4)) == 0


def test_the_whole_check_on_a_model():
    draft = DraftModel(TableModel.random(20, 1, seed=2))
    shares: list[float] = []
    report = check(
        Engine(TableModel.random(20, 2, seed=1), drafters=[draft]),
        [[1, 2, 3]],
        quick=True,
        progress=lambda share, name: shares.append(share),
    )
    assert report.verdict is Verdict.LOSSLESS
    record = report.to_dict()
    assert record["engine"]["drafters"] == ["draft_model"]
    assert record["model"]["logits_hash"].startswith("sha256:")
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
