"""GGUF files (llama.cpp) as checkpoints: canonical names, row orders and numbers.

Reference: llama.cpp's convert_hf_to_gguf.py, whose renaming and permuting is undone here.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from foretell._errors import UnsupportedModelError
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._gguf_file import GgufEntry, GgufFile
from foretell.backends.cpu._tensor import TensorSource

ROPE_FACTORS: Final = "rope_freqs.weight"

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.([a-z_]+)\.(weight|bias)")
_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.BF16: np.dtype("<u2"),
}


class GgufTensor(TensorSource):
    """A tensor of a GGUF file; `order[i]` is the stored row that is logical row i."""

    def __init__(
        self,
        name: str,
        file: GgufFile,
        entry: GgufEntry,
        order: npt.NDArray[np.int64] | None,
    ) -> None:
        super().__init__(name, entry.shape, entry.type.name, str(file.path))
        self._type = entry.type
        self._order = order
        stored = file.bytes[entry.start : entry.start + entry.num_bytes]
        plain = _PLAIN.get(entry.type)
        if plain is not None:
            self._stored: npt.NDArray[Any] = stored.view(plain).reshape(entry.shape)
            return
        if not _can_dequantize(entry.type):
            raise UnsupportedModelError(
                f"{file.path}: the tensor {entry.name!r} has the type {entry.type.name}, which "
                "cannot be decoded here; use a file in a common quantization such as Q4_K_M or Q8_0"
            )
        if len(entry.shape) != 2:
            raise UnsupportedModelError(
                f"{file.path}: the tensor {entry.name!r} is a {len(entry.shape)}-dimensional "
                f"{entry.type.name}; only matrices are read from quantized blocks"
            )
        block_size, block_bytes = GGML_QUANT_SIZES[entry.type]
        self._stored = stored.reshape(entry.shape[0], entry.shape[1] // block_size * block_bytes)

    def raw(self, rows: slice | None = None) -> npt.NDArray[Any]:
        start, stop = self._bounds(rows)
        if self._order is None:
            return self._stored[start:stop]
        return self._stored[self._order[start:stop]]

    def _decode(self, start: int, stop: int) -> npt.NDArray[Any]:
        stored = self.raw(slice(start, stop))
        if self._type is GGMLQuantizationType.BF16:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if self._type in _PLAIN:
            return stored
        return np.asarray(dequantize(stored, self._type)).reshape(-1, *self.shape[1:])


def read_config(file: GgufFile) -> DecoderConfig:
    """The model's shape. Raises UnsupportedModelError and CorruptModelError."""
    shapes = {name: entry.shape for name, entry in file.entries.items()}
    factors: tuple[float, ...] = ()
    if ROPE_FACTORS in file.entries:
        entry = file.entries[ROPE_FACTORS]
        factors = tuple(GgufTensor(ROPE_FACTORS, file, entry, None).read().ravel().tolist())
    return DecoderConfig.from_gguf(
        file.metadata, shapes, rope_factors=factors, source=str(file.path)
    )


def read_tensors(file: GgufFile, config: DecoderConfig) -> dict[str, TensorSource]:
    """The file's tensors by canonical name, in the row order of Hugging Face checkpoints."""
    tensors: dict[str, TensorSource] = {}
    for gguf_name, entry in file.entries.items():
        if gguf_name == ROPE_FACTORS:
            continue
        name = canonical_name(gguf_name)
        order = _stored_row_order(name, entry, config)
        tensors[name] = GgufTensor(name, file, entry, order)
    return tensors


def canonical_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    block = _BLOCK.fullmatch(gguf_name)
    if block and block[2] in _INNER:
        return f"model.layers.{block[1]}.{_INNER[block[2]]}.{block[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else gguf_name


def _stored_row_order(
    name: str, entry: GgufEntry, config: DecoderConfig
) -> npt.NDArray[np.int64] | None:
    """Undo the interleaving of llama-architecture queries and keys.

    llama.cpp rotates neighbouring elements, Hugging Face the two halves of a head; the converter
    therefore stores element (half, i) of a head as its row 2 i + half.
    """
    if config.architecture != "llama" or not re.search(r"\.self_attn\.[qk]_proj\.", name):
        return None
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    if entry.shape[0] != heads * config.head_dim:
        return None  # the comparison with the expected shapes reports it
    rows = np.arange(entry.shape[0], dtype=np.int64).reshape(heads, config.head_dim // 2, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


@functools.cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True


__all__ = ["GgufFile", "GgufTensor", "canonical_name", "read_config", "read_tensors"]
