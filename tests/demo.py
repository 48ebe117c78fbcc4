"""The demo model for tests that want a real one."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from foretell import _hub
from foretell._errors import DownloadError


@functools.cache
def _find_demo() -> Path | str:
    chosen = os.environ.get("FORETELL_TEST_DEMO")
    if chosen:
        return Path(chosen)
    try:
        return _hub.demo_path()
    except DownloadError as error:
        return str(error)


def demo_file() -> Path:
    """The demo's GGUF file: FORETELL_TEST_DEMO, else the cache's, pulled once if need be.

    Skips the test, with the reason, where it cannot be had.
    """
    found = _find_demo()
    if isinstance(found, str):
        pytest.skip(f"no demo model: {found}")
    return found
