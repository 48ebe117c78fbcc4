"""The limits of a machine, and what a pass of the cpu backend has to read and to compute.

T(k), a pass of k tokens, can be no faster than reading the weights and the cache once, nor than
the arithmetic of k rows: the limit is the larger of the two.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types

from foretell.backends.cpu import _pass
from foretell.backends.cpu._formats import row_bytes
from foretell.backends.cpu._layout import EMBEDDING, HEAD, expected_tensors
from foretell.backends.cpu._model import CpuModel
from foretell.backends.cpu._pool import Pool
from foretell.backends.cpu._session import CpuSession
from foretell.backends.cpu._simd import (
    add8,
    atomic_add,
    atomic_load,
    give_way,
    load8,
    pause,
    splat8,
    sum8,
)
from foretell.backends.cpu._weights import aligned_empty, to_bfloat16
from foretell.bench._watch import Watch

BUFFER_BYTES = 640 << 20
CHUNK_BYTES = 1 << 20
MATRIX_SIZE = 2048
# OpenBLAS's threads go on spinning for a while after a product.
SECONDS_UNTIL_QUIET = 0.2


# --- Memory bandwidth -------------------------------------------------------------------


def _sum_chunks(p: Any, thread: int) -> None:  # pragma: no cover (compiled)
    """Add up chunks until none is left: p is counter, finished, total, data, chunks, chunk size.

    Four places of a chunk are read at a time, each into vectors of its own.
    """
    counter, finished, total, data, chunks, size = p[0], p[1], p[2], p[3], p[4], p[5]
    quarter = size // 4
    c = atomic_add(counter, 1)
    while c < chunks:
        a = data + c * size
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat8(np.float32(0.0))
        for i in range(0, quarter, 64):
            s0, s1 = add8(s0, load8(a + i)), add8(s1, load8(a + i + 32))
            b = a + quarter + i
            s2, s3 = add8(s2, load8(b)), add8(s3, load8(b + 32))
            b += quarter
            s4, s5 = add8(s4, load8(b)), add8(s5, load8(b + 32))
            b += quarter
            s6, s7 = add8(s6, load8(b)), add8(s7, load8(b + 32))
        s0, s2 = add8(add8(s0, s1), add8(s2, s3)), add8(add8(s4, s5), add8(s6, s7))
        atomic_add(total, np.int64(sum8(add8(s0, s2))))
        atomic_add(finished, 1)
        c = atomic_add(counter, 1)
    if thread == 0:
        spins = 0
        while atomic_load(finished) < chunks:
            spins += 1
            if spins > 2000:
                give_way()
            else:
                pause()


class Bandwidth:
    """Read-only memory bandwidth: all threads sum one large block of float32 numbers."""

    def __init__(self, threads: int, size: int = BUFFER_BYTES) -> None:
        size = max(CHUNK_BYTES, size // CHUNK_BYTES * CHUNK_BYTES)
        self.num_bytes = size
        self._values = aligned_empty((size // 4,), np.float32)
        # Small whole numbers: the sum of a chunk is exact in whatever order.
        self._values.reshape(-1, 8)[:] = np.arange(8)
        self._expected = size // 32 * 28
        self._pool = Pool(threads)
        signature = types.void(types.int64[::1], types.int64)
        dispatcher = njit(nogil=True, error_model="numpy")(_sum_chunks)
        dispatcher.compile(signature)
        self._sum_chunks = dispatcher
        self.read()

    def read(self) -> None:
        """Read the block once, and check that all of it was read."""
        counters = np.zeros(3 * 16, np.int64)  # cache lines of their own
        base = counters.ctypes.data
        data, chunks = self._values.ctypes.data, self.num_bytes // CHUNK_BYTES
        p = np.array([base, base + 128, base + 256, data, chunks, CHUNK_BYTES], np.int64)
        self._pool.run(self._sum_chunks, p, (counters, self._values))
        if counters[32] != self._expected:
            raise SystemExit("the bandwidth kernel does not add up what is there")

    def measure(self, watch: Watch, tries: int) -> tuple[float, float]:
        """Bytes per second in the best of three reads, and the share of it spent waiting."""
        sample = watch.best_of(3, tries, self.read)
        return self.num_bytes / sample.seconds, sample.waiting


# --- Matrix products --------------------------------------------------------------------


class MatrixProduct:
    """The rate of a large float32 product in NumPy, with as many threads as BLAS was given."""

    def __init__(self, size: int = MATRIX_SIZE) -> None:
        self._a = np.full((size, size), 0.5, np.float32)
        self._b = np.full((size, size), 0.25, np.float32)
        self._out = np.empty((size, size), np.float32)
        self._operations = 2 * size**3
        self._multiply()
        time.sleep(SECONDS_UNTIL_QUIET)

    def _multiply(self) -> None:
        np.matmul(self._a, self._b, out=self._out)

    def measure(self, watch: Watch, tries: int) -> tuple[float, float]:
        """Operations per second in the better of two products, and the share spent waiting."""
        time.sleep(SECONDS_UNTIL_QUIET)
        sample = watch.best_of(2, tries, self._multiply)
        time.sleep(SECONDS_UNTIL_QUIET)
        return self._operations / sample.seconds, sample.waiting


# --- What a pass has to read and to compute ---------------------------------------------


@dataclass(frozen=True)
class Work:
    """Bytes and operations of a model's passes, known from its shape."""

    weight_bytes: int
    """Read by every pass with logits; of an embedding of its own only rows are read."""
    position_bytes: int
    """Keys and values of one position, read by every pass."""
    row_operations: int
    """Two for each parameter a token uses, the head among them."""
    head_operations: int
    position_operations: int
    """Of one row with one position."""
    part_bytes: dict[str, int]
    """Weights of the parts that ``profile`` tells apart."""

    def pass_bytes(self, context: int) -> int:
        return self.weight_bytes + context * self.position_bytes

    def operations(self, context: int, width: int) -> int:
        return width * (self.row_operations + context * self.position_operations)

    def prefill_operations(self, tokens: int) -> int:
        """Two for each parameter used; the head works for the last token alone."""
        return tokens * (self.row_operations - self.head_operations) + self.head_operations


