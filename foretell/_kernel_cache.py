"""Keeps compiled kernels on disk, where they are found again whatever environment asks.

Numba files its cache by the path of the source and looks at one file only. Here the directory is
named after the content of all kernel sources and the versions that compiled them, so that a new
virtual environment reuses what is there, and an upgrade or an edit never meets stale code. (Numba
itself adds the processor to the key.) A directory that cannot be written costs the compile time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching

from foretell._cache import kernel_cache_directory
from foretell._errors import CapabilityError
from foretell._fork import ForkLock

SOURCES = (
    "backends/cpu/_ir.py",
    "backends/cpu/_simd.py",
    "backends/cpu/_formats.py",
    "backends/cpu/_tiles.py",
    "backends/cpu/_kernels.py",
    "backends/cpu/_pass.py",
    "backends/cpu/_operators.py",
    "_largest.py",
    "_occurrences.py",
    "_kernel_cache.py",
)


@cache
def directory() -> Path:
    """Where the kernels of this very code and these versions lie."""
    digest = hashlib.sha256()
    for part in (numba.__version__, llvmlite.__version__, platform.python_version()):
        digest.update(part.encode() + b"\0")
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return kernel_cache_directory() / digest.hexdigest()[:16]


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    def __init__(self, name: str, source: str) -> None:
        self._name = name
        self._py_file = source  # Numba names it in a warning

    def get_cache_path(self) -> str:
        return str(directory())

    def get_source_stamp(self) -> str:
        return directory().name

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        locator = cls(py_func.__name__, py_file)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code if that can be done: a full disk is no reason not to run it."""
        try:
            super().save_overload(sig, data)
            _write_checksums()
        except OSError:
            _discard()


class Kernel:
    """A function with one signature, compiled or loaded from disk when first needed."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function = function
        self._signature = signature
        self._compiled: Any = None
        self._lock = ForkLock()

    def prepare(self, progress: Callable[[str], None] | None = None) -> Callable[..., None]:
        """The compiled function; calls ``progress`` with a note where that will take a while."""
        with self._lock:
            if self._compiled is None:
                if numba.config.DISABLE_JIT:
                    raise CapabilityError(
                        "NUMBA_DISABLE_JIT is set, and this is compiled code; unset it"
                    )
                self._compiled = self._compile(progress)
            return self._compiled  # type: ignore[no-any-return]

    def _compile(self, progress: Callable[[str], None] | None) -> Any:
        dispatcher = numba.njit(nogil=True, error_model="numpy")(self._function)
        if not _is_intact():
            _discard()
        try:
            dispatcher._cache = _KernelCache(self._function)
            stored = any(directory().glob(f"*{self._function.__name__}*.nbi"))
        except (RuntimeError, OSError):
            stored = False
        if progress is not None and not stored:
            progress("compiling the kernels for this machine, once (about half a minute)")
        dispatcher.compile(self._signature)
        return dispatcher


_CHECKSUMS = "checksums.json"


def _checksums() -> dict[str, str]:
    files = sorted(directory().glob("*.nb[ic]"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _is_intact() -> bool:
    """Whether what is kept is what was written: code with a flipped bit would still run."""
    try:
        kept = json.loads((directory() / _CHECKSUMS).read_text())
        return bool(kept == _checksums())
    except (OSError, ValueError):
        return False


def _write_checksums() -> None:
    handle, name = tempfile.mkstemp(dir=directory())
    with os.fdopen(handle, "w") as file:
        json.dump(_checksums(), file)
    Path(name).replace(directory() / _CHECKSUMS)


def _discard() -> None:
    shutil.rmtree(directory(), ignore_errors=True)
