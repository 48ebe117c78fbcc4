"""The one place where the command line gets its engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretell._engine import Engine
from foretell.cli._terminal import announced
from foretell.drafters import SuffixMemory


@dataclass(frozen=True)
class ModelOptions:
    """Which models to run, and how."""

    model: str
    draft: str | None
    drafters: tuple[str, ...]
    dtype: str
    threads: int | None
    tokenizer: Path | None
    remembers: bool = False
    """Draft from earlier outputs, too, each owner's apart."""
    backend: str = "auto"
    device: str | None = None
    exact: bool | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False


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
            backend=options.backend,
            device=options.device,
            exact=options.exact,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            suffix_memory=SuffixMemory() if options.remembers else None,
            progress=progress,
        )