def work_of(model: CpuModel) -> Work:
    """What the passes of a loaded model read and compute."""
    config, weights = model.config, model.weights
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head = HEAD if not config.tied else EMBEDDING
    matrices = {
        name: shape
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and (name != EMBEDDING or head == EMBEDDING)
    }
    head_operations = 2 * int(np.prod(matrices[head]))
    embedding_bytes = config.vocab_size * row_bytes(weights.embedding_kind, hidden)
    shapes = {  # outputs and inputs, in the order of the table of the layers' weights
        "queries, keys, values": ((queries, hidden), (keys, hidden), (keys, hidden)),
        "attention output": ((hidden, queries),),
        "gate and up": ((inner, hidden), (inner, hidden)),
        "down": ((hidden, inner),),
    }
    part_bytes = dict.fromkeys(shapes, 0)
    for row in weights.layers:
        column = _pass.Q_KIND
        for part, matrices_of_part in shapes.items():
            for outputs, inputs in matrices_of_part:
                part_bytes[part] += outputs * row_bytes(int(row[column]), inputs)
                column += 1
    part_bytes["head"] = config.vocab_size * row_bytes(weights.head_kind, hidden)
    item = 2 if model.cache_dtype == "bfloat16" else 4
    return Work(
        weight_bytes=weights.num_bytes - (0 if config.tied else embedding_bytes),
        position_bytes=config.num_layers * config.num_kv_heads * 2 * config.head_dim * item,
        row_operations=2 * sum(int(np.prod(shape)) for shape in matrices.values()),
        head_operations=head_operations,
        position_operations=4 * config.num_layers * queries,
        part_bytes=part_bytes,
    )


def filled_session(model: CpuModel, context: int) -> CpuSession:
    """A session of that length whose cache holds random numbers: no pass depends on which."""
    session = model.new_session()
    session.reserve(context)
    page = np.empty((), model.page_type)
    random = np.random.default_rng(1)
    for name in ("keys", "values"):
        numbers = random.standard_normal(page[name].shape, np.float32)
        page[name] = to_bfloat16(numbers) if model.cache_dtype == "bfloat16" else numbers
    for address in session.page_addresses.tolist():
        ctypes.memmove(address, page.ctypes.data, page.nbytes)
    session.add(context, None)
    session.keep(range(context))
    return session
