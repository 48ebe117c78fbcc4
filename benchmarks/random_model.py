"""Write a model of Llama 3.2 1B's shape whose weights are random: right for measuring speed.

    python benchmarks/random_model.py FOLDER                  # bfloat16, 2.5 GB
    python benchmarks/random_model.py FILE.gguf --type Q4_1   # 0.8 GB; also Q4_0, Q8_0

Its text is noise. The numbers repeat after 16 million, which no speed depends on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from foretell.backends.cpu._weights import to_bfloat16

SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
}
MAX_LENGTH = 131072
ROPE_THETA = 500000.0
EPSILON = 1e-5
STEP = 1_048_573  # a prime, so that no two tensors begin with the same numbers
BLOCK = 32  # numbers in a block of every quantized type here

MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def matrices(shape: dict[str, int]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Names in Hugging Face's and GGUF's style, and (outputs, inputs), of every matrix."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    sizes = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    sizes += ((inner, hidden), (inner, hidden), (hidden, inner))
    yield "model.embed_tokens.weight", "token_embd.weight", (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        for (name, short), size in zip(MATRICES.items(), sizes, strict=True):
            yield f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{short}.weight", size


def norms(shape: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Names of the vectors, in both styles."""
    for layer in range(shape["num_hidden_layers"]):
        for name, short in (("input", "attn"), ("post_attention", "ffn")):
            place = f"model.layers.{layer}.{name}_layernorm.weight"
            yield place, f"blk.{layer}.{short}_norm.weight"
    yield "model.norm.weight", "output_norm.weight"


class Numbers:
    """A supply of stored random blocks, and runs of any length from it."""

    def __init__(self, stored: NDArray[Any]) -> None:
        self._blocks = stored
        self._start = 0

    def take(self, count: int) -> NDArray[Any]:
        """The next ``count`` blocks, from the beginning again where they end."""
        self._start = (self._start + STEP) % len(self._blocks)
        out = np.empty((count, *self._blocks.shape[1:]), self._blocks.dtype)
        start, done = self._start, 0
        while done < count:
            part = self._blocks[start : start + count - done]
            out[done : done + len(part)] = part
            start, done = 0, done + len(part)
        return out


def random_numbers(count: int) -> NDArray[np.float32]:
    numbers = np.random.default_rng(3).standard_normal(count, np.float32)
    numbers *= np.float32(0.02)
    return numbers


def write_folder(folder: Path, shape: dict[str, int], numbers: int) -> None:
    """config.json and model.safetensors, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sizes: dict[str, tuple[int, ...]] = {name: size for name, _, size in matrices(shape)}
    sizes |= {name: (shape["hidden_size"],) for name, _ in norms(shape)}
    header: dict[str, Any] = {}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    supply = Numbers(to_bfloat16(random_numbers(numbers)))
    # Tensor after tensor, so that no more than one is in memory.
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in sizes.values():
            if len(size) == 1:
                file.write(to_bfloat16(np.ones(size, np.float32)).tobytes())
            else:
                file.write(supply.take(int(np.prod(size))).tobytes())


def write_gguf(path: Path, kind: str, shape: dict[str, int], numbers: int) -> None:
    """A GGUF file without a tokenizer, every matrix in one type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored_kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(MAX_LENGTH)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(shape["vocab_size"])
    blocks = random_numbers(numbers // BLOCK * BLOCK).reshape(-1, BLOCK)
    supply = Numbers(gguf.quants.quantize(blocks, stored_kind))
    for _, name, (outputs, inputs) in matrices(shape):
        rows = supply.take(outputs * inputs // BLOCK).reshape(outputs, -1)
        writer.add_tensor(name, rows, raw_dtype=stored_kind)
    for _, name in norms(shape):
        writer.add_tensor(name, np.ones(shape["hidden_size"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="a folder, or a file that ends in .gguf")
    parser.add_argument("--type", choices=("Q4_0", "Q4_1", "Q8_0"), default="Q4_1")
    parser.add_argument("--shrink", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    small = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    shape = {n: v // options.shrink if n in small else v for n, v in SHAPE.items()}
    numbers = (1 << 24) // options.shrink
    if options.path.suffix == ".gguf":
        write_gguf(options.path, options.type, shape, numbers)
    else:
        write_folder(options.path, shape, numbers)


if __name__ == "__main__":
    main()
