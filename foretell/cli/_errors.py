"""From exceptions to one clear message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import typer

from foretell._errors import ForetellError
from foretell.cli._interrupt import INTERRUPTED, raising_at_ctrl_c
from foretell.cli._terminal import visible


class ExitCode(IntEnum):
    """What the process returns, as documented in ``foretell --help``."""

    OK = 0
    DIFFERED = 1
    """``--compare`` found a difference."""
    FAILED = 2
    """The request could not be carried out."""
    INTERRUPTED = INTERRUPTED
    """Ctrl-C."""


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn whatever a command raises into a message on stderr and an exit code."""
    raising_at_ctrl_c()
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _end_line()
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of the pipe has seen enough.
        _leave_nothing_to_flush()
        raise typer.Exit(ExitCode.OK) from None
    except ForetellError as error:
        raise _failed(str(error), debug) from None
    except OutputError as error:
        _leave_nothing_to_flush()
        raise _failed(str(error), debug) from None
    except Exception as error:
        name = type(error).__name__
        hint = "" if debug else "; run it again with --debug to see where it happened"
        raise _failed(f"unexpected {name}: {error}{hint}", debug) from None


class OutputError(OSError):
    """What stdout is connected to takes no more."""

    def __str__(self) -> str:
        return f"cannot write to the output: {(self.strerror or 'it failed').lower()}"


class Output:
    """A stream whose failures can be told from those of other files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._named():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


@contextmanager
def named_output() -> Iterator[None]:
    """While entered, stdout is an Output; its failure outside of commands is reported as well."""
    stdout = sys.stdout
    sys.stdout = Output(stdout)
    try:
        yield
    except OutputError as error:
        _leave_nothing_to_flush()
        complain(str(error))
        sys.exit(ExitCode.FAILED)
    finally:
        sys.stdout = stdout


def complain(message: str) -> None:
    """One line on stderr."""
    with suppress(OSError):  # there is no other place to tell it
        sys.stderr.write(f"error: {visible(message)}\n")
        sys.stderr.flush()


def _failed(message: str, debug: bool) -> typer.Exit:
    if debug:
        traceback.print_exc()
    complain(message)
    return typer.Exit(ExitCode.FAILED)


def _end_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\n")


def _leave_nothing_to_flush() -> None:
    # Python flushes stdout once more at exit, and must find somewhere to flush it to.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
