"""What benchmarks and soaks of the server share: a server process, and many streaming clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOPICS = (
    "rivers", "the night sky", "bread", "computers", "a small village", "music", "the sea",
    "bridges", "winter", "horses", "glass", "stars", "trains", "paper", "the moon", "gardens",
)  # fmt: skip


def prompts(count: int, salt: str) -> list[str]:
    """Questions; every other one asks to work on a text, whose answer repeats its input."""
    found = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        if index % 2:
            found.append(
                f"Correct the grammar of this text: The story of {topic} are old ({salt} {index}). "
                f"It begin long ago, when people was few. They goes to see {topic} every year and "
                "they was happy."
            )
        else:
            found.append(f"Tell me something about {topic}, number {index} of {salt}.")
    return found


@dataclass
class Answer:
    """What one streaming client got."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    first: float = 0.0
    """Seconds to the first piece of text."""
    seconds: float = 0.0
    error: str | None = None


@contextlib.contextmanager
def foretell_server(model: str, *options: str, **env: str) -> Iterator[tuple[str, int]]:
    """A server process: its address and process id. It must end well."""
    command = [sys.executable, "-m", "foretell", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start; try `foretell serve` by hand")
        yield found[0], process.pid
        process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0:
            raise RuntimeError(f"the server ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def stream(address: str, body: dict[str, Any], key: str = "") -> Answer:
    """One chat completion as a stream, over a connection of its own, with little work."""
    answer, began = Answer(), time.perf_counter()
    host, _, port = address.removeprefix("http://").partition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({**body, "stream": True}).encode()
        writer.write(
            (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
                f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            ).encode()
            + data
        )
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            answer.error = f"status {status}"
            return answer
        done = False
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            _take(answer, json.loads(line[6:]), time.perf_counter() - began)
        if not done:
            answer.error = answer.error or "the stream was cut"
    except (OSError, ValueError) as error:
        answer.error = repr(error)
    finally:
        answer.seconds = time.perf_counter() - began
        if writer is not None:
            writer.close()
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    usage = chunk.get("usage")
    if usage:
        answer.num_tokens = usage["completion_tokens"]
    for choice in chunk.get("choices", ()):
        text = choice["delta"].get("content") or ""
        if text and not answer.text:
            answer.first = now
        answer.text += text
        if choice.get("finish_reason") and "foretell" in chunk:
            answer.token_ids = chunk["foretell"]["token_ids"]
            answer.num_tokens = len(answer.token_ids)


async def many(
    ask: Callable[[int], Awaitable[Answer]], numbers: Sequence[int], clients: int
) -> list[Answer]:
    """``ask`` for all numbers, ``clients`` at a time; the answers in their order."""
    answers: dict[int, Answer] = {}
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            answers[number] = await ask(number)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[number] for number in numbers]


def resident_bytes(pid: int) -> int:
    """Memory that a process has in RAM, as the system counts it."""
    import psutil

    return int(psutil.Process(pid).memory_info().rss)
