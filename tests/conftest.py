"""Fixtures that several files of tests share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fake_engine import fake_engine

from foretell import _profile
from foretell.cli import _load
from foretell.cli import run as run_cli


@dataclass(frozen=True)
class Ran:
    """What a command line wrote and returned."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def profiles_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines learn in a test is neither kept for others nor taken from them."""
    monkeypatch.setattr(
        _profile, "cache_directory", lambda: tmp_path_factory.getbasetemp() / "none" / "file"
    )


@pytest.fixture
def run(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """`run("generate", "hello", stdin=b"")`: the command line in this process, on pipes."""

    def run(*arguments: str, stdin: bytes = b"", load: Any = None, **settings: Any) -> Ran:
        load = load or (lambda opts: fake_engine(opts, **settings))
        monkeypatch.setattr(_load, "load_engine", load)
        monkeypatch.setattr(sys, "argv", ["foretell", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as exit_:
            run_cli()
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        code = exit_.value.code
        return Ran(code if isinstance(code, int) else 0, out.decode(), err.decode())

    return run
