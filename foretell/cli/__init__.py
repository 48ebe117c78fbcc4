"""The ``foretell`` command."""

import io
import sys

from foretell.cli._app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; never returns."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe gets UTF-8 whatever the locale; a terminal what it can show.
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    app(prog_name="foretell")
