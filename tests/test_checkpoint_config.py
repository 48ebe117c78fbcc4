"""What of a config is understood, and that everything else is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, modern_config

from foretell._errors import CorruptModelError, ModelError, UnsupportedModelError
from foretell.backends.cpu._config import DecoderConfig, RopeScaling, rope_inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(family: str = "llama", **changes: Any) -> DecoderConfig:
    """A family's config with fields changed; the value ... removes a field."""
    config = {**FAMILIES[family], **changes}
    return DecoderConfig.from_huggingface({k: v for k, v in config.items() if v is not ...})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_styles_of_transformers_4_and_5_mean_the_same(family):
    classic = DecoderConfig.from_huggingface(FAMILIES[family])
    assert DecoderConfig.from_huggingface(modern_config(FAMILIES[family])) == classic


def test_a_llama_config_is_read_field_by_field():
    config = read("llama", rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=True)
    assert config == DecoderConfig(
        architecture="llama",
        vocab_size=288,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_length=512,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        tied=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=False,
        qk_norm=False,
    )


def test_missing_fields_have_the_defaults_of_transformers():
    llama = read(
        "llama", head_dim=None, num_key_value_heads=..., max_position_embeddings=..., rope_theta=...
    )
    assert (llama.head_dim, llama.num_kv_heads, llama.max_length) == (16, 4, 2048)
    assert (llama.rope_theta, llama.rope_scaling.kind, llama.tied) == (10_000.0, "default", False)
    assert read("llama", rms_norm_eps=...).rms_norm_eps == 1e-6
    assert read("qwen3", head_dim=...).head_dim == 128
    assert read("qwen3", num_key_value_heads=None).num_kv_heads == 4
    assert read("qwen2", num_key_value_heads=..., num_attention_heads=32).num_kv_heads == 32
    wide = read("mistral", num_key_value_heads=..., num_attention_heads=16)
    assert wide.num_kv_heads == 8
    assert read("qwen2", max_position_embeddings=...).max_length == 32768


def test_biases_and_norms_follow_the_architecture():
    qwen2, qwen3 = read("qwen2"), read("qwen3", attention_bias=False)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert read("qwen3", attention_bias=True).output_bias
    assert not read("mistral", attention_bias=True).attention_bias


def test_rope_settings_are_found_in_either_place():
    nested = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    assert read(rope_parameters=nested, rope_scaling=None, rope_theta=...).rope_theta == 77.0
    assert read(rope_parameters=nested, rope_theta=5.0).rope_theta == 77.0
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling.factor == 2.0
    own = read(rope_scaling=LLAMA3, original_max_position_embeddings=32).rope_scaling
    assert own.original_max_length == 32
    unnamed = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert read(rope_scaling=unnamed).rope_scaling.original_max_length == 512


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4},
        {"use_sliding_window": True, "sliding_window": 512},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * 3},
        {
            "quantization_config": None,
            "partial_rotary_factor": 1.0,
            "final_logit_softcapping": None,
        },
    ],
)
def test_settings_without_effect_are_accepted(changes):
    assert read("qwen2", **changes) == read("qwen2")


UNSUPPORTED = [
    (
        "llama",
        {"model_type": "gemma3"},
        "model_type is 'gemma3'; .*Llama, Mistral, Qwen2 and Qwen3",
    ),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is "),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; .*'silu' only"),
    (
        "llama",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config is set.*GGUF",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"attention_multiplier": 0.1}, "attention_multiplier is 0.1"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm is True"),
    ("llama", {"sliding_window": 100}, "sliding_window is 100.*full attention"),
    ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "sliding_window is 4096"),
    ("mistral", {"sliding_window": 511}, "sliding_window is 511.*max_position_embeddings .512"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "is 9"),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "sliding_window is 64",
    ),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention", "x"]}, "'linear_attention'"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type is 'yarn'.*linear",
    ),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}},
        "rope_scaling: partial_rotary_factor is 0.25",
    ),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_type is ''"),
]


