"""Which tensors a decoder consists of, and whether a checkpoint has exactly those."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from foretell._errors import CorruptModelError, UnsupportedModelError
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._tensor import TensorSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Computed from the config; old checkpoints carry them along.
_IGNORABLE = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by canonical (Hugging Face) name; projections are (out, in)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, columns, has_bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def settle(
    config: DecoderConfig, tensors: Mapping[str, TensorSource], source: str
) -> tuple[DecoderConfig, dict[str, TensorSource]]:
    """The config with ties as they are, and exactly the expected tensors in their usual order.

    Raises CorruptModelError for missing tensors and wrong shapes, UnsupportedModelError for
    tensors that this architecture does not have.
    """
    config, found = _settle_ties(config, dict(tensors))
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = ""
        if missing[0] == HEAD:
            hint = "; a model whose output matrix is its embedding sets tie_word_embeddings to true"
        raise CorruptModelError(f"{source}: the tensor {missing[0]} is missing{more}{hint}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CorruptModelError(
                f"{found[name].file}: the tensor {name} has the shape {found[name].shape}, but "
                f"the model's config asks for {shape}"
            )
    extra = [name for name in found if name not in expected and not _IGNORABLE.fullmatch(name)]
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise UnsupportedModelError(
            f"{found[extra[0]].file}: the tensor {extra[0]}{more} has no place in a "
            f"{config.architecture} model with this config; ignoring it would compute another "
            "model, so this one is not run"
        )
    return config, {name: found[name] for name in expected}


def _settle_ties(
    config: DecoderConfig, found: dict[str, TensorSource]
) -> tuple[DecoderConfig, dict[str, TensorSource]]:
    """Like transformers 5: tied by config, unless both matrices are there and differ."""
    head = found.get(HEAD)
    if not config.tied or head is None:
        return config, found
    embedding = found.get(EMBEDDING)
    if embedding is not None and not _equal(embedding, head):
        return dataclasses.replace(config, tied=False), found
    del found[HEAD]
    found.setdefault(EMBEDDING, head)
    return config, found


def _equal(one: TensorSource, other: TensorSource) -> bool:
    if one.shape != other.shape:
        return False
    step = 1024
    return all(
        np.array_equal(one.read(slice(row, row + step)), other.read(slice(row, row + step)))
        for row in range(0, one.shape[0], step)
    )
