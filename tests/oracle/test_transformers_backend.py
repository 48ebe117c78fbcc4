"""The transformers backend: the contract of a Model, and speculation that changes nothing.

Over tiny random models of many architectures, in float32 on the CPU, where results are compared
bit by bit; and with torch's own arithmetic, where differences are measured.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

torch = pytest.importorskip("torch", reason="needs: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")

import model_contract  # noqa: E402
import tiny_models  # noqa: E402

from foretell import (  # noqa: E402
    CapabilityError,
    ContextLengthError,
    CorruptModelError,
    Engine,
    ModelError,
    OptionError,
    Rows,
    UnsupportedModelError,
)
from foretell.backends.transformers import (  # noqa: E402
    InexactArithmeticWarning,
    TransformersModel,
)

PROMPT = [5, 17, 42, 9, 5, 17, 42, 8, 5, 17, 42, 9, 60, 61, 62, 60, 61]
DRAFTERS = ("suffix", "recycling", "prompt_lookup", "ngram", "draft_model", "early_exit")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7, "top_p": 0.95},
}
NEAR_TIE = 1e-3


@cache
def engine_of(name: str) -> Engine:
    draft = TransformersModel(tiny_models.make("llama", seed=9), self_test=False)
    return Engine(tiny_models.make(name), draft=draft, drafters=list(DRAFTERS))


@cache
def plain_tokens(name: str, setting: str) -> list[int]:
    result = engine_of(name).generate(
        PROMPT, max_tokens=40, num_draft_tokens=0, ignore_eos=True, **SETTINGS[setting]
    )
    return result.token_ids


# --- The contract ----------------------------------------------------------------------


@cache
def model_of(name: str) -> TransformersModel:
    changes = {"n_positions": 80} if name == "gpt2" else {"max_position_embeddings": 80}
    return TransformersModel(tiny_models.make(name, **changes))


@pytest.mark.parametrize("check", model_contract.CHECKS, ids=model_contract.name)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon"])
def test_contract(name: str, check: model_contract.Check) -> None:
    check(model_of(name))


# --- Row invariance, and speculation that changes nothing ---------------------------------


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_every_architecture_passes_the_self_test(name: str) -> None:
    model = engine_of(name).model
    assert isinstance(model, TransformersModel)
    assert model.exact, model.exactness
    assert model.difference is not None
    assert model.difference.largest == 0
    assert model.near_tie_gap == 0
    assert model.capabilities.rollback
    assert model.capabilities.tree == (name in tiny_models.TREES)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_every_drafter_equals_plain_decoding(name: str, setting: str) -> None:
    engine, expected = engine_of(name), plain_tokens(name, setting)
    accepted = 0
    for drafter in DRAFTERS:
        [request] = engine.prepare(
            PROMPT,
            sampling(setting),
            num_draft_tokens=5,
            drafters=[drafter],
        )
        tokens, stats = run(engine, request)
        assert tokens == expected, drafter
        accepted += stats.num_accepted_tokens
    together = engine.generate(PROMPT, max_tokens=40, ignore_eos=True, **SETTINGS[setting])
    assert together.token_ids == expected
    assert accepted > 0, "nothing was accepted, which proves little"


def sampling(setting: str) -> Any:
    from foretell import SamplingParams

    return SamplingParams(max_tokens=40, ignore_eos=True, **SETTINGS[setting])


def run(engine: Engine, request: Any) -> tuple[list[int], Any]:
    from foretell._decode import decode

    tokens: list[int] = []
    for _, emitted in decode(engine.model, [request]):
        tokens += emitted.tokens
    return tokens, request.stats


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_generate_of_transformers_agrees_in_float32(name: str, capsys: Any) -> None:
    model = engine_of(name).model._user_model  # type: ignore[attr-defined]
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    theirs = output.sequences[0, len(PROMPT) :].tolist()
    ours = engine_of(name).generate(PROMPT, max_tokens=40, min_tokens=40).token_ids
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            gap = float((output.logits[at][0, other] - output.logits[at][0, one]).abs())
            with capsys.disabled():
                print(f"\n{name}: another choice at token {at}, logit gap {gap:.1e}")
            assert gap < NEAR_TIE
            return


def test_early_exits_are_tuned_and_numbers_of_layers_are_checked() -> None:
    from foretell.bench._tune import settings_for

    engine = Engine(engine_of("gemma2").model, drafters=["early_exit:2"])
    assert {"early_exit:1", "early_exit:2"} <= {one.drafter for one in settings_for(engine)}
    expected = plain_tokens("gemma2", "greedy")
    drafted = engine.generate(PROMPT, max_tokens=40, ignore_eos=True, num_draft_tokens=3)
    assert drafted.token_ids == expected
    assert drafted.stats.num_draft_tokens > 0
    with pytest.raises(OptionError, match="from 1 to 3"):
        Engine(engine.model, drafters=["early_exit:4"])


def test_a_chat_goes_on_from_its_cache_and_stays_the_same() -> None:
    model = engine_of("qwen3").model
    session = model.new_session()
    model.forward([Rows(session, PROMPT, logits="none")])
    session.keep(range(len(PROMPT)))
    session.rollback(5)
    again = model.forward([Rows(session, PROMPT[-5:])]).logits
    fresh = model.forward([Rows(model.new_session(), PROMPT)]).logits[-5:]
    assert again.tobytes() == fresh.tobytes()


def test_several_sessions_share_a_pass_of_a_model_with_windows() -> None:
    model = engine_of("mistral").model
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:]]
    alone = [model.forward([Rows(model.new_session(), p)]).logits for p in prompts]
    together = model.forward([Rows(model.new_session(), p) for p in prompts])
    for index, expected in enumerate(alone):
        assert together.of(index).logits.tobytes() == expected.tobytes()


def test_hidden_states_are_those_of_transformers() -> None:
    model = engine_of("llama").model
    output = model.forward([Rows(model.new_session(), PROMPT, hidden=(0, 1))])
    with torch.inference_mode():
        theirs = model._user_model(  # type: ignore[attr-defined]
            torch.tensor([PROMPT]), output_hidden_states=True
        ).hidden_states
    for layer in (0, 1):
        assert np.abs(output.hidden[layer] - theirs[layer + 1][0].numpy()).max() < 1e-4


def test_a_model_in_a_list_of_threads_gives_the_same_bits() -> None:
    source = tiny_models.make("llama")
    one, two = (TransformersModel(source, threads=threads, self_test=False) for threads in (1, 2))
    logits = [m.forward([Rows(m.new_session(), PROMPT * 4)]).logits for m in (one, two)]
    assert logits[0].tobytes() == logits[1].tobytes()


def test_weights_are_live() -> None:
    source = tiny_models.make("llama")
    model = TransformersModel(source, self_test=False)
    before = model.forward([Rows(model.new_session(), PROMPT)]).logits
    with torch.no_grad():
        source.model.layers[0].mlp.down_proj.weight.mul_(2)
        source.lm_head.weight = torch.nn.Parameter(source.lm_head.weight * 3)
    after = model.forward([Rows(model.new_session(), PROMPT)]).logits
    expected = source(torch.tensor([PROMPT])).logits[0].detach().numpy()
    assert np.abs(after - expected).max() < 1e-3
    assert np.abs(after - before).max() > 1


# --- What cannot be exact -----------------------------------------------------------------


def test_without_exactness_the_difference_is_measured_and_near_ties_are_counted() -> None:
    with pytest.warns(InexactArithmeticWarning, match="num_near_ties"):
        engine = Engine(tiny_models.make("llama"), exact=False)
    assert isinstance(engine.model, TransformersModel)
    assert not engine.model.exact
    assert 0 < engine.model.near_tie_gap < 1e-2
    assert "first in " in engine.model.exactness
    result = engine.generate(PROMPT, max_tokens=8)
    assert result.stats.num_near_ties is not None
    engine.model.near_tie_gap = 1e9
    assert engine.generate(PROMPT, max_tokens=8, ignore_eos=True).stats.num_near_ties == 8
    assert engine.generate(PROMPT, max_tokens=8).stats.to_dict()["num_near_ties"] >= 1


def test_the_self_test_names_the_module_that_depends_on_its_rows() -> None:
    source = tiny_models.make("llama")
    broken = source.model.layers[1].mlp

    class Crowded(type(broken)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * (1 + 0.001 * (x.shape[1] > 1))

    broken.__class__ = Crowded
    with pytest.warns(InexactArithmeticWarning):
        model = TransformersModel(source)
    assert not model.exact
    assert model.difference is not None
    assert model.difference.module == "model.layers.1.mlp (Crowded)"
    assert model.difference.by > 0


def test_bfloat16_runs_and_says_how_far_it_reaches() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine = Engine(tiny_models.make("llama").to(torch.bfloat16))
    assert len([w for w in seen if w.category is InexactArithmeticWarning]) <= 1
    assert engine.generate(PROMPT, max_tokens=8, ignore_eos=True).stats.num_near_ties is not None


@pytest.mark.parametrize("name", tiny_models.HYBRIDS)
def test_a_hybrid_is_refused_by_name_and_decodes_plainly(name: str) -> None:
    source = tiny_models.make(name)
    engine = Engine(source)
    with pytest.raises(CapabilityError, match=r"LinearAttentionLayer.*num_draft_tokens=0"):
        engine.generate(PROMPT, max_tokens=4)
    ours = engine.generate(PROMPT, max_tokens=12, min_tokens=12, num_draft_tokens=0).token_ids
    theirs = source.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    assert ours == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("kind", ["static", "quantized"])
def test_caches_that_cannot_be_rolled_back_are_refused_by_name(kind: str) -> None:
    source = tiny_models.make("llama")
    source.generation_config.cache_implementation = kind
    if kind == "quantized":
        pytest.importorskip("optimum.quanto", reason="quantized caches need optimum-quanto")
        # A group must divide what there is of keys, which is little here.
        source.generation_config.cache_config = {"q_group_size": source.config.head_dim}
    engine = Engine(source)
    with pytest.raises(CapabilityError, match=kind):
        engine.generate(PROMPT, max_tokens=4)
    assert len(engine.generate(PROMPT, max_tokens=4, num_draft_tokens=0).token_ids) >= 1


def test_a_rotary_embedding_that_changes_with_the_length_is_refused() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    engine = Engine(tiny_models.make("llama", rope_parameters=parameters))
    with pytest.raises(CapabilityError, match="dynamic"):
        engine.generate(PROMPT, max_tokens=4)


# --- Bad input ----------------------------------------------------------------------------


def test_what_is_no_causal_model_is_refused() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine(t5)
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        Engine(tiny_models.make("llama").model)


def test_options_that_do_not_fit_are_refused() -> None:
    source = tiny_models.make("llama")
    with pytest.raises(OptionError, match="loaded already"):
        Engine(source, backend="cpu")
    with pytest.raises(OptionError, match="device"):
        Engine(source, device="cpu")
    with pytest.raises(OptionError, match="exact=True needs float32"):
        Engine(source.to(torch.bfloat16), exact=True)
    with pytest.raises(OptionError, match="int8"):
        Engine(source, dtype="int8")
    with pytest.raises(OptionError, match="torch cannot use"):
        Engine("nowhere", device="abacus")


def test_gguf_files_are_the_other_backends(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for source in ("demo", str(file)):
        with pytest.raises(OptionError, match=r"GGUF file.*leave backend out"):
            Engine(source, backend="transformers")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    tiny_models.make("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:9], b""):
        weights.write_bytes(damaged)
        with pytest.raises(CorruptModelError, match=f"weights of {tmp_path} are damaged"):
            Engine(str(tmp_path), backend="transformers")
    weights.write_bytes(whole)
    for config in ("{", "[]", '{"model_type": "llama", "hidden_size": "x"}'):
        (tmp_path / "config.json").write_text(config, "utf-8")
        with pytest.raises(ModelError, match="transformers cannot load"):
            Engine(str(tmp_path), backend="transformers")


def test_models_on_different_devices_are_refused() -> None:
    source = tiny_models.make("llama")
    source.lm_head.to("meta")
    with pytest.raises(OptionError, match="one device"):
        Engine(source)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="160"):
        engine_of("llama").generate([5] * 160, max_tokens=4)


# --- The user's objects -------------------------------------------------------------------


def snapshot(model: Any) -> dict[str, Any]:
    gc.collect()
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "weights": {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()},
        "buffers": {name: (id(b), b.detach().clone()) for name, b in model.named_buffers()},
        "modules": {name: id(module) for name, module in model.named_modules()},
        "states": {
            name: sorted((key, id(value)) for key, value in vars(module).items() if key != "config")
            for name, module in model.named_modules()
        },
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
        "training": {name: module.training for name, module in model.named_modules()},
        "threads": torch.get_num_threads(),
    }


def assert_unchanged(before: dict[str, Any], model: Any) -> None:
    after = snapshot(model)
    for part in ("weights", "buffers"):
        old, new = before.pop(part), after.pop(part)
        assert old.keys() == new.keys()
        for name, (identity, value) in old.items():
            assert new[name][0] == identity, name
            assert torch.equal(new[name][1], value), name
    assert before == after


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon", "mixtral"])
def test_the_model_is_never_changed_also_not_by_an_exception(name: str) -> None:
    model = tiny_models.make(name)
    model.train()
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    before = snapshot(model)
    engine = Engine(model, drafters=["suffix"])
    assert_unchanged(before, model)

    before = snapshot(model)
    expected = engine.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids
    assert_unchanged(before, model)

    class Interrupted(Exception):
        pass

    def interrupt() -> bool:
        raise Interrupted

    before = snapshot(model)
    stream = engine.stream(PROMPT, max_tokens=10, is_cancelled=interrupt)
    with pytest.raises(Interrupted):
        list(stream)
    embeddings = engine.model._shadow.get_input_embeddings()  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise Interrupted

    broken = embeddings.register_forward_hook(fail)
    with pytest.raises(Interrupted):
        engine.generate(PROMPT, max_tokens=10)
    broken.remove()
    assert_unchanged(before, model)
    assert engine.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids == expected
    handle.remove()


# --- Loading ------------------------------------------------------------------------------


def test_auto_says_which_backend_and_why(tmp_path: Path) -> None:
    tiny_models.make("llama").save_pretrained(tmp_path / "llama")
    tiny_models.make("gpt2").save_pretrained(tmp_path / "gpt2")
    known = Engine(tmp_path / "llama")
    assert known.backend.startswith("cpu: ")
    notes: list[str] = []
    other = Engine(tmp_path / "gpt2", tokenizer=known.tokenizer, progress=notes.append)
    assert other.backend.startswith("transformers: the cpu backend does not know it")
    assert other.backend in notes
    asked = Engine(tmp_path / "llama", backend="transformers")
    assert asked.backend == "transformers: asked for"
    assert asked.generate(PROMPT, max_tokens=20).token_ids == (
        known.generate(PROMPT, max_tokens=20).token_ids
    )
    eager = Engine(tmp_path / "llama", attn_implementation="eager")
    assert "attn_implementation='eager'" in eager.backend
    assert isinstance(eager.model, TransformersModel)
    assert eager.model.exact
