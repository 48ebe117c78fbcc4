"""The kit on transformers' own assisted generation, live."""

from __future__ import annotations

import pytest
from families import tiny_checkpoint

from foretell import ModelNotFoundError
from foretell.check import Result, Verdict, compare_engines
from foretell.check._transformers import pair

pytest.importorskip("torch", reason="needs: pip install torch")
pytest.importorskip("transformers", reason="needs: pip install transformers")

PROMPTS = ("red, green, blue, red, green, blue, red,", "hello hello hello", "abcabcabcabc")


@pytest.mark.parametrize("with_draft", [False, True])
def test_assisted_generation_is_compared_with_plain(tmp_path, with_draft):
    folder = tiny_checkpoint(tmp_path / "target", "llama", seed=1, tokenizer=True)
    draft = (
        tiny_checkpoint(tmp_path / "draft", "llama", seed=2, tokenizer=True) if with_draft else None
    )
    plain, assisted = pair(folder, draft, dtype="float32")
    report = compare_engines(plain, assisted, PROMPTS, max_tokens=12, samples=30)
    assert report.verdict in (Verdict.LOSSLESS, Verdict.NEAR_TIES), report.to_dict()
    greedy, logprobs, sampled = report.cases
    assert greedy.numbers["equal"] == len(PROMPTS)
    assert logprobs.numbers["largest_difference"] < 1e-3
    assert sampled.result is Result.PASSED
    assert report.about["engine"]["dtype"] == "float32"


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        pair(tmp_path)
