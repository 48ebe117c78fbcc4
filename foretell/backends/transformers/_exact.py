"""Row-invariant arithmetic for any model: what its modules call is replaced while it runs.

A ``TorchFunctionMode`` sees every function of torch that the model's own code calls, and computes
those whose result for a row may depend on the other rows with the operators of ``_operators``.
Sums, products and comparisons of single elements are exact by themselves and stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foretell.backends.cpu import _operators as at
from foretell.backends.transformers import _operators as ops

_F = torch.nn.functional
_NOT_MINE = object()


def is_mine(*tensors: Tensor | None) -> bool:
    """Whether the operators know these: float32 on the CPU."""
    for x in tensors:
        if x is not None and (x.dtype is not torch.float32 or x.device.type != "cpu"):
            return False
    return True


class ExactMode(TorchFunctionMode):
    """Inside it, every row is computed as if it were alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not _NOT_MINE:
                return result
        return func(*args, **kwargs) if kwargs else func(*args)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not is_mine(input, weight, bias) or weight.dim() != 2:
        return _NOT_MINE
    return ops.linear(input, weight, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or input.dim() != 1 or not is_mine(input, mat1, mat2):
        return _NOT_MINE
    return ops.linear(mat1, mat2.t(), input)


def _matmul(input: Tensor, other: Tensor, **options: Any) -> Any:
    a, b = input, other
    if options or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not is_mine(a, b):
        return _NOT_MINE
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] == 1:  # with one term there is no sum
        return _NOT_MINE
    if b.dim() == 2:
        return ops.linear(a, b.t(), None)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    right = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    rows = b.stride(-1) != 1  # keys, transposed: rows against rows
    out = ops.scores(left, right.transpose(1, 2)) if rows else ops.product(left, right)
    return out.view(*batch, a.shape[-2], b.shape[-1])


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    product = _matmul(batch1, batch2)
    if product is _NOT_MINE or not is_mine(input):
        return _NOT_MINE
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (input if beta == 1 else input * beta)


def _unary(kind: int) -> Callable[..., Any]:
    def handler(input: Tensor, inplace: bool = False, **options: Any) -> Any:
        if options or inplace or not isinstance(input, Tensor) or not is_mine(input):
            return _NOT_MINE
        return ops.unary(input, kind)

    return handler


def _gelu(input: Tensor, approximate: str = "none") -> Any:
    if not is_mine(input):
        return _NOT_MINE
    return ops.unary(input, at.GELU if approximate == "none" else at.GELU_TANH)


def _rotation(sine: bool) -> Callable[..., Any]:
    def handler(input: Tensor, **options: Any) -> Any:
        if options or not is_mine(input):
            return _NOT_MINE
        return ops.cos_sin(input, sine)

    return handler


def _softmax(
    input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None, **options: Any
) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # torch.softmax has dtype in this place
        dtype = _stacklevel
    if options or dtype not in (None, torch.float32) or not is_mine(input):
        return _NOT_MINE
    if input.dim() == 0 or dim not in (-1, input.dim() - 1):
        return _NOT_MINE
    return ops.softmax(input)


def _reduction(mean: bool) -> Callable[..., Any]:
    def handler(input: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        last = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
        if options or not is_mine(input) or input.dim() == 0 or isinstance(last, list | tuple):
            return _NOT_MINE
        if last not in (-1, input.dim() - 1):
            return _NOT_MINE
        total = ops.row_sum(input)
        total = total / input.shape[-1] if mean else total
        return total.unsqueeze(-1) if keepdim else total

    return handler


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Any:
    if len(tuple(normalized_shape)) != 1 or not is_mine(input, weight, bias):
        return _NOT_MINE
    return ops.layer_norm(input, weight, bias, eps)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if len(tuple(normalized_shape)) != 1 or eps is None or not is_mine(input, weight):
        return _NOT_MINE
    return ops.rms_norm(input, weight, eps, 0.0)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not is_mine(query, key, value) or query.dim() != 4:
        return _NOT_MINE
    batch, heads, rows, dim = query.shape
    length, value_dim = key.shape[-2], value.shape[-1]
    if enable_gqa and key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], 1)
        value = value.repeat_interleave(heads // value.shape[1], 1)
    q = query.reshape(-1, rows, dim)
    k = key.expand(batch, heads, length, dim).reshape(-1, length, dim)
    v = value.expand(batch, heads, length, value_dim).reshape(-1, length, value_dim)
    scores = ops.scores(q, k) * (dim**-0.5 if scale is None else scale)
    scores = scores.view(batch, heads, rows, length)
    if is_causal:
        attn_mask = torch.ones(rows, length, dtype=torch.bool).tril()
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    weights = ops.softmax(scores).view(-1, rows, length)
    return ops.product(weights, v).view(batch, heads, rows, value_dim)


_HANDLERS: dict[Any, Callable[..., Any]] = {}
for _handler, _functions in (
    (_linear, (_F.linear,)),
    (_addmm, (torch.addmm, Tensor.addmm)),
    (_matmul, (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (_matmul, (torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)),
    (_baddbmm, (torch.baddbmm, Tensor.baddbmm)),
    (_unary(at.SILU), (_F.silu,)),
    (_gelu, (_F.gelu,)),
    (_unary(at.SIGMOID), (torch.sigmoid, Tensor.sigmoid, _F.sigmoid)),
    (_unary(at.TANH), (torch.tanh, Tensor.tanh, _F.tanh)),
    (_unary(at.EXP), (torch.exp, Tensor.exp)),
    (_rotation(False), (torch.cos, Tensor.cos)),
    (_rotation(True), (torch.sin, Tensor.sin)),
    (_softmax, (_F.softmax, torch.softmax, Tensor.softmax)),
    (_reduction(True), (torch.mean, Tensor.mean)),
    (_reduction(False), (torch.sum, Tensor.sum)),
    (_layer_norm, (_F.layer_norm, torch.layer_norm)),
    (_rms_norm, (_F.rms_norm,)),
    (_attention, (_F.scaled_dot_product_attention,)),
):
    _HANDLERS.update(dict.fromkeys(_functions, _handler))


def fuse_norms(root: nn.Module) -> None:
    """Let RMS norms of a shadow run as one operator instead of seven functions.

    A norm is recognized by what it computes: it has to give the operator's numbers for random
    rows, with its weight or with 1 + its weight.
    """
    seen: dict[int, float | None] = {}
    for module in root.modules():
        name = type(module).__name__
        epsilon = next(
            (
                value
                for value in (getattr(module, key, None) for key in ("variance_epsilon", "eps"))
                if isinstance(value, float)
            ),
            None,
        )
        weight = module._parameters.get("weight")
        if not name.endswith("RMSNorm") or epsilon is None or weight is None or id(module) in seen:
            continue
        if weight.dim() != 1 or not is_mine(weight) or len(module._parameters) != 1:
            continue
        seen[id(module)] = None
        rows = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(1)) * 3
        expected = module(rows)
        for offset in (0.0, 1.0):
            got = ops.rms_norm(rows, weight, epsilon, offset)
            if torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
                module.forward = _Norm(module, epsilon, offset)
                break


class _Norm:
    """The forward pass of a norm, on whatever its weight is then."""

    def __init__(self, module: nn.Module, epsilon: float, offset: float) -> None:
        self._parameters = module._parameters
        self._epsilon, self._offset = epsilon, offset

    def __call__(self, x: Tensor) -> Any:
        return ops.rms_norm(x, self._parameters["weight"], self._epsilon, self._offset)
