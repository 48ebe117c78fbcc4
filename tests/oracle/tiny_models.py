"""Tiny random models of many architectures, odd widths among them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WITHOUT_GROUPS = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 36,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 10}
_EXPERTS = {"num_experts_per_tok": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_COMMON, "head_dim": 10}),
    "mistral": ("MistralConfig", {**_COMMON, "head_dim": 8, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", {**_COMMON, "hidden_size": 40}),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 12}),
    "gemma2": ("Gemma2Config", {**_COMMON, **_GEMMA, "num_hidden_layers": 4}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_COMMON,
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi": ("PhiConfig", {**_COMMON, "hidden_size": 48, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {**_COMMON, "hidden_size": 40}),
    "gpt2": ("GPT2Config", {**_GPT, "n_inner": 53}),
    "gpt_neox": ("GPTNeoXConfig", {**_WITHOUT_GROUPS, "hidden_size": 48}),
    "olmo": ("OlmoConfig", {**_COMMON, "hidden_size": 40}),
    "falcon": (
        "FalconConfig",
        {**_WITHOUT_GROUPS, "hidden_size": 40, "ffn_hidden_size": 53, "multi_query": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {
            **_COMMON,
            **_EXPERTS,
            "hidden_size": 40,
            "intermediate_size": 52,  # transformers' own product of experts wants multiples of 4
            "head_dim": 10,
            "num_local_experts": 4,
            "num_hidden_layers": 2,
        },
    ),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": (
        "JambaConfig",
        {
            **_COMMON,
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
}
TREES = set(CONFIGS) - {"falcon"}
"""Architectures whose attention goes through transformers' registry."""


def config(name: str, **changes: Any) -> Any:
    kind, settings = {**CONFIGS, **HYBRIDS}[name]
    return getattr(transformers, kind)(**{**settings, **changes})


@torch.no_grad()
def make(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model with weights wide enough for its choices to be clear ones."""
    torch.manual_seed(seed)
    settings = config(name, **changes)
    settings.initializer_range = 0.25
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases begin at exactly 1 and 0
            parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
    return model
