"""From exceptions to one clear message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from foretell._errors import ForetellError
from foretell.cli._terminal import visible


class ExitCode(IntEnum):
    """What the process returns, as documented in ``foretell --help``."""

    OK = 0
    DIFFERED = 1
    """``--compare`` found a difference."""
    FAILED = 2
    """The request could not be carried out."""
    INTERRUPTED = 130
    """Ctrl-C."""


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn whatever a command raises into a message on stderr and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _end_line()
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        _leave_quietly()
    except ForetellError as error:
        _fail(str(error), debug)
    except Exception as error:
        name = type(error).__name__
        hint = "" if debug else "; run it again with --debug to see where it happened"
        _fail(f"unexpected {name}: {error}{hint}", debug)


def _fail(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"error: {visible(message)}\n")
    raise typer.Exit(ExitCode.FAILED)


def _end_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\n")


def _leave_quietly() -> None:
    # The reader of the pipe has seen enough. Python flushes stdout once more at exit, and must
    # find somewhere to flush it to.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    raise typer.Exit(ExitCode.OK)
