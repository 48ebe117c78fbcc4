"""Row-invariant operations on torch tensors: the cpu backend's kernels as torch operators.

Each is an operator of its own, ``torch.ops.foretell.*``, for float32 on the CPU. They read weights
where they lie. Inside ``serving()`` they are shared among threads; outside, the caller works alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.backends.cpu import _operators as at
from foretell.backends.cpu._pool import Pool, default_threads
from foretell.backends.cpu._weights import aligned_empty

JOB_ROWS = 8  # most rows of an attention job: enough to share each read of the keys
_STAGED = at.STAGED + at.FIRST_PARAMETER


class Operators:
    """A mailbox and its threads. One operation at a time: whoever serves holds the lock."""

    def __init__(self, threads: int, progress: Callable[[str], None] | None = None) -> None:
        self.threads = threads
        self._mailbox = aligned_empty((at.MAILBOX_WORDS,), np.int64)
        self._mailbox[:] = 0
        self._mailbox[at.THREADS] = threads
        self._mailbox[at.ENDED] = 1
        self._run = at.run_operation.prepare(progress)
        self._serve = at.serve.prepare(progress)
        self._pool = Pool(threads)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._scratch = np.empty(0, np.float32)
        self.reserve(1 << 14)

    def reserve(self, floats: int) -> None:
        """Room for ``floats`` numbers in each thread's scratch."""
        size = (floats + 1023) // 1024 * 1024
        if size * self.threads > self._scratch.size:
            self._scratch = aligned_empty((self.threads * size,), np.float32)
            self._mailbox[at.SCRATCH] = self._scratch.ctypes.data
            self._mailbox[at.SCRATCH_SIZE] = 4 * size

    def run(self, operation: int, units: int, grain: int, *parameters: int) -> None:
        """One operation, to its end."""
        if units:
            staged = self._mailbox
            staged[at.STAGED : _STAGED] = (operation, units, grain)
            staged[_STAGED : _STAGED + len(parameters)] = parameters
            self._run(staged)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Helpers wait for operations of this thread, and nobody else has them."""
        if self._process != os.getpid():  # a forked child: the parent's threads are not here
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            before = getattr(_current, "operators", None)
            torch_threads = torch.get_num_threads()
            _current.operators = self
            try:
                # What is left to torch is small, and its threads would wait for cores ours are on.
                torch.set_num_threads(1)
                if self.threads > 1:
                    self._mailbox[at.ENDED] = 0
                    self._pool.start(self._serve, self._mailbox, self)
                yield
            finally:
                self._mailbox[at.ENDED] = 1
                torch.set_num_threads(torch_threads)
                _current.operators = before


_current = threading.local()
_by_threads: dict[int, Operators] = {}
_making = threading.Lock()


def operators(
    threads: int | None = None, progress: Callable[[str], None] | None = None
) -> Operators:
    """The process's operators for a number of threads; compiled when first asked for."""
    threads = threads or default_threads()
    with _making:
        if threads not in _by_threads:
            _by_threads[threads] = Operators(threads, progress)
        return _by_threads[threads]


def _here() -> Operators:
    found: Operators | None = getattr(_current, "operators", None)
    if found is None:  # somebody calls torch.ops.foretell directly
        found = _current.operators = Operators(1)
    return found


# -- operators -------------------------------------------------------------------------------------


