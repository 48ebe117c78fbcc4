"""Where the prompt comes from."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from foretell._errors import EmptyPromptError, InputError

Text = TypeVar("Text", bound=str | None)


def read_prompt(argument: str | None, file: Path | None, more: Sequence[str] = ()) -> str:
    """The prompt: the argument, a file, or stdin for ``-`` or where stdin is not a terminal.

    One line end at the end of a file or of stdin is left out: editors and ``echo`` add it.
    """
    if argument is not None and more:
        raise InputError(
            f"got {1 + len(more)} prompts; if they are one, put it in quotes: "
            f"{_quoted([argument, *more])}"
        )
    if argument is not None and file is not None:
        raise InputError("got a PROMPT and a --file; pass one of them")
    if file is not None:
        prompt = _decode(_read_file(file), str(file))
    elif argument is None and sys.stdin.isatty():
        raise EmptyPromptError(
            "there is no prompt; type it after the command in quotes, or pass --file FILE, or - "
            "to read it from stdin"
        )
    elif argument is None or argument == "-":
        prompt = _decode(sys.stdin.buffer.read(), "stdin")
    else:
        prompt = check_text(argument, "the prompt")
    if not prompt:
        raise EmptyPromptError("the prompt is empty; pass some text")
    return prompt


def check_text(text: Text, what: str) -> Text:
    """``text``, if there is any, and if it was valid UTF-8 before Python decoded it."""
    try:
        if text is not None:
            text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid UTF-8; convert it to UTF-8 first") from None
    return text


def check_texts(texts: Sequence[str] | None, what: str) -> tuple[str, ...]:
    """The same for several, or none."""
    return tuple(check_text(text, what) for text in texts or ())


def _quoted(words: Sequence[str]) -> str:
    text = " ".join(words)
    return shlex.quote(text) if len(text) <= 60 else '"..."'


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read --file {file}: {error.strerror or error}") from error


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not valid UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); "
            "convert it to UTF-8 first"
        ) from None
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")
