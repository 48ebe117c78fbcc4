"""One generation: streamed, summed up, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from foretell._engine import Engine
from foretell._errors import OptionError
from foretell._result import Event, FinishReason, Generation
from foretell._sampling import SamplingParams
from foretell.cli._errors import ExitCode
from foretell.cli._interrupt import Interrupt
from foretell.cli._summary import summary
from foretell.cli._terminal import Printer, has_colour, make_printer


@dataclass(frozen=True)
class Request:
    """What to generate, independent of the engine."""

    prompt: str
    system: str | None
    raw: bool
    sampling: SamplingParams
    num_draft_tokens: int
    verification: str = "match"

    def plain(self) -> Request:
        """The same without speculation."""
        return replace(self, num_draft_tokens=0)

    def stream(self, engine: Engine, interrupt: Interrupt) -> Iterator[Event]:
        """Start generating; the chat template is used where there is one, unless ``raw``."""
        text: dict[str, Any] = {"prompt": self.prompt}
        if not self.raw and has_chat_template(engine):
            text = {"messages": self._messages()}
        elif self.system is not None:
            why = "--raw leaves it out" if self.raw else "this model has none"
            raise OptionError(
                f"--system needs a chat template, and {why}; put the text into the prompt instead"
            )
        return engine.stream(
            **text,
            sampling=self.sampling,
            num_draft_tokens=self.num_draft_tokens,
            verification=self.verification,
            is_cancelled=interrupt,
        )

    def _messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


def has_chat_template(engine: Engine) -> bool:
    """Whether the model was made for conversations."""
    return engine.tokenizer is not None and engine.tokenizer.chat_template is not None


def generate(engine: Engine, request: Request, *, as_json: bool) -> ExitCode:
    """Generate once and write the result to stdout."""
    with Interrupt() as interrupt:
        events = request.stream(engine, interrupt)
        if as_json:
            result = finish(events)
            print_json(result.to_dict())
        else:
            printer = make_printer()
            result = show(events, printer)
            printer.note(summary(result, has_colour()))
    cancelled = result.finish_reason is FinishReason.CANCELLED
    return ExitCode.INTERRUPTED if cancelled else ExitCode.OK


def show(events: Iterator[Event], printer: Printer) -> Generation:
    """Write a stream as it comes; returns its result."""
    try:
        for event in events:
            printer.event(event)
            if event.result is not None:
                return event.result
        raise AssertionError("a stream ends with its result")
    finally:
        printer.end()


def finish(events: Iterator[Event]) -> Generation:
    """The result of a stream nobody watches."""
    for event in events:
        if event.result is not None:
            return event.result
    raise AssertionError("a stream ends with its result")


def print_json(value: dict[str, Any]) -> None:
    """Exactly one JSON object, on one line."""
    sys.stdout.write(json.dumps(value) + "\n")
