"""A conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final

from foretell._engine import Engine
from foretell._errors import ContextLengthError, InputError, OptionError
from foretell._result import FinishReason
from foretell._sampling import SamplingParams
from foretell.cli._errors import ExitCode
from foretell.cli._generate import has_chat_template, show
from foretell.cli._interrupt import Interrupt
from foretell.cli._prompt import check_text
from foretell.cli._summary import summary
from foretell.cli._terminal import has_colour, make_printer, visible

PROMPT: Final = "> "
HELP: Final = (
    "/exit or Ctrl-D leaves, /reset starts over, Ctrl-C stops an answer and a second one leaves"
)


def chat(
    engine: Engine,
    system: str | None,
    sampling: SamplingParams,
    num_draft_tokens: int,
    verification: str = "match",
) -> ExitCode:
    """Take turns until the user leaves; the cache is kept between turns."""
    engine.require_tokenizer("a conversation")
    if not has_chat_template(engine):
        raise OptionError(
            "this model has no chat template, so it cannot hold a conversation; use an "
            "instruction-tuned model, or `foretell generate --raw`"
        )
    printer = make_printer()
    printer.note(HELP)
    conversation = engine.chat(system)
    was_interrupted = explained = False
    while True:
        try:
            text = _read_turn()
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            printer.note("")
            printer.note("Ctrl-C again leaves, and so does Ctrl-D")
            continue
        was_interrupted = False
        if text is None or text == "/exit":
            return ExitCode.OK
        if text == "/reset":
            conversation = engine.chat(system)
            printer.note("a new conversation")
        elif text == "/help":
            printer.note(HELP)
        elif text.startswith("/") and text[1:].isalpha():
            _complain(f"unknown command {text}; the commands are /exit, /reset and /help")
        elif text:
            with Interrupt() as interrupt:
                try:
                    events = conversation.stream(
                        check_text(text, "the message"),
                        sampling=sampling,
                        num_draft_tokens=num_draft_tokens,
                        verification=verification,
                        is_cancelled=interrupt,
                    )
                except ContextLengthError as error:
                    _complain(f"{error}. /reset starts over")
                    continue
                except InputError as error:
                    _complain(str(error))
                    continue
                result = show(events, printer)
            legend = has_colour() and not explained
            printer.note(summary(result, legend))
            explained = explained or result.stats.num_accepted_tokens > 0
            was_interrupted = result.finish_reason is FinishReason.CANCELLED


def _read_turn() -> str | None:
    """One line from the user, None at the end of input."""
    watched = sys.stdin.isatty() and sys.stdout.isatty()
    if watched:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing for input()
    try:
        return input(PROMPT if watched else "").strip()
    except EOFError:
        if watched:
            sys.stdout.write("\n")
        return None
    except UnicodeDecodeError:
        raise InputError("stdin is not valid UTF-8; convert it to UTF-8 first") from None


def _complain(message: str) -> None:
    sys.stderr.write(f"error: {visible(message)}\n")
