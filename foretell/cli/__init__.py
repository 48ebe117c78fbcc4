"""The ``foretell`` command."""

from __future__ import annotations

import io
import sys
from typing import Any

from foretell.cli._interrupt import ignore_ctrl_c, leaving_at_ctrl_c

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line and end the process."""
    try:
        run()
    finally:
        ignore_ctrl_c()  # all is said, and the exit code stands


def run() -> None:
    """Run the command line; raises SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe gets UTF-8 whatever the locale; a terminal what it can show.
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    with leaving_at_ctrl_c():
        # Imported here: it takes a moment, in which Ctrl-C may come.
        from foretell.cli._app import app
        from foretell.cli._errors import named_output

        with named_output():
            app(prog_name="foretell")


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foretell.cli._app import app

    return app
