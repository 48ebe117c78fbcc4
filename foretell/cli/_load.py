"""The one place where the command line gets its engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretell._engine import Engine
from foretell.cli._terminal import announced


@dataclass(frozen=True)
class ModelOptions:
    """Which models to run, and how."""

    model: str
    draft: str | None
    drafters: tuple[str, ...]
    dtype: str
    threads: int | None
    tokenizer: Path | None


def load_engine(options: ModelOptions) -> Engine:
    """The engine for these options. Raises ForetellError where something does not fit."""
    with announced() as progress:
        return Engine(
            options.model,
            options.draft,
            list(options.drafters) or None,
            options.dtype,
            options.threads,
            tokenizer=options.tokenizer,
            progress=progress,
        )
