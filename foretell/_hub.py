"""Models that need no path."""

from __future__ import annotations

import re
from pathlib import Path

DEMO = "demo"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*", re.ASCII)


def is_repository_name(name: str) -> bool:
    return bool(_REPOSITORY.fullmatch(name))


def demo_path() -> Path:
    raise NotImplementedError


def snapshot_path(name: str, *, revision: str | None = None) -> Path:
    raise NotImplementedError
