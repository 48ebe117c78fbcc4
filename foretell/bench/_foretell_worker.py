"""Foretell in a process of its own, for ``foretell bench``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell._engine import Chat, Engine
from foretell._result import Generation
from foretell._version import __version__
from foretell.bench._protocol import Answer, Request, Worker, main

COUNTS = (
    "num_steps num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos "
    "prefill_seconds model_seconds"
).split()


class ForetellWorker(Worker):
    """An engine. Its modes: "plain", "auto", or a number of tokens to draft at every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.versions = {"foretell": __version__}
        # Asked before anything was generated, so what is known now is what a profile said.
        self.profile = "used" if engine._experience.costs.known else "none"
        self._chats: dict[str, Chat] = {}

    def answer(self, request: Request) -> Answer:
        options = {
            "num_draft_tokens": _num_draft_tokens(request.mode),
            "max_tokens": request.max_tokens,
            **request.sampling,
        }
        if request.messages is None:
            result = self.engine.generate(list(request.prompt), **options)
        else:
            result = self._chat(request).send(request.messages[-1]["content"], **options)
        return answer_of(result)

    def _chat(self, request: Request) -> Chat:
        """The conversation of the turn before, or a new one that knows what was said."""
        assert request.messages is not None
        before = [dict(message) for message in request.messages[:-1]]
        chat = self._chats.get(request.mode)
        if request.turn == 0 or chat is None or chat.messages != before:
            chat = self._chats[request.mode] = self.engine.chat()
            chat.messages = before
        return chat

    def passes(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        from foretell.backends.cpu._model import CpuModel
        from foretell.bench._passes import measure_passes

        if not isinstance(self.engine.model, CpuModel):
            return None
        return measure_passes(self.engine.model, **settings)


def _num_draft_tokens(mode: str) -> Any:
    return {"plain": 0, "auto": "auto"}[mode] if not mode.isdecimal() else int(mode)


def answer_of(result: Generation) -> Answer:
    """What the protocol wants to know of a generation."""
    stats, told = result.stats, result.stats.to_dict()
    policy = told.get("policy", {})
    extra = {"deciding_seconds": policy["deciding_seconds"]} if policy else {}
    return Answer(
        tokens=list(result.token_ids),
        text=result.text,
        num_tokens=len(result.token_ids),
        decode_tokens=stats.num_decode_tokens,
        decode_seconds=stats.decode_seconds,
        total_seconds=stats.prefill_seconds + stats.decode_seconds,
        prompt_tokens=result.prompt_tokens,
        stats={**{name: told[name] for name in COUNTS}, **extra},
    )


def make(settings: dict[str, Any]) -> ForetellWorker:
    """The engine of the settings."""
    engine = Engine(
        settings["model"],
        settings["draft"],
        settings["drafters"] or None,
        settings["dtype"],
        settings["threads"],
        tokenizer=settings["tokenizer"],
        **settings["loading"],
    )
    return ForetellWorker(engine)


def run() -> None:
    """The process's whole life."""
    main(make)
