"""GGUF files for tests, made from the tiny Hugging Face checkpoints of `families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from families import FAMILIES, make_tensors
from gguf.constants import GGMLQuantizationType

QuantizationOf = Callable[[str], GGMLQuantizationType]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys of Llama models."""
    shape = rows.shape
    split = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(shape)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    architecture = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    return {f"{architecture}.{name}": value for name, value in values.items()}


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The checkpoint's tensors under GGUF names, in GGUF's row order."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found = {}
    for name, values in make_tensors(config, seed=seed).items():
        kind = name.split("_proj")[0][-1]
        if config["model_type"] == "llama" and f"self_attn.{kind}_proj" in name and kind in heads:
            values = interleaved(values, heads[kind])
        found[gguf_name(name)] = values
    return found


def write_gguf(
    path: Path,
    config: Mapping[str, Any] | str = "llama",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    quantization: QuantizationOf = lambda name: GGMLQuantizationType.F32,
    raw_types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file; `metadata` adds to what the config says, None removes a key.

    Matrices are quantized as `quantization` says; those named in `raw_types` are blocks already.
    """
    if isinstance(config, str):
        config = FAMILIES[config]
    writer = gguf.GGUFWriter(path, config["model_type"])
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        _add(writer, key, value)
    for name, values in (tensors_of(config) if tensors is None else tensors).items():
        if raw_types is not None and name in raw_types:
            writer.add_tensor(name, values, raw_dtype=raw_types[name])
            continue
        kind = quantization(name) if values.ndim == 2 else GGMLQuantizationType.F32
        if kind is GGMLQuantizationType.F32 or values.dtype != np.float32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, list(value))
