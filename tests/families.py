"""Tiny checkpoints of every model family the `cpu` backend runs, without torch.

A checkpoint is a Hugging Face folder: `config.json`, `model.safetensors` (or
shards and their index), `generation_config.json` and, if asked for, a small
byte-level tokenizer::

    folder = tiny_checkpoint(tmp_path, "qwen3")
    folder = tiny_checkpoint(tmp_path, "llama", dtype="bfloat16", shards=3, tokenizer=True)

`FAMILIES` maps a name to its `config.json` in the style that most checkpoints
on the Hub have (`rope_theta`, `rope_scaling`, `torch_dtype`); `modern_config`
gives the same model in the style that transformers 5 writes.

The weights depend on (seed, tensor name) alone. They come from the raw output
of PCG64, which NumPy keeps stable, and not from `Generator.normal`, which it
does not: logits stored on one machine hold on every other. Every tensor
matters: norms are near 1 but random, biases are not zero, logits spread over
several units.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
StorageDtype = Literal["float32", "float16", "bfloat16"]
ConfigStyle = Literal["classic", "modern"]

BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 2

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("r", "e"),
    ("Ġ", "a"),
    ("Ġt", "he"),
    ("o", "n"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("e", "n"),
    ("Ġ", "c"),
    ("in", "g"),
    ("o", "r"),
    ("a", "n"),
    ("e", "s"),
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _config(model_type: str, architecture: str, **changes: Any) -> Config:
    """A small config of one family; `changes` replace or add fields."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
        "use_cache": True,
        **changes,
    }


def _llama(**changes: Any) -> Config:
    fields: Config = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}
    return _config("llama", "LlamaForCausalLM", **{**fields, **changes})


FAMILIES: dict[str, Config] = {
    # head_dim is not hidden_size / heads (16), and two query heads share a key head.
    "llama": _llama(head_dim=24),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    # Old files name the kind of scaling "type", newer ones "rope_type".
    "llama-linear-rope": _llama(
        max_position_embeddings=128, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    # The wavelengths of 8 frequencies run from 6 to 20,000 positions: with 64 original
    # positions some are kept, some interpolated (16 to 64) and some divided by the factor.
    "llama-llama3-rope": _llama(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    # Nothing is a multiple of a vector's 8 lanes. (transformers wants llama's hidden
    # size to be a multiple of the heads; see qwen3-odd for one that is not.)
    "llama-odd": _llama(
        vocab_size=250,
        hidden_size=39,
        intermediate_size=100,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        tie_word_embeddings=True,
    ),
    "mistral": _config(
        "mistral", "MistralForCausalLM", sliding_window=None, head_dim=16, rope_theta=1000000.0
    ),
    "qwen2": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        sliding_window=512,
        max_window_layers=3,
    ),
    "qwen3": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        attention_bias=False,
        rope_scaling=None,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=3,
    ),
    "qwen3-odd": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        vocab_size=250,
        hidden_size=37,
        intermediate_size=101,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        rms_norm_eps=1e-6,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=3,
    ),
}


