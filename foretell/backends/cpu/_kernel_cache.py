"""Keeps compiled kernels on disk, where they are found again whatever environment asks.

Numba files its cache by the path of the source and looks at one file only. Here the directory is
named after the content of all kernel sources and the versions that compiled them, so that a new
virtual environment reuses what is there, and an upgrade or an edit never meets stale code. (Numba
itself adds the processor to the key.) A directory that cannot be written costs the compile time.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching

from foretell._cache import kernel_cache_directory
from foretell._errors import CapabilityError

SOURCES = (
    "_ir.py",
    "_simd.py",
    "_formats.py",
    "_tiles.py",
    "_kernels.py",
    "_pass.py",
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
    def __init__(self, name: str) -> None:
        self._name = name

    def get_cache_path(self) -> str:
        return str(directory())

    def get_source_stamp(self) -> str:
        return directory().name

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        locator = cls(py_func.__name__)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation


class Kernel:
    """A function with one signature, compiled or loaded from disk when first needed."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function = function
        self._signature = signature
        self._compiled: Any = None
        self._lock = threading.Lock()

    def prepare(self, progress: Callable[[str], None] | None = None) -> Callable[..., None]:
        """The compiled function; calls ``progress`` with a note where that will take a while."""
        with self._lock:
            if self._compiled is None:
                if numba.config.DISABLE_JIT:
                    raise CapabilityError(
                        "NUMBA_DISABLE_JIT is set, and the cpu backend is compiled code; unset it"
                    )
                try:
                    self._compiled = self._compile(progress)
                except (EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError):
                    shutil.rmtree(directory(), ignore_errors=True)  # a damaged cache
                    self._compiled = self._compile(progress)
            return self._compiled  # type: ignore[no-any-return]

    def _compile(self, progress: Callable[[str], None] | None) -> Any:
        dispatcher = numba.njit(nogil=True, error_model="numpy")(self._function)
        try:
            dispatcher._cache = _KernelCache(self._function)
            stored = any(directory().glob("*.nbi"))
        except (RuntimeError, OSError):
            stored = False
        if progress is not None and not stored:
            progress("compiling the kernels for this machine, once (about half a minute)")
        dispatcher.compile(self._signature)
        return dispatcher
