"""foretell serve."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from foretell._errors import MissingExtraError
from foretell._extras import install_command
from foretell._memory import available_memory
from foretell.cli import _load
from foretell.server._settings import MIB, Settings

KEYS = "FORETELL_API_KEYS"
LEAST_MEMORY = 256 * MIB
CACHE_SHARE = 4
"""A quarter of the memory may keep the beginnings of earlier prompts."""


def serve(
    options: _load.ModelOptions,
    host: str,
    port: int,
    memory: int | None,
    settings: Mapping[str, Any],
) -> int:
    """Serve until a signal; ``memory`` in MiB, by default half of what is free. The exit code."""
    try:
        from foretell.server._app import Server
        from foretell.server._log import configure
        from foretell.server._run import listen, run
    except ImportError as error:
        if (error.name or "").startswith("foretell"):
            raise
        raise MissingExtraError(
            f"the server needs {error.name}, which is not installed: {install_command('server')}"
        ) from error
    chosen = Settings(**settings)
    sock = listen(host, port)
    try:
        engine = _load.load_engine(options)
        size = max(available_memory() // 2, LEAST_MEMORY) if memory is None else memory * MIB
        chosen = replace(chosen, memory_bytes=size, prefix_cache_bytes=size // CACHE_SHARE)
        configure()
        return run(Server(engine, chosen), sock, lambda address: _announce(chosen, address))
    finally:
        sock.close()


def name_of(model: str) -> str:
    """What requests call a model: of a path its last part, and everything else as it is."""
    return Path(model).name if Path(model).exists() else model


def keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The API keys of the command line and of the environment."""
    return (*(given or ()), *os.environ.get(KEYS, "").split())


def _announce(settings: Settings, address: str) -> None:
    typer.echo(f"Serving {settings.model_name} at {address} (API: {address}/v1). Ctrl-C stops.")