def modern_config(config: Mapping[str, Any]) -> Config:
    """The same model as transformers 5 writes it.

    `rope_theta` and `rope_scaling` move into `rope_parameters`, and `torch_dtype`
    becomes `dtype`.
    """
    modern = copy.deepcopy(dict(config))
    scaling = dict(modern.pop("rope_scaling", None) or {})
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    modern["rope_parameters"] = {
        "rope_type": rope_type,
        "rope_theta": modern.pop("rope_theta"),
        **scaling,
    }
    if "torch_dtype" in modern:
        modern["dtype"] = modern.pop("torch_dtype")
    return modern


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, in the order they are stored.

    Linear weights are (outputs, inputs), as torch has them. A tied model stores
    no `lm_head.weight`.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    model_type = config["model_type"]
    qkv_bias = config.get("attention_bias", False) or model_type == "qwen2"
    output_bias = config.get("attention_bias", False) and model_type != "qwen2"
    mlp_bias = config.get("mlp_bias", False)

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
            "self_attn.k_proj": (key_heads * head_dim, hidden, qkv_bias),
            "self_attn.v_proj": (key_heads * head_dim, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, heads * head_dim, output_bias),
            "mlp.gate_proj": (inner, hidden, mlp_bias),
            "mlp.up_proj": (inner, hidden, mlp_bias),
            "mlp.down_proj": (hidden, inner, mlp_bias),
        }
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, (outputs, inputs, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        if model_type == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def make_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Deterministic float32 weights for `config`, by tensor name."""
    return {
        name: _make_tensor(name, shape, seed=seed) for name, shape in tensor_shapes(config).items()
    }


def _make_tensor(name: str, shape: tuple[int, ...], *, seed: int) -> NDArray[np.float32]:
    """Uniform values in a range that suits the tensor's part in the model."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest(), "little")
    raw = np.random.PCG64(key).random_raw(math.prod(shape))
    uniform = ((raw >> np.uint64(11)) * 2.0**-52 - 1.0).reshape(shape)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.3 * uniform
    elif name.endswith(".bias"):
        values = 0.5 * uniform
    else:
        # A unit-sized input gives outputs of unit variance (3 for logits), so that
        # signals neither die out nor explode whatever the width.
        size = 3.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.0
        values = size * math.sqrt(3.0 / shape[-1]) * uniform
    return values.astype(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even. The values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits; nothing is lost."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: StorageDtype = "float32"
) -> None:
    """Write a safetensors file: header size, JSON header, values back to back.

    Written out here because NumPy has no bfloat16 to hand to the safetensors
    package, and because a second hand at the format tests the reader better.
    """
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        stored = to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
        blob = stored.astype(stored.dtype.newbyteorder("<")).tobytes()
        end = offset + len(blob)
        header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [offset, end]}
        blobs.append(blob)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: StorageDtype = "float32",
    shards: int = 1,
    tokenizer: bool = False,
    config_style: ConfigStyle = "classic",
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a Hugging Face checkpoint into `folder` (made if missing) and return it.

    `tensors` replaces the weights that `seed` would give. With `shards` above 1
    the tensors are dealt round robin, so that neighbours lie in different files.
    """
    if shards < 1:
        raise ValueError(f"a checkpoint has at least one file, not {shards}")
    folder.mkdir(parents=True, exist_ok=True)
    stored_config = {**config, "torch_dtype": dtype, "transformers_version": "4.46.0"}
    if config_style == "modern":
        stored_config = modern_config(stored_config)
        stored_config["transformers_version"] = "5.24.0"
    _write_json(folder / "config.json", stored_config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    if tensors is None:
        tensors = make_tensors(config, seed=seed)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
    else:
        _write_shards(folder, tensors, dtype=dtype, shards=shards)
    if tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_shards(
    folder: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    dtype: StorageDtype,
    shards: int,
) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file_name, part, dtype=dtype)
        weight_map.update(dict.fromkeys(part, file_name))
    itemsize = 4 if dtype == "float32" else 2
    total = sum(values.size for values in tensors.values()) * itemsize
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of at most `vocab_size` entries, with a chat template.

    Ids 0 to 2 are the special tokens, then come the bytes, then a few merges for
    as long as there is room. Under 259 entries only ASCII fits, and other bytes
    are dropped from what is encoded. Ids beyond the merges stand for no text,
    like the padding of real vocabularies.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_characters = _byte_characters()
    room = vocab_size - len(_SPECIAL_TOKENS)
    if room < 128:
        raise ValueError(f"a vocabulary of {vocab_size} cannot hold the 128 ASCII bytes")
    alphabet = byte_characters if room >= 256 else byte_characters[:128]
    merges = list(_MERGES[: room - len(alphabet)])
    entries = [*_SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(entries)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    bpe.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL_TOKENS[BOS_TOKEN_ID],
            "eos_token": _SPECIAL_TOKENS[EOS_TOKEN_ID],
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def tiny_checkpoint(
    tmp_path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: StorageDtype = "float32",
    shards: int = 1,
    tokenizer: bool = False,
    config_style: ConfigStyle = "classic",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of one of `FAMILIES` under `tmp_path` and return its folder.

    `changes` replaces fields of the family's config, for example
    `{"num_hidden_layers": 1}`. Every call with other arguments has its own folder.
    """
    config = {**FAMILIES[family], **(changes or {})}
    arguments = json.dumps([config, seed, dtype, shards, tokenizer, config_style], sort_keys=True)
    folder = tmp_path / f"{family}-{hashlib.sha256(arguments.encode()).hexdigest()[:8]}"
    return write_checkpoint(
        folder,
        config,
        seed=seed,
        dtype=dtype,
        shards=shards,
        tokenizer=tokenizer,
        config_style=config_style,
    )


def checkpoint_digest(config: Mapping[str, Any], *, seed: int, dtype: StorageDtype) -> str:
    """A hash of the config and of every stored value; it says whether stored logits still apply."""
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode())
    for name, values in make_tensors(config, seed=seed).items():
        stored = to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
        digest.update(name.encode())
        digest.update(stored.astype(stored.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()
