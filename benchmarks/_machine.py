"""What every benchmark here says about the machine: its name, its limits, and who else used it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _watch import Watch
from numba import njit, types

import foretell
from foretell.backends.cpu._pool import Pool
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
from foretell.backends.cpu._weights import aligned_empty

# Above this many cores the record is not evidence: threads that wait for each other
# lose far more than their share, and so ratios move as well.
MOST_CORES_USED_BY_OTHERS = 0.1
BUFFER_BYTES = 640 << 20
CHUNK_BYTES = 1 << 20
MATRIX_SIZE = 2048
# OpenBLAS's threads go on spinning for a while after a product.
SECONDS_UNTIL_QUIET = 0.2


# --- Who else used it -------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    """Foretell, its commit in a checkout, and what its speed depends on."""
    folder = Path(foretell.__file__).resolve().parent
    try:
        asked = ["git", "log", "-1", "--format=%h", "--", "."]
        ran = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
        commit = ran.stdout.strip()
    except OSError:
        commit = ""
    return {
        "foretell": foretell.__version__,
        "commit": commit or "unknown",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "numba", "llvmlite")},
    }


def load_average() -> list[float]:
    """Over 1, 5 and 15 minutes; the run itself counts in the one taken after it."""
    return [round(value, 2) for value in os.getloadavg()]


def seconds_of_others() -> float:
    """Processor seconds that all but this process and its finished children have used."""
    machine = psutil.cpu_times()
    return machine.user + machine.nice + machine.system - sum(os.times()[:4])


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


# --- Records ----------------------------------------------------------------------------


def command_line(script: str, words: Sequence[str], private: Sequence[str]) -> str:
    """How a script was called, without the options whose values are places on this machine."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in private:
            skip = True
        else:
            kept.append(Path(word).name if "/" in word else word)
    return " ".join(["python", f"benchmarks/{script}", *kept])
