"""A real server on a free port, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import uvicorn
from fake_engine import byte_tokenizer

from foretell import Engine, Model
from foretell.backends.table import TableModel
from foretell.drafters import SuffixMemory
from foretell.server._app import Server
from foretell.server._run import configured, listen
from foretell.server._settings import Settings

NAME = "table"


class Slow(TableModel):
    """A table whose passes take ``seconds``; notes how many rows each had."""

    seconds = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.passes: list[int] = []

    def forward(self, rows):
        self.passes.append(len(rows))
        time.sleep(self.seconds)
        return super().forward(rows)


def letters_model(seed: int = 0, *, seconds: float = 0.0, **options: Any) -> Slow:
    """Writes letters at random, each depending on the last one, and ends now and then."""
    tokenizer = byte_tokenizer()
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(tokenizer.vocab_size,) * 2).astype(np.float32)
    for token in range(tokenizer.vocab_size):
        if tokenizer.token_text(token).strip().isalpha():
            table[:, token] += 3.0
    model = Slow(table, eos_token_ids=tokenizer.eos_token_ids, **options)
    model.tokenizer = tokenizer
    model.seconds = seconds
    return model


class Running:
    """A server that answers requests."""

    def __init__(self, server: Server, address: str) -> None:
        self.server = server
        self.engine = server.engine
        self.model = server.engine.model
        self.address = address
        self.http = httpx2.Client(base_url=address, timeout=60)

    def openai(self, key: str = "none") -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
        """One request, without any client's help."""
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any = "abc", **options: Any) -> dict[str, Any]:
        """A text completion that must succeed, greedy by default."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
        response = self.post(body)
        assert response.status_code == 200, response.text
        return response.json()

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until nothing waits or runs."""
        end = time.monotonic() + seconds
        while self.server.scheduler.num_running or self.server.scheduler.num_waiting:
            assert time.monotonic() < end, "the server is still at work"
            time.sleep(0.005)


@contextlib.contextmanager
def running(engine: Engine, **settings: Any) -> Iterator[Running]:
    """A server for ``engine``, in a thread of its own."""
    server = Server(engine, Settings(**{"model_name": NAME, **settings}))
    sock: socket.socket = listen("127.0.0.1", 0)
    inner = uvicorn.Server(configured(server))
    thread = threading.Thread(target=lambda: asyncio.run(inner.serve([sock])), daemon=True)
    thread.start()
    while not inner.started:
        assert thread.is_alive()
        time.sleep(0.005)
    here = Running(server, f"http://127.0.0.1:{sock.getsockname()[1]}")
    try:
        yield here
    finally:
        here.http.close()
        inner.should_exit = inner.force_exit = True
        thread.join(10)
        sock.close()
        server.scheduler.stop()
        assert not thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """`serve(model, max_queue=1)`: a running server that ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(model: Model | Engine | None = None, **settings: Any) -> Running:
            if not isinstance(model, Engine):
                memory = SuffixMemory()
                model = Engine(model or letters_model(), suffix_memory=memory)
            return stack.enter_context(running(model, **settings))

        yield start


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for tests that ask it and leave nothing behind."""
    with running(Engine(letters_model(), suffix_memory=SuffixMemory())) as here:
        yield here
