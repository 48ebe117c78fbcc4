"""`foretell.generate(model, ...)` gives what `model.generate(...)` gives, and names the rest."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

torch = pytest.importorskip("torch", reason="needs: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")

import tiny_models  # noqa: E402
from helpers_core import tokenizer_of  # noqa: E402
from test_transformers_backend import assert_unchanged, snapshot  # noqa: E402

import foretell  # noqa: E402
from foretell import ContextLengthError, EmptyPromptError, InputError, OptionError  # noqa: E402

PROMPT = torch.tensor([[5, 17, 42, 9, 5, 17, 42, 8, 5, 17, 42, 9, 60, 61, 62, 60, 61]])
BATCH = torch.tensor(
    [
        [0, 0, 0, 11, 12, 13, 11, 12],
        [5, 17, 42, 9, 5, 17, 42, 8],
        [0, 0, 0, 0, 0, 0, 71, 3],
    ]
)
MASK = (BATCH != 0).long()


@cache
def model(name: str = "llama") -> Any:
    return tiny_models.make(name)


def both(*args: Any, name: str = "llama", **kwargs: Any) -> tuple[Any, Any]:
    """Ours and theirs, which may change neither model nor arguments."""
    source = model(name)
    before = snapshot(source)
    ours = foretell.generate(source, *args, **kwargs)
    assert_unchanged(before, source)
    theirs = source.generate(*args, **kwargs)
    return ours, theirs


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 30},
        {"max_length": 40, "min_length": 38},
        {"max_new_tokens": 20, "min_new_tokens": 20, "repetition_penalty": 1.3},
        {"max_new_tokens": 20, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [60, 61]]},
        {"max_new_tokens": 30, "eos_token_id": [9, 60]},
        {"generation_config": "config"},
    ],
    ids=["short", "lengths", "penalty", "ngrams", "ends", "config"],
)
def test_greedy_sequences_are_those_of_transformers(name: str, settings: dict[str, Any]) -> None:
    if settings == {"generation_config": "config"}:
        config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
        settings = {"generation_config": config}
    else:
        settings = {**settings, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(PROMPT)
    ours, theirs = both(PROMPT, attention_mask=mask, name=name, **settings)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_batch_with_left_padding_is_ragged_and_each_row_is_what_it_is_alone(name: str) -> None:
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": [2, 9]}
    ours, theirs = both(input_ids=BATCH, attention_mask=MASK, name=name, **settings)
    assert torch.equal(ours, theirs)
    lengths = set()
    for row, mask, whole in zip(BATCH, MASK, ours, strict=True):
        alone = foretell.generate(model(name), row[mask.bool()][None], **settings)[0]
        new = alone[int(mask.sum()) :]
        assert whole[8 : 8 + len(new)].tolist() == new.tolist()
        assert (whole[8 + len(new) :] == 0).all()
        lengths.add(len(new))


def test_scores_and_logits_are_returned() -> None:
    ours, theirs = both(
        PROMPT,
        max_new_tokens=10,
        do_sample=False,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        pad_token_id=0,
    )
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    for part in ("scores", "logits"):
        assert len(getattr(ours, part)) == len(getattr(theirs, part))
        for one, other in zip(getattr(ours, part), getattr(theirs, part), strict=True):
            assert one.shape == other.shape
            assert np.abs((one - other).numpy()).max() < 1e-4


class OnlyEven(transformers.LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[:, 1::2] = -float("inf")
        return scores


class Eleven(transformers.StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([len(row) % 11 == 0 for row in input_ids])


def test_processors_and_criteria_of_ones_own_are_asked() -> None:
    ours, theirs = both(
        PROMPT,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList([OnlyEven()]),
        stopping_criteria=transformers.StoppingCriteriaList([Eleven()]),
    )
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == 22
    assert (ours[0, 17:] % 2 == 0).all()


def test_allowed_tokens_are_the_only_ones() -> None:
    def allowed(batch: int, ids: Any) -> list[int]:
        return [int(ids[-1]) % 50 + 1, 44]

    ours, theirs = both(
        PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0, prefix_allowed_tokens_fn=allowed
    )
    assert torch.equal(ours, theirs)


def test_a_streamer_gets_the_prompt_and_every_token() -> None:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: Any) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    one, other = Streamer(), Streamer()
    settings = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    foretell.generate(model(), PROMPT, streamer=one, **settings)
    model().generate(PROMPT, streamer=other, **settings)
    assert one.got == other.got
    assert one.ended
    assert other.ended


def test_sampling_follows_its_seed_whatever_is_drafted() -> None:
    settings = {
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "pad_token_id": 0,
        "eos_token_id": 96,
    }
    torch.manual_seed(3)
    one = foretell.generate(model(), PROMPT, num_return_sequences=3, **settings)
    torch.manual_seed(3)
    other = foretell.generate(
        model(), PROMPT, num_return_sequences=3, num_draft_tokens=0, **settings
    )
    assert torch.equal(one, other)
    assert len({tuple(row.tolist()) for row in one}) == 3
    by_seed = [foretell.generate(model(), PROMPT, seed=5, **settings) for _ in range(2)]
    assert torch.equal(*by_seed)


def test_sampled_tokens_have_the_distribution_of_transformers() -> None:
    """Chi-square of the first token over 400 seeds at a false alarm of 1 in 10,000."""
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 6, "pad_token_id": 0}
    drawn = foretell.generate(
        model(), PROMPT, max_new_tokens=1, num_return_sequences=400, seed=1, **settings
    )[:, -1]
    logits = model()(PROMPT).logits[0, -1].detach() / 1.5
    best = logits.topk(6)
    expected = 400 * torch.softmax(best.values, -1)
    counts = torch.tensor([int((drawn == token).sum()) for token in best.indices])
    assert int(counts.sum()) == 400
    statistic = float((((counts - expected) ** 2) / expected).sum())
    assert statistic < 25.7  # 5 degrees of freedom


def test_a_draft_model_and_drafters_can_be_named() -> None:
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = foretell.generate(model(), PROMPT, **settings)
    draft = tiny_models.make("gpt2", seed=3)
    assert torch.equal(foretell.generate(model(), PROMPT, draft=draft, **settings), expected)
    early = foretell.generate(
        model(), PROMPT, drafters=["early_exit"], num_draft_tokens=3, **settings
    )
    assert torch.equal(early, expected)


def test_stop_strings_end_a_sequence() -> None:
    pieces = [bytes([33 + i]) for i in range(94)]
    inner = tokenizer_of(pieces).inner
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    free = foretell.generate(model(), PROMPT, max_new_tokens=20, pad_token_id=0, do_sample=False)
    stop = tokenizer.decode(free[0, 20:22])
    if not stop:
        pytest.skip("these ids have no text")
    ours, theirs = both(
        PROMPT,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    assert torch.equal(ours, theirs)
    assert ours.shape[1] <= 22


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"cache_implementation": "quantized"}, "cache_implementation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"use_cache": False}, "use_cache"),
        ({"assistant_model": "another"}, "assistant_model"),
        ({"position_ids": PROMPT}, "position_ids"),
        ({"inputs_embeds": PROMPT}, "inputs_embeds"),
        ({"max_new_tokns": 3}, "max_new_tokns"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"max_length": 17}, "max_length"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "top_k": -1}, "top_k"),
        ({"do_sample": True, "min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "penalty"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"num_return_sequences": -1, "do_sample": True}, "num_return_sequences"),
        ({"max_new_tokens": "x"}, "refuses"),
    ],
)
def test_what_is_not_covered_is_named(settings: dict[str, Any], name: str) -> None:
    before = snapshot(model())
    with pytest.raises(OptionError, match=name):
        foretell.generate(model(), PROMPT, **settings)
    assert_unchanged(before, model())


def test_inputs_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="once"):
        foretell.generate(model())
    with pytest.raises(InputError, match=r"\(batch, length\)"):
        foretell.generate(model(), PROMPT[0])
    with pytest.raises(InputError, match=r"\(batch, length\)"):
        foretell.generate(model(), PROMPT > 0)
    with pytest.raises(EmptyPromptError):
        foretell.generate(model(), PROMPT[:, :0])
    with pytest.raises(InputError, match="pad on the left"):
        foretell.generate(model(), BATCH, attention_mask=MASK.flip(1))
    with pytest.raises(EmptyPromptError, match="all padding"):
        foretell.generate(model(), BATCH, attention_mask=MASK * 0)
    with pytest.raises(InputError, match="shape"):
        foretell.generate(model(), BATCH, attention_mask=MASK[:2])
    with pytest.raises(ContextLengthError, match="160"):
        foretell.generate(model(), PROMPT, max_new_tokens=500)
    with pytest.raises(OptionError, match="one sequence"):
        foretell.generate(model(), BATCH, attention_mask=MASK, streamer=object())
    with pytest.raises(OptionError, match=r"foretell\.Engine"):
        foretell.generate("demo", PROMPT)  # type: ignore[arg-type]


def test_a_processor_that_fails_is_what_is_raised() -> None:
    class Broken(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            raise RuntimeError("broken")

    before = snapshot(model())
    with pytest.raises(RuntimeError, match="broken"):
        foretell.generate(
            model(), PROMPT, logits_processor=transformers.LogitsProcessorList([Broken()])
        )
    assert_unchanged(before, model())


def test_a_model_is_not_kept_longer_than_it_lives() -> None:
    source = tiny_models.make("llama", seed=4)
    foretell.generate(source, PROMPT, max_new_tokens=2, do_sample=False, pad_token_id=0)
    weight = weakref.ref(source.lm_head.weight)
    del source
    gc.collect()
    assert weight() is None
