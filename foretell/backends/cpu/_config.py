"""What a decoder looks like: sizes, rotary positions, biases, ties.

One description for four architectures that differ in details only (Llama, Mistral, Qwen2, Qwen3).
Everything that would make the forward pass compute something else is refused here, by the name of
the field, so that a model either runs exactly or does not run at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError, UnsupportedModelError

Float32Array = npt.NDArray[np.float32]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
RUNNABLE = "Foretell's cpu backend runs Llama, Mistral, Qwen2 and Qwen3 models"


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
        from foretell.backends.cpu._huggingface_config import read_huggingface_config

        return read_huggingface_config(config, source=source)

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


def rope_inverse_frequencies(config: DecoderConfig) -> Float32Array:
    """Rotary angle per position for each pair of head elements, shape (head_dim / 2,), float32.

    The same arithmetic, in float32 and in the same order, as transformers'
    `compute_default_rope_parameters`, `_compute_linear_scaling_rope_parameters` and
    `_compute_llama3_parameters`, whose attention factor is 1. The power alone is computed in
    float64 and rounded: float32 powers differ between libraries and processors in the last bit.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents.astype(np.float64))
    frequencies: Float32Array = np.float32(1) / powers.astype(np.float32)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return _divided(frequencies, scaling.factor)
    if scaling.kind == "factors":
        return _divided(frequencies, scaling.factors)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    one = np.float32(1)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_length
    # torch divides a number by an array as reciprocal times number: two roundings.
    wavelengths = one / frequencies * np.float32(2 * math.pi)
    is_low = wavelengths > np.float32(length / low)
    is_high = wavelengths < np.float32(length / high)
    kept = one / wavelengths * np.float32(length)
    smooth = (kept - np.float32(low)) / np.float32(high - low)
    between = _divided((one - smooth) * frequencies, scaling.factor) + smooth * frequencies
    scaled = np.where(is_low, _divided(frequencies, scaling.factor), frequencies)
    return np.where(is_low | is_high, scaled, between).astype(np.float32)


def _divided(frequencies: Float32Array, by: float | tuple[float, ...]) -> Float32Array:
    return (frequencies / np.asarray(by, np.float32)).astype(np.float32)