@pytest.mark.parametrize(("family", "changes", "message"), UNSUPPORTED)
def test_another_model_is_refused_by_the_name_of_the_field(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(family, **changes)
    assert str(caught.value).startswith("config.json")


CORRUPT = [
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"vocab_size": 0}, "vocab_size is 0, but it must be a positive integer"),
    ({"vocab_size": -3}, "vocab_size is -3"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    ({"num_hidden_layers": 3.0}, "num_hidden_layers is 3.0"),
    ({"num_hidden_layers": 20_000}, "num_layers is 20000"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"num_key_value_heads": 3}, "num_heads is 4, which is not a multiple of num_kv_heads .3"),
    ({"head_dim": 15}, "head_dim is 15, .*even"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": ..., "hidden_size": 62}, r"hidden_size \(62\) is not a multiple"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"hidden_act": 5}, "hidden_act is 5"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, but it must be true or false"),
    ({"model_type": None}, "model_type is None"),
    ({"rope_scaling": "linear"}, "rope_scaling: a JSON object"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor < high_freq_factor"),
    ({"layer_types": ["full_attention"]}, "layer_types must list one type for each of the 3"),
    ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window in use"),
]


@pytest.mark.parametrize(("changes", "message"), CORRUPT)
def test_a_config_that_makes_no_sense_is_refused_by_the_name_of_the_field(changes, message):
    with pytest.raises(CorruptModelError, match=message) as caught:
        read("llama", **changes)
    assert str(caught.value).startswith("config.json")


def test_whatever_a_field_holds_nothing_but_a_model_error_comes_out():
    values = [None, True, -1, 0, 1, 2**70, 1.5, float("inf"), "", "x", [], [1], {}, {"a": {}}]
    messages = []
    for family, config in FAMILIES.items():
        for name in [*config, "layer_types", "sliding_window", "use_sliding_window", "head_dim"]:
            for value in values:
                try:
                    read(family, **{name: value})
                except ModelError as error:
                    messages.append(str(error))
    assert len(messages) > 1000
    assert all(message.startswith("config.json") for message in messages)


def frequencies(scaling: RopeScaling, head_dim: int = 8, theta: float = 10_000.0) -> np.ndarray:
    config = {**FAMILIES["llama"], "head_dim": head_dim, "rope_theta": theta}
    read_config = DecoderConfig.from_huggingface(config)
    return rope_inverse_frequencies(dataclasses.replace(read_config, rope_scaling=scaling))


def test_rotary_frequencies_follow_their_formulas():
    plain = frequencies(RopeScaling())
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_array_equal(frequencies(RopeScaling("linear", 4.0)), plain / np.float32(4))
    factors = (1.0, 2.0, 5.0, 10.0)
    by_table = frequencies(RopeScaling("factors", factors=factors))
    np.testing.assert_allclose(by_table, plain / factors, rtol=1e-6)
    # Wavelengths 6.3, 63, 628 and 6283 against 100 / 4 and 100 / 1.
    llama3 = frequencies(RopeScaling("llama3", 8.0, 1.0, 4.0, 100))
    smooth = (100 / 62.83185 - 1) / 3
    between = (1 - smooth) * 0.1 / 8 + smooth * 0.1
    np.testing.assert_allclose(llama3, [1.0, between, 0.01 / 8, 0.001 / 8], rtol=1e-5)


def test_rotary_frequencies_have_the_bits_of_transformers():
    config = {**FAMILIES["llama"], "head_dim": 16, "rope_theta": 500_000.0}
    scaling = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
    config |= {"max_position_embeddings": 131072, "rope_scaling": scaling}
    got = rope_inverse_frequencies(DecoderConfig.from_huggingface(config))
    # transformers 5.24 with torch 2.13: LlamaRotaryEmbedding(config).inv_freq, as integers.
    assert got.view(np.uint32).tolist() == [
        1065353216,
        1044812720,
        1025116360,
        1005516623,
        971060768,
        923781368,
        903811268,
        883754919,
    ]