def _rows_of(x: Tensor) -> Tensor:
    """x as (rows, n), the numbers of a row side by side."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        return rows.contiguous()
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _padded(x: Tensor, k: int) -> Tensor:
    """Kernels read whole blocks of 16."""
    return x if k % 16 == 0 else torch.nn.functional.pad(x, (0, -k % 16))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    n, k = weight.shape
    rows = _padded(_rows_of(x), k)
    out = x.new_empty((*x.shape[:-1], n))
    if weight.stride(1) != 1 and k > 1:
        if weight.stride(0) == 1 or n == 1:  # it is the transpose of a matrix that lies in rows
            return _columns(x, weight.t(), bias)
        weight = weight.contiguous()
    if k == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    _here().run(
        at.LINEAR, n if rows.shape[0] else 0, 16,
        rows.shape[0], rows.data_ptr(), 4 * rows.stride(0), weight.data_ptr(),
        4 * weight.stride(0), k, n, out.data_ptr(), 4 * n,
        0 if bias is None else bias.contiguous().data_ptr(), 0, 0, 0,
    )  # fmt: skip
    return out


def _columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    k, n = weight.shape
    rows = _rows_of(x)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    out = x.new_empty((*x.shape[:-1], n))
    strips = (n + at.STRIP - 1) // at.STRIP
    _here().run(
        at.COLUMNS, strips if rows.shape[0] else 0, 1,
        rows.shape[0], rows.data_ptr(), 4 * rows.stride(0), weight.data_ptr(),
        4 * weight.stride(0), k, n, out.data_ptr(), 4 * n,
        0 if bias is None else bias.contiguous().data_ptr(), 0, 0, 0,
    )  # fmt: skip
    return out


def _scores(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    (batch, rows, k), n = a.shape, b.shape[1]
    a = _padded(a, k)
    out = a.new_empty((batch, rows, n))
    _here().run(
        at.LINEAR, batch * n if rows else 0, 1,
        rows, a.data_ptr(), 4 * a.shape[2], b.data_ptr(), 4 * k, k, n, out.data_ptr(), 4 * n,
        0, 4 * a.shape[2] * rows, 4 * k * n, 4 * n * rows,
    )  # fmt: skip
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    (batch, rows, k), n = a.shape, b.shape[2]
    out = a.new_empty((batch, rows, n))
    strips = (n + at.STRIP - 1) // at.STRIP
    _here().run(
        at.COLUMNS, batch * strips if rows else 0, 1,
        rows, a.data_ptr(), 4 * k, b.data_ptr(), 4 * n, k, n, out.data_ptr(), 4 * n,
        0, 4 * k * rows, 4 * k * n, 4 * n * rows,
    )  # fmt: skip
    return out


def _address(x: Tensor | None) -> int:
    return 0 if x is None else int(x.data_ptr())


def _row_grain(rows: int, n: int) -> int:
    """One share where waking a thread would take longer than the work."""
    return 1 if rows * n >= 8192 else max(rows, 1)


def _normalized(
    operation: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, floats: list[float]
) -> Tensor:
    n = x.shape[-1]
    rows = _rows_of(x)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    numbers = np.array(floats, np.float32)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    _here().run(
        operation, rows.shape[0], _row_grain(rows.shape[0], n), rows.data_ptr(),
        4 * rows.stride(0), out.data_ptr(), 4 * n, n, _address(weight), _address(bias),
        numbers.ctypes.data,
    )  # fmt: skip
    return out.view(x.shape)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, offset: float) -> Tensor:
    return _normalized(at.RMS_NORM, x, weight, None, [epsilon, offset])


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return _normalized(at.LAYER_NORM, x, weight, bias, [epsilon])


def _softmax(x: Tensor) -> Tensor:
    _here().reserve(x.shape[-1] + 16)
    return _normalized(at.SOFTMAX, x, None, None, [])


def _row_sum(x: Tensor) -> Tensor:
    rows = _rows_of(x)
    out = x.new_empty(x.shape[:-1])
    _here().run(
        at.ROW_SUM, rows.shape[0], _row_grain(*rows.shape), rows.data_ptr(), 4 * rows.stride(0),
        out.data_ptr(), 4, x.shape[-1], 0, 0, 0,
    )  # fmt: skip
    return out


def _elementwise(operation: int, kind: int, x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    units = (x.numel() + at.ELEMENTS - 1) // at.ELEMENTS
    grain = 2 if units > 4 else units
    _here().run(operation, units, grain, kind, x.data_ptr(), out.data_ptr(), x.numel())
    return out


def _unary(x: Tensor, kind: int) -> Tensor:
    return _elementwise(at.UNARY, kind, x)


def _cos_sin(x: Tensor, sine: bool) -> Tensor:
    return _elementwise(at.COS_SIN, int(sine), x)


def _attention(
    query: Tensor,
    jobs: Tensor,
    positions: Tensor,
    paths: Tensor,
    kv_heads: int,
    value_dim: int,
    scale: float,
    cap: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """(1, heads, rows, dim) against the keys and values that ``jobs`` point to.

    Returns (1, rows, heads, value_dim). See ``backends.cpu._operators`` for the tables.
    """
    _, heads, rows, dim = query.shape
    if query.stride(3) != 1 and dim > 1:
        query = query.contiguous()
    out = query.new_empty((1, rows, heads, value_dim))
    here = _here()
    here.reserve(at.attention_scratch(JOB_ROWS, heads // kv_heads, dim, value_dim))
    numbers = np.array([scale, cap], np.float32)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    here.run(
        at.ATTENTION, jobs.shape[0] * kv_heads, 1, jobs.data_ptr(), query.data_ptr(),
        4 * query.stride(2), 4 * query.stride(1), out.data_ptr(), heads, kv_heads, dim, value_dim,
        positions.data_ptr(), paths.data_ptr(), window, _address(sinks), numbers.ctypes.data,
    )  # fmt: skip
    return out


_library = torch.library.Library("foretell", "DEF")
for _name, _signature, _function in (
    ("linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear),
    ("columns", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _columns),
    ("scores", "(Tensor a, Tensor b) -> Tensor", _scores),
    ("product", "(Tensor a, Tensor b) -> Tensor", _product),
    ("rms_norm", "(Tensor x, Tensor? weight, float epsilon, float offset) -> Tensor", _rms_norm),
    (
        "layer_norm",
        "(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor",
        _layer_norm,
    ),
    ("softmax", "(Tensor x) -> Tensor", _softmax),
    ("row_sum", "(Tensor x) -> Tensor", _row_sum),
    ("unary", "(Tensor x, int kind) -> Tensor", _unary),
    ("cos_sin", "(Tensor x, bool sine) -> Tensor", _cos_sin),
    (
        "attention",
        "(Tensor query, Tensor jobs, Tensor positions, Tensor paths, int kv_heads, int value_dim, "
        "float scale, float cap, int window, Tensor? sinks) -> Tensor",
        _attention,
    ),
):
    _library.define(_name + _signature)
    _library.impl(_name, _function, "CPU")

linear: Any = torch.ops.foretell.linear.default
columns: Any = torch.ops.foretell.columns.default
scores: Any = torch.ops.foretell.scores.default
product: Any = torch.ops.foretell.product.default
rms_norm: Any = torch.ops.foretell.rms_norm.default
layer_norm: Any = torch.ops.foretell.layer_norm.default
softmax: Any = torch.ops.foretell.softmax.default
row_sum: Any = torch.ops.foretell.row_sum.default
unary: Any = torch.ops.foretell.unary.default
cos_sin: Any = torch.ops.foretell.cos_sin.default
attention: Any = torch.ops.foretell.attention.default
