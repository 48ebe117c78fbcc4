"""Runs Llama, Mistral, Qwen2 and Qwen3 decoders on the CPU, without torch."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell._errors import InputError, OptionError
from foretell._model import Capabilities, FloatArray, Model, Output, Rows, check_rows, depths
from foretell.backends.cpu import _pass as at
from foretell.backends.cpu._buffers import Buffers
from foretell.backends.cpu._checkpoint import Checkpoint, open_checkpoint
from foretell.backends.cpu._config import rope_inverse_frequencies
from foretell.backends.cpu._formats import BF16, F32
from foretell.backends.cpu._kernels import BLOCK
from foretell.backends.cpu._pool import Pool, default_threads
from foretell.backends.cpu._session import CACHE_TYPES, CpuSession, page_type, pages_at_once
from foretell.backends.cpu._weights import DTYPES, Weights

MAX_THREADS = 256


def load(
    source: str | Path,
    *,
    dtype: str = "native",
    threads: int | None = None,
    tokenizer: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    cache_dtype: str = "float32",
) -> CpuModel:
    """Load a model: "demo", a Hugging Face folder, a GGUF file or a hub id.

    ``dtype`` is how the weights are kept: "float32", "bfloat16", "int8" (groups of 32 with a scale
    each) or "native" (as the file has them; a GGUF file's own blocks, computed with as if they
    were float32, to the bit). Activations are float32; ``cache_dtype`` is "float32" or
    "bfloat16", for keys and values. ``threads``: one per usable core by default. ``progress`` is
    called with notes about what takes a while. Raises ModelError (and its kinds),
    InsufficientMemoryError, OptionError.
    """
    check_threads(threads)
    check_choice("dtype", dtype, DTYPES)
    check_choice("cache_dtype", cache_dtype, tuple(CACHE_TYPES))
    checkpoint = open_checkpoint(source, tokenizer=tokenizer, progress=progress)
    return CpuModel(checkpoint, dtype, threads, progress, cache_dtype)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise OptionError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise OptionError(f"{name} is {value!r}; use {' or '.join(map(repr, choices))}")


def check_threads(threads: int | None) -> None:
    """Raise OptionError unless ``threads`` is a sensible number."""
    if threads is not None and (
        isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS
    ):
        raise OptionError(f"threads is {threads!r}; use a whole number from 1 to {MAX_THREADS}")


class CpuModel(Model):
    """A loaded decoder. Safe to call from several threads: passes take turns."""

    capabilities = Capabilities(rollback=True, tree=True, hidden_states=True)
    forks_share = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str = "native",
        threads: int | None = None,
        progress: Callable[[str], None] | None = None,
        cache_dtype: str = "float32",
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_length = config.max_length
        self.tokenizer = checkpoint.tokenizer
        self.eos_token_ids = checkpoint.eos_token_ids
        self.dtype = dtype
        self.threads = threads or default_threads()
        self.weights = Weights(checkpoint, dtype, progress)
        self.cache_dtype = cache_dtype
        self.page_type = page_type(
            config.num_layers, config.num_kv_heads, config.head_dim, cache_dtype
        )
        self.identity = (
            f"cpu {self.weights.fingerprint()}, {dtype} weights, {cache_dtype} cache, "
            f"{self.threads} threads"
        )
        self.position_bytes = self.page_type.itemsize // BLOCK
        self.position_granule = BLOCK * pages_at_once(self.page_type)
        self._run_pass = at.run_pass.prepare(progress)
        self._inverse_frequencies = rope_inverse_frequencies(config)
        empty = np.empty((0, config.head_dim // 2), np.float32)
        self._rotary: tuple[FloatArray, FloatArray] = (empty, empty)
        self._pool = Pool(self.threads)
        self._buffers = Buffers(config, self.threads)
        self._lock = threading.Lock()
        self._profile: npt.NDArray[np.int64] | None = None
        _reset_lock_in_child(self)

    def new_session(self) -> CpuSession:
        return CpuSession(self)

    def forward(self, rows: Sequence[Rows]) -> Output:
        check_rows(self, rows)
        sessions: list[CpuSession] = []
        for part in rows:
            if not isinstance(part.session, CpuSession) or part.session.model is not self:
                raise InputError("the session belongs to another model")
            sessions.append(part.session)
            for layer in part.hidden:
                if not 0 <= layer < self.config.num_layers:
                    raise InputError(
                        f"there is no layer {layer!r}; the layers are "
                        f"0..{self.config.num_layers - 1}"
                    )
        with self._lock:
            batch = Batch(rows, sessions)
            self._extend_rotary_table(int(batch.positions.max()) + 1)
            wanted = batch.wanted_rows(rows)
            logits = np.empty((len(wanted), self.vocab_size), np.float32)
            hidden = {
                layer: np.empty((len(batch.tokens), self.config.hidden_size), np.float32)
                for layer in sorted({layer for part in rows for layer in part.hidden})
            }
            for start in range(0, len(batch.tokens), self._buffers.max_rows):
                stop = min(start + self._buffers.max_rows, len(batch.tokens))
                self._run(batch, start, stop, wanted, logits, hidden)
            for session, part in zip(sessions, rows, strict=True):
                session.add(len(part.tokens), part.parents)
        return batch.output(rows, logits, hidden)

    @contextmanager
    def profile(self) -> Iterator[dict[str, float]]:
        """Where the time of the passes inside goes: shares of each part, filled at the end."""
        shares: dict[str, float] = {}
        counts = self._profile = np.zeros(len(at.PARTS_OF_A_PASS), np.int64)
        try:
            yield shares
        finally:
            self._profile = None
            total = max(1, int(counts.sum()))
            shares.update(zip(at.PARTS_OF_A_PASS, (counts / total).tolist(), strict=True))

    def _run(
        self,
        batch: Batch,
        start: int,
        stop: int,
        wanted: npt.NDArray[np.int64],
        logits: FloatArray,
        hidden: dict[int, FloatArray],
    ) -> None:
        """Rows ``start`` to ``stop`` of the batch through all layers.

        ``p`` is what the pass is told; the names of its entries and their meaning are in ``_pass``.
        """
        first, last = np.searchsorted(wanted, (start, stop))
        rows_wanted = wanted[first:last] - start
        jobs, parts = self._buffers.plan_attention(batch, start, stop)
        self._buffers.reserve(stop - start, parts)
        config, weights, p = self.config, self.weights, np.zeros(at.NUM_PARAMETERS, np.int64)
        phases = at.PHASES_PER_LAYER * config.num_layers + 4
        counters = np.zeros(phases * at.COUNTER_BYTES // 8, np.int64)
        hidden_out = np.zeros(config.num_layers, np.int64)
        for layer, states in hidden.items():
            hidden_out[layer] = states[start:].ctypes.data
        p[at.ROWS] = stop - start
        p[at.THREADS] = self.threads
        p[at.NUM_LAYERS] = config.num_layers
        p[at.HIDDEN] = config.hidden_size
        p[at.INTERMEDIATE] = config.intermediate_size
        p[at.HEADS] = config.num_heads
        p[at.KV_HEADS] = config.num_kv_heads
        p[at.HEAD_DIM] = config.head_dim
        p[at.VOCAB] = config.vocab_size
        p[at.EPSILON] = int(np.float32(config.rms_norm_eps).view(np.int32))
        p[at.NUM_WANTED] = len(rows_wanted)
        p[at.NUM_JOBS] = len(jobs)
        p[at.PARTS] = parts
        p[at.LAYERS] = weights.layers.ctypes.data
        p[at.EMBEDDING] = weights.embedding
        p[at.FINAL_NORM] = weights.final_norm
        p[at.HEAD] = weights.head
        p[at.EMBEDDING_KIND], p[at.HEAD_KIND] = weights.embedding_kind, weights.head_kind
        p[at.CACHE_KIND] = BF16 if self.cache_dtype == "bfloat16" else F32
        for parameter, array in (
            (at.COUNTERS, counters),
            (at.TOKENS, batch.tokens[start:]),
            (at.POSITIONS, batch.positions[start:]),
            (at.SLOTS, batch.slots[start:]),
            (at.PREFIXES, batch.prefixes[start:]),
            (at.PATHS, batch.paths[start:]),
            (at.PAGES, batch.pages[start:]),
            (at.WANTED, rows_wanted),
            (at.JOBS, jobs),
            (at.COS, self._rotary[0]),
            (at.SIN, self._rotary[1]),
            (at.LOGITS, logits[first:]),
            (at.HIDDEN_OUT, hidden_out),
        ):
            p[parameter] = array.ctypes.data
        if self._profile is not None:
            p[at.PROFILE] = self._profile.ctypes.data
        self._buffers.fill(p)
        # A late thread looks at these when the pass is long over; the rest it leaves alone.
        self._pool.run(self._run_pass, p, (counters, hidden_out, weights))

    def _extend_rotary_table(self, positions: int) -> None:
        if positions <= len(self._rotary[0]):
            return
        size = max(2 * len(self._rotary[0]), 512)
        size = max(positions, min(size, self.max_length))
        # The product is rounded to float32 as transformers does; its functions are then exact.
        angles = np.arange(size, dtype=np.float32)[:, None] * self._inverse_frequencies
        wide = angles.astype(np.float64)
        tables = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
        self._rotary = tables  # both at once: an interrupt must not leave one of them short


class Batch:
    """The rows of all sessions of a pass, one after another, as the kernels want them."""

    def __init__(self, rows: Sequence[Rows], sessions: Sequence[CpuSession]) -> None:
        counts = [len(part.tokens) for part in rows]
        for session, count in zip(sessions, counts, strict=True):
            session.reserve(count)
        self.starts = np.concatenate(([0], np.cumsum(counts)))
        total = int(self.starts[-1])
        self.tokens = np.concatenate([np.asarray(part.tokens, np.int64) for part in rows])
        self.positions, self.slots, self.prefixes, self.paths, self.pages = (
            np.zeros(total, np.int64) for _ in range(5)
        )
        self._paths: list[npt.NDArray[np.int64]] = []
        for index, (part, session) in enumerate(zip(rows, sessions, strict=True)):
            here = slice(self.starts[index], self.starts[index + 1])
            self.positions[here] = session.length + np.asarray(depths(part.parents, counts[index]))
            self.slots[here] = session.length + np.arange(counts[index])
            self.prefixes[here] = session.length
            self.pages[here] = session.page_addresses.ctypes.data
            if not np.array_equal(self.slots[here], self.positions[here]):
                assert part.parents is not None
                self.paths[here] = self._tree_paths(part.parents, session.length)

    def _tree_paths(self, parents: Sequence[int], prefix: int) -> list[int]:
        """For each node the address of the slots from the end of the prefix to itself."""
        paths: list[npt.NDArray[np.int64]] = []
        for node, parent in enumerate(parents):
            before = paths[parent] if parent >= 0 else np.zeros(0, np.int64)
            paths.append(np.append(before, prefix + node))
        self._paths += paths  # the addresses are good for as long as the arrays live
        return [path.ctypes.data for path in paths]

    def wanted_rows(self, rows: Sequence[Rows]) -> npt.NDArray[np.int64]:
        """Indices of the rows whose logits were asked for, ascending."""
        wanted = []
        for part, start, stop in zip(rows, self.starts, self.starts[1:], strict=False):
            first = {"all": start, "last": stop - 1, "none": stop}[part.logits]
            wanted.append(np.arange(first, stop))
        return np.concatenate(wanted).astype(np.int64)

    def output(
        self, rows: Sequence[Rows], logits: FloatArray, hidden: dict[int, FloatArray]
    ) -> Output:
        counts = [{"all": len(part.tokens), "last": 1, "none": 0}[part.logits] for part in rows]
        ends = np.cumsum([0, *counts])
        return Output(
            logits,
            hidden,
            tuple((int(a), int(b)) for a, b in pairwise(ends)),
            tuple((int(a), int(b)) for a, b in pairwise(self.starts)),
        )


_models: weakref.WeakSet[CpuModel] = weakref.WeakSet()


def _reset_lock_in_child(model: CpuModel) -> None:
    """A forked child must not wait for a thread that exists in the parent only."""
    _models.add(model)


def _after_fork() -> None:
    for model in _models:
        model._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
