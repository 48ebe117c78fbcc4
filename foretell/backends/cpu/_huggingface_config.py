"""A decoder's shape out of a Hugging Face `config.json`.

Defaults of missing fields are those of transformers 5 (`LlamaConfig`, `MistralConfig`,
`Qwen2Config`, `Qwen3Config`), because that is how such files are meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell._errors import CorruptModelError, UnsupportedModelError
from foretell.backends.cpu._config import ARCHITECTURES, RUNNABLE, DecoderConfig, RopeScaling
from foretell.backends.cpu._fields import Fields

_MAX_LENGTH_DEFAULT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}

# Fields of relatives of these architectures (Granite, Gemma, MiniCPM, mixtures of experts, ...)
# that change the arithmetic. Their neutral values are harmless; any other value is another model.
_ALIEN_FIELDS = (
    "attention_multiplier",
    "attention_sinks",
    "attn_logit_softcapping",
    "dim_model_base",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logits_scaling",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "partial_rotary_factor",
    "qk_norm",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
    "use_qk_norm",
)


def read_huggingface_config(config: Mapping[str, Any], *, source: str) -> DecoderConfig:
    """See `DecoderConfig.from_huggingface`."""
    fields = Fields(config, source)
    architecture = _huggingface_architecture(fields)
    _refuse_alien_fields(fields)
    heads = fields.size("num_attention_heads")
    max_length = fields.size("max_position_embeddings", _MAX_LENGTH_DEFAULT[architecture])
    num_layers = fields.size("num_hidden_layers")
    _refuse_sliding_window(fields, architecture, num_layers, max_length)
    qwen2 = architecture == "qwen2"
    # Mistral has no attention_bias, and Qwen2's biases are not an option.
    bias = architecture in ("llama", "qwen3") and fields.flag("attention_bias", False)
    theta, scaling = _huggingface_rope(fields, max_length)
    with fields.named():
        return DecoderConfig(
            architecture=architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=_huggingface_kv_heads(fields, architecture, heads),
            head_dim=_huggingface_head_dim(fields, architecture, heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_length=max_length,
            rope_scaling=scaling,
            tied=fields.flag("tie_word_embeddings", False),
            attention_bias=qwen2 or bias,
            output_bias=bias,
            mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
            qk_norm=architecture == "qwen3",
            hidden_act=fields.text("hidden_act", "silu"),
        )


def _huggingface_architecture(fields: Fields) -> str:
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.source}: model_type is {model_type!r}; {RUNNABLE}, so use one of those"
        )
    expected = f"{model_type.capitalize()}ForCausalLM"
    classes = fields.get("architectures")
    if classes and classes != [expected]:
        raise UnsupportedModelError(
            f"{fields.source}: architectures is {classes!r}, but only {[expected]!r} generates "
            "text the way this backend computes it; use the model's causal language model"
        )
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            raise UnsupportedModelError(
                f"{fields.source}: {name} is set, so the weights are packed in a way this backend "
                "does not read; use the original float16 or bfloat16 checkpoint, or a GGUF file"
            )
    return model_type


def _refuse_alien_fields(fields: Fields) -> None:
    for name in _ALIEN_FIELDS:
        value = fields.get(name)
        if value is not True and value in (None, False, 0, 1, [], {}):
            continue
        raise UnsupportedModelError(
            f"{fields.source}: {name} is {value!r}, which changes the model's arithmetic in a way "
            f"this backend does not compute; {RUNNABLE} without it"
        )


def _refuse_sliding_window(
    fields: Fields, architecture: str, num_layers: int, max_length: int
) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or len(layer_types) != num_layers
    ):
        raise CorruptModelError(
            f"{fields.source}: layer_types must list one type for each of the {num_layers} layers"
        )
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{fields.source}: layer_types contains {kind!r}; {RUNNABLE} whose layers are all "
                "'full_attention'"
            )
    if architecture in ("qwen2", "qwen3"):
        window = fields.optional_size("sliding_window", 4096)
        if not fields.flag("use_sliding_window", False):
            window = None
        sliding_layers = num_layers > fields.count("max_window_layers", 28)
    else:
        window = fields.optional_size("sliding_window", 4096 if architecture == "mistral" else None)
        sliding_layers = True
    if layer_types is not None:
        sliding_layers = "sliding_attention" in layer_types
        if sliding_layers and window is None:
            raise CorruptModelError(
                f"{fields.source}: layer_types has 'sliding_attention' but there is no "
                "sliding_window in use"
            )
    if window is not None and sliding_layers and window < max_length:
        raise UnsupportedModelError(
            f"{fields.source}: sliding_window is {window} (transformers' default where the field "
            f"is missing), less than max_position_embeddings ({max_length}), so some layers see "
            "only the last tokens, which this backend does not compute; use a version of the "
            "model with full attention"
        )


def _huggingface_kv_heads(fields: Fields, architecture: str, heads: int) -> int:
    if not fields.has("num_key_value_heads"):
        return _KV_HEADS_DEFAULT.get(architecture, heads)
    value = fields.optional_size("num_key_value_heads", None)
    return heads if value is None else value


def _huggingface_head_dim(fields: Fields, architecture: str, heads: int) -> int:
    value = fields.optional_size("head_dim", 128 if architecture == "qwen3" else None)
    if value is not None:
        return value
    hidden = fields.size("hidden_size")
    if hidden % heads:
        raise CorruptModelError(
            f"{fields.source}: hidden_size ({hidden}) is not a multiple of num_attention_heads "
            f"({heads}) and head_dim is missing"
        )
    return hidden // heads


def _huggingface_rope(fields: Fields, max_length: int) -> tuple[float, RopeScaling]:
    # transformers 4 wrote rope_theta and rope_scaling, transformers 5 writes rope_parameters;
    # version 5 reads both with this precedence.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.nested(name)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "" if rope.has("factor") else "default"))
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{rope.source}: partial_rotary_factor is {partial!r}; {RUNNABLE} that rotate whole "
            "heads (1.0)"
        )
    with rope.named():
        if kind == "default":
            return theta, RopeScaling()
        if kind == "linear":
            return theta, RopeScaling("linear", factor=rope.number("factor"))
        if kind == "llama3":
            # transformers lets the config's own field win over the nested one.
            original = rope.size("original_max_position_embeddings", max_length)
            return theta, RopeScaling(
                "llama3",
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_length=fields.size("original_max_position_embeddings", original),
            )
    raise UnsupportedModelError(
        f"{rope.source}: rope_type is {kind!r}; this backend computes 'default', 'linear' and "
        "'llama3' rotary positions, so use a model (or a setting of this one) with those"
    )
