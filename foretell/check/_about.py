"""What was checked, and with what."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foretell._engine import Engine
from foretell._hub import files_hash
from foretell._model import Model, Rows
from foretell._version import __version__

LIBRARIES = ("numpy", "numba", "llvmlite", "tokenizers")


def versions() -> dict[str, str]:
    """Of everything that computes."""
    found = {"foretell": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return {**found, "platform": platform.platform(), "processor": platform.machine()}


def about_engine(engine: Engine, source: str | Path | None = None) -> dict[str, Any]:
    """The engine and the model, with a hash of its files and one of what it computes."""
    model = engine.model
    return {
        "engine": {
            "name": "foretell",
            "version": __version__,
            "backend": type(model).__module__,
            "drafters": [drafter.name for drafter in engine.drafters],
        },
        "versions": versions(),
        "model": {
            "source": None if source is None else str(source),
            "vocab_size": model.vocab_size,
            "files_hash": None if source is None else files_hash(source),
            "logits_hash": logits_hash(model),
        },
    }


def logits_hash(model: Model) -> str:
    """SHA-256 of the logits after the ids 0, 1, 2 and 3: the same wherever the bits are."""
    session = model.new_session()
    tokens = [token % model.vocab_size for token in range(min(4, model.max_length))]
    output = model.forward([Rows(session, tokens)])
    return "sha256:" + hashlib.sha256(output.logits.tobytes()).hexdigest()
