"""Attention over the caches of many sessions in one pass, through transformers' registry.

The rows of all sessions lie side by side as one sequence of a batch of one. This function knows
whose row each is and what it may see, so that no mask is needed: the exact kernel goes by positions
and paths; elsewhere each session gets torch's attention with a mask of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from foretell._errors import UnsupportedModelError
from foretell.backends.transformers import _operators as ops
from foretell.backends.transformers._cache import Pass

NAME = "foretell"
_here = threading.local()


def current_pass() -> Pass:
    """The pass this thread runs."""
    found: Pass | None = getattr(_here, "current", None)
    if found is None:
        raise UnsupportedModelError("attention outside of a pass")
    return found


class Running:
    """``with Running(pass):`` makes it the current one."""

    def __init__(self, current: Pass) -> None:
        self._current = current

    def __enter__(self) -> None:
        _here.current = self._current

    def __exit__(self, *error: object) -> None:
        _here.current = None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(1, heads, rows, dim) queries against every row's own past: (1, rows, heads, value_dim)."""
    run = current_pass()
    layer = run.updated
    if layer is None or attention_mask is not None or options.get("position_bias") is not None:
        raise UnsupportedModelError("this attention is more than keys, values and a window")
    if run.added is None or key is not run.added[0] or value is not run.added[1]:
        raise UnsupportedModelError("what attention reads is made from the cache, not in it")
    run.updated = run.added = None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = run.windows[layer]
    if run.exact:
        jobs, positions, paths = run.tables(layer)
        shape = run.shapes[layer]
        out = ops.attention(
            query, jobs, positions, paths, shape.kv_heads, shape.value_dim, scale,
            softcap or 0.0, window or 0, s_aux,
        )  # fmt: skip
        return out, None
    parts = [
        _of_torch(query[:, :, part.start : part.stop], *part.session.layers[layer].past(part.end),
                  run.mask(part, window), scale, softcap, s_aux)
        for part in run.parts
    ]  # fmt: skip
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1
        )
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def register() -> None:
    """Make it known to transformers under NAME."""
    AttentionInterface.register(NAME, attention)
