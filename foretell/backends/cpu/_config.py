"""What a decoder looks like: sizes, rotary positions, biases, ties.

One description for four architectures that differ in details only (Llama, Mistral, Qwen2, Qwen3).
Everything that would make the forward pass compute something else is refused here, by the name of
the field, so that a model either runs exactly or does not run at all.

Defaults of missing fields are those of transformers 5 (`LlamaConfig`, `MistralConfig`,
`Qwen2Config`, `Qwen3Config`), because that is how such files are meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError, UnsupportedModelError
from foretell.backends.cpu._fields import Fields

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
RUNNABLE = "Foretell's cpu backend runs Llama, Mistral, Qwen2 and Qwen3 models"

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


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on.

    `default`: not at all. `linear`: all divided by `factor`. `llama3`: low frequencies divided by
    `factor`, high ones kept, a ramp between (Llama 3.1). `factors`: divided one by one by `factors`
    (head_dim / 2 numbers), which is how GGUF files store the llama3 rule.
    """

    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise CorruptModelError(
                f"the rope scaling factor is {self.factor!r}, but it must be a positive number"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise CorruptModelError(
                f"rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor, not "
                f"{self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )
        if self.kind == "factors" and not all(math.isfinite(f) and f > 0 for f in self.factors):
            raise CorruptModelError("the rope factors (rope_freqs.weight) must be positive numbers")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only transformer with RMS norms, rotary positions and a gated MLP.

    Sizes count elements; `max_length` is the context in tokens. `attention_bias` says that the
    query, key and value projections have biases, `output_bias` that the attention output has one,
    `mlp_bias` that gate, up and down have them. `qk_norm` is Qwen3's RMS norm over each head's
    queries and keys. `tied` means that the output matrix is the embedding.

    Raises CorruptModelError for sizes that contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_length: int
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"the architecture is {self.architecture!r}; {RUNNABLE}, so use one of those"
            )
        if self.hidden_act != "silu":
            raise UnsupportedModelError(
                f"hidden_act is {self.hidden_act!r}; {RUNNABLE} with 'silu' only"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_length",
        ):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 2**31:
                raise CorruptModelError(f"{name} is {value!r}, but it must be a positive integer")
        if self.num_layers > 10_000:
            raise CorruptModelError(f"num_layers is {self.num_layers}; no such model exists")
        if self.num_heads % self.num_kv_heads:
            raise CorruptModelError(
                f"num_heads is {self.num_heads}, which is not a multiple of num_kv_heads "
                f"({self.num_kv_heads}): query heads must divide evenly among key heads"
            )
        if self.head_dim % 2:
            raise CorruptModelError(
                f"head_dim is {self.head_dim}, but rotary positions pair up its elements, "
                "so it must be even"
            )
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise CorruptModelError(
                f"rms_norm_eps is {self.rms_norm_eps!r}, but it must be a positive number"
            )
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise CorruptModelError(
                f"rope_theta is {self.rope_theta!r}, but it must be a positive number"
            )
        factors = len(self.rope_scaling.factors)
        if self.rope_scaling.kind == "factors" and factors != self.head_dim // 2:
            raise CorruptModelError(
                f"there are {factors} rope factors, but head_dim {self.head_dim} "
                f"needs {self.head_dim // 2}"
            )

    @classmethod
    def from_huggingface(
        cls, config: Mapping[str, Any], *, source: str = "config.json"
    ) -> DecoderConfig:
        """Read a Hugging Face `config.json`; `source` names it in errors.

        Raises UnsupportedModelError for a model this backend would compute wrongly and
        CorruptModelError for a config that makes no sense.
        """
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
            return cls(
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

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        rope_factors: tuple[float, ...] = (),
        source: str = "the GGUF file",
    ) -> DecoderConfig:
        """Read GGUF metadata; `shapes` are the file's tensors by GGUF name, outermost axis first.

        What GGUF says only through its tensors is read from `shapes`: the vocabulary's size, ties
        and biases. `rope_factors` is the content of `rope_freqs.weight`.
        """
        from foretell.backends.cpu._gguf_config import read_gguf_config

        return read_gguf_config(metadata, shapes, rope_factors=rope_factors, source=source)


def rope_inverse_frequencies(config: DecoderConfig) -> npt.NDArray[np.float32]:
    """Rotary angle per position for each pair of head elements, shape (head_dim / 2,), float32.

    The same arithmetic, in float32 and in the same order, as transformers'
    `compute_default_rope_parameters`, `_compute_linear_scaling_rope_parameters` and
    `_compute_llama3_parameters`, whose attention factor is 1. The power alone is computed in
    float64 and rounded: float32 powers differ between libraries and processors in the last bit.
    """
    one = np.float32(1)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents.astype(np.float64))
    frequencies = one / powers.astype(np.float32)
    scaling = config.rope_scaling
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        frequencies = frequencies / factor
    elif scaling.kind == "factors":
        frequencies = frequencies / np.asarray(scaling.factors, np.float32)
    elif scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        length = scaling.original_max_length
        # torch divides a number by an array as reciprocal times number: two roundings.
        wavelengths = one / frequencies * np.float32(2 * math.pi)
        is_low = wavelengths > np.float32(length / low)
        is_high = wavelengths < np.float32(length / high)
        kept = one / wavelengths * np.float32(length)
        smooth = (kept - np.float32(low)) / np.float32(high - low)
        between = (one - smooth) * frequencies / factor + smooth * frequencies
        frequencies = np.where(is_low, frequencies / factor, frequencies)
        frequencies = np.where(~is_high & ~is_low, between, frequencies)
    return np.ascontiguousarray(frequencies, np.float32)


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
