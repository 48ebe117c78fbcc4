"""Any server with OpenAI's API, asked by a process of its own."""

from __future__ import annotations

import time
from typing import Any

from foretell.bench._http import ask, stream
from foretell.bench._protocol import Answer, Clock, Request, Worker, main


class OpenAiWorker(Worker):
    """A server at an address. It is sent messages (or text), and timed from here.

    FORETELL_API_KEY is sent as the bearer token where it is set.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._url = settings["url"].rstrip("/")
        if not self._url.endswith("/v1"):
            self._url += "/v1"
        self._model = settings["model"] or self._first_model()
        self.versions = {"model": str(self._model)}

    def _first_model(self) -> str:
        listed = ask(f"{self._url}/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise OSError(
                f"{self._url}/models lists no model; name one, model=NAME behind the url"
            ) from None

    def answer(self, request: Request) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **request.sampling,
        }
        if request.messages is None:
            path, body["prompt"] = "completions", request.text
        else:
            path, body["messages"] = "chat/completions", list(request.messages)
        clock, pieces, usage = Clock(), list[str](), dict[str, Any]()
        start = time.perf_counter()
        for event in stream(f"{self._url}/{path}", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                if isinstance(piece, str) and piece:
                    pieces.append(piece)
                    clock.came(1)
        total = time.perf_counter() - start
        count = int(usage.get("completion_tokens") or len(pieces))
        return Answer(
            tokens=[],
            text="".join(pieces),
            num_tokens=count,
            decode_tokens=max(count - 1, 0),
            decode_seconds=clock.decode_seconds,
            total_seconds=total,
            prompt_tokens=int(usage.get("prompt_tokens") or len(request.prompt)),
        )


def run() -> None:
    """The process's whole life."""
    main(OpenAiWorker)
