"""Where downloads and compiled kernels are kept, and how a file gets there whole.

`FORETELL_CACHE` names the folder; without it, it is the user's cache folder of the system
(`~/.cache/foretell` on Linux). Everything in it can be deleted at any time.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import platformdirs

from foretell._version import __version__

PARTIAL_PREFIX = ".partial-"


def cache_directory() -> Path:
    """The cache's root; it may not exist yet."""
    chosen = os.environ.get("FORETELL_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("foretell", appauthor=False)


def models_directory() -> Path:
    """Where pulled models are kept."""
    return cache_directory() / "models"


def kernel_cache_directory() -> Path:
    """Where compiled kernels are kept: one folder for each combination that compiles alike."""
    numba = metadata.version("numba")
    tag = f"{sys.implementation.cache_tag}-{sys.platform}"
    return cache_directory() / "kernels" / f"{__version__}-numba-{numba}-{tag}"


@contextmanager
def partial_directory(parent: Path) -> Iterator[Path]:
    """A scratch folder on the cache's own disk, removed at the end however that comes."""
    parent.mkdir(parents=True, exist_ok=True)
    scratch = parent / f"{PARTIAL_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(finished: Path, destination: Path) -> None:
    """Move a finished file to its place in one step, so that nobody ever sees half of it."""
    with finished.open("rb+") as file:
        os.fsync(file.fileno())
    destination.parent.mkdir(parents=True, exist_ok=True)
    finished.replace(destination)


def remove_partials(parent: Path) -> None:
    """Remove what interrupted pulls left behind; call it only while holding the pulls' lock."""
    for leftover in parent.glob(f"{PARTIAL_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
