"""A decoder's shape out of GGUF metadata.

Keys and defaults follow the GGUF specification and llama.cpp's loader. Every key of the model's
architecture has to be known here: an unknown one may change the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell._errors import CorruptModelError, UnsupportedModelError
from foretell.backends.cpu._config import RUNNABLE, DecoderConfig, RopeScaling
from foretell.backends.cpu._fields import Fields

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
# Keys that say something about the file or the training, not about the arithmetic.
_HARMLESS = {
    "attention.layer_norm_epsilon",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "use_parallel_residual",
}
# Keys whose neutral values are the only ones this backend computes.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
}


def read_gguf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_factors: tuple[float, ...],
    source: str,
) -> DecoderConfig:
    """See `DecoderConfig.from_gguf`."""
    architecture = Fields(metadata, source).text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{source}: general.architecture is {architecture!r}; {RUNNABLE} (Mistral files call "
            "themselves 'llama'), so use one of those"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{source}: split.count is {metadata['split.count']!r}, the model is spread over "
            "several files; join them with `llama-gguf-split --merge`"
        )
    prefix = architecture + "."
    fields = Fields(
        {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)},
        f"{source}, {architecture}",
    )
    _refuse_unknown_keys(fields, metadata, prefix)
    _refuse_sliding_window(fields)
    heads = fields.size("attention.head_count")
    theta, scaling = _rope(fields, rope_factors)
    with fields.named():
        return DecoderConfig(
            architecture=architecture,
            vocab_size=_vocabulary_size(shapes, source),
            hidden_size=fields.size("embedding_length"),
            intermediate_size=fields.size("feed_forward_length"),
            num_layers=fields.size("block_count"),
            num_heads=heads,
            num_kv_heads=fields.size("attention.head_count_kv", heads),
            head_dim=_head_dim(fields, heads),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            max_length=fields.size("context_length"),
            rope_scaling=scaling,
            tied="output.weight" not in shapes,
            attention_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm=architecture == "qwen3",
        )


def _refuse_unknown_keys(fields: Fields, metadata: Mapping[str, Any], prefix: str) -> None:
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in _READ or name in _HARMLESS:
            continue
        if value not in _NEUTRAL.get(name, ()):
            shown = repr(value)[:80]
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {shown}, which this backend does not know how to "
                f"compute; {RUNNABLE} without it"
            )


def _refuse_sliding_window(fields: Fields) -> None:
    window = fields.count("attention.sliding_window", 0)
    length = fields.size("context_length")
    if 0 < window < length:
        raise UnsupportedModelError(
            f"{fields.source}: attention.sliding_window is {window}, less than context_length "
            f"({length}), so layers see only the last tokens, which this backend does not "
            "compute; use a version of the model with full attention"
        )


def _vocabulary_size(shapes: Mapping[str, tuple[int, ...]], source: str) -> int:
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CorruptModelError(f"{source}: the tensor token_embd.weight is missing or no matrix")
    return embedding[0]


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.size("embedding_length")
    if hidden % heads and not fields.has("attention.key_length"):
        raise CorruptModelError(
            f"{fields.source}: embedding_length ({hidden}) is not a multiple of "
            f"attention.head_count ({heads}) and attention.key_length is missing"
        )
    head_dim = fields.size("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.size(name, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {fields.get(name)}, but heads have {head_dim} "
                f"elements; {RUNNABLE} where the two are equal"
            )
    return head_dim


def _rope(fields: Fields, factors: tuple[float, ...]) -> tuple[float, RopeScaling]:
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{fields.source}: rope.scaling.type is {kind!r}; this backend computes 'none', "
            "'linear' and Llama 3's rope_freqs.weight, so use a file without that extension"
        )
    name = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    # llama.cpp reads a factor of 0 as "no scaling".
    factor = fields.number(name) if fields.get(name) else 1.0
    with fields.named():
        if kind == "none" or factor == 1.0:
            return theta, RopeScaling("factors", factors=factors) if factors else RopeScaling()
        if factors:
            raise UnsupportedModelError(
                f"{fields.source}: both {name} and rope_freqs.weight scale the rotary positions; "
                "use a file with one of the two"
            )
        return theta, RopeScaling("linear", factor=factor)
