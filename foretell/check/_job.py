"""Parts of a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.check._report import Case, Planted


@dataclass(frozen=True)
class Job:
    """A part of the check, with its share of the time."""

    name: str
    weight: float
    run: Callable[[], Sequence[Case | Planted]]
