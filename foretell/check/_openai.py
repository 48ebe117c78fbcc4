"""Any server with the OpenAI completions API."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from foretell._errors import ForetellError, OptionError
from foretell.check._others import NEAR_TIE, TOP, Answer

TIMEOUT: Final = 300.0  # seconds; a slow model on a busy machine


class Endpoint:
    """A server at ``url``, asked for completions of its first model. An OtherEngine.

    FORETELL_API_KEY is sent as the bearer token where it is set. Raises ForetellError where the
    server cannot be reached, or answers with something else.
    """

    near_tie = NEAR_TIE

    def __init__(self, url: str, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"{url!r} is no address of a server; use http://host:port/v1")
        self.url = url.rstrip("/")
        if not self.url.endswith("/v1"):
            self.url += "/v1"
        self.name = self.url
        self.model = model or self._first_model()
        self.about: Mapping[str, Any] = {"url": self.url, "model": {"source": self.model}}

    def greedy(self, prompt: str, max_tokens: int) -> Answer:
        choice = self._complete(prompt, max_tokens, temperature=0, logprobs=TOP)
        return _answer(str(choice.get("text", "")), choice.get("logprobs"))

    def sample(self, prompt: str, max_tokens: int, seed: int) -> str:
        choice = self._complete(prompt, max_tokens, temperature=1, top_p=1, seed=seed)
        return str(choice.get("text", ""))

    def _first_model(self) -> str:
        listed = self._request("/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ForetellError(f"{self.url}/models lists no model; is one loaded?") from None

    def _complete(self, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, **options}
        answer = self._request("/completions", body)
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise ForetellError(f"{self.url}/completions gave no choices: {str(answer)[:200]}")
        return choice

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("FORETELL_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:200]
            raise ForetellError(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ForetellError(
                f"cannot ask {self.url}{path}: {reason}; is the server running?"
            ) from error


def _answer(text: str, logprobs: Any) -> Answer:
    """Both shapes there are: parallel lists (completions), or a list of entries (chat)."""
    if not isinstance(logprobs, dict):
        return Answer(text)
    entries = logprobs.get("content")
    if isinstance(entries, list):
        return Answer(
            text,
            tuple(str(entry["token"]) for entry in entries),
            tuple(float(entry["logprob"]) for entry in entries),
            tuple(
                {str(one["token"]): float(one["logprob"]) for one in entry.get("top_logprobs", [])}
                for entry in entries
            ),
        )
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list):
        return Answer(text)
    return Answer(
        text,
        tuple(map(str, tokens)),
        # Some servers give None for what they did not compute.
        tuple(float("nan") if p is None else float(p) for p in logprobs.get("token_logprobs", [])),
        tuple(
            {str(token): float(p) for token, p in (one or {}).items()}
            for one in logprobs.get("top_logprobs") or []
        ),
    )
