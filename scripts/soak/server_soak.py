"""Concurrent streaming clients on `foretell serve`, for minutes: same tokens, no leak.

    python scripts/soak/server_soak.py --minutes 2 --clients 64 --output server_soak.json

First every request of a set is asked alone and decoded plainly; then so many clients ask them at
random, speculatively, in streams, and now and then one hangs up in the middle. Every complete
answer must be the tokens and the text of the single request. The server's memory is looked at all
along: after a warm-up of a third of the time it must stay flat. Exit code 1 if anything of that
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from server_load import Answer, foretell_server, prompts, resident_bytes, stream  # noqa: E402

from foretell.bench._machine import command_line, machine, versions  # noqa: E402

MOST_GROWTH = 0.05
"""Of the memory after the warm-up, from its first half of what follows to its second."""


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of several kinds and lengths."""
    draw = random.Random(seed)
    found = []
    for prompt in prompts(count, f"soak {seed}"):
        found.append(
            {
                "model": "demo",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": draw.choice((8, 24, 48, 96)),
                "temperature": draw.choice((0, 0, 1, 0.6)),
                "seed": draw.randrange(1 << 30),
                "frequency_penalty": draw.choice((0, 0, 0, 0.3)),
            }
        )
    return found


class Soak:
    """What is asked, what came of it, and what the server's memory did meanwhile."""

    def __init__(self, address: str, pid: int, options: argparse.Namespace) -> None:
        self.address, self.pid, self.options = address, pid, options
        self.asked = requests(options.requests, options.seed)
        self.expected: list[Answer] = []
        self.memory: list[tuple[float, int]] = []
        self.complete = self.left = self.tokens = 0
        self.differences: list[dict[str, Any]] = []

    async def run(self) -> None:
        for request in self.asked:
            answer = await stream(self.address, {**request, "foretell": {"num_draft_tokens": 0}})
            if answer.error:
                raise SystemExit(f"a single request failed: {answer.error}")
            self.expected.append(answer)
        end = time.monotonic() + 60 * self.options.minutes
        watching = asyncio.ensure_future(self._watch())
        await asyncio.gather(*(self._client(i, end) for i in range(self.options.clients)))
        watching.cancel()

    async def _watch(self) -> None:
        began = time.monotonic()
        while True:
            self.memory.append((time.monotonic() - began, resident_bytes(self.pid)))
            await asyncio.sleep(1)

    async def _client(self, number: int, end: float) -> None:
        draw = random.Random(f"{self.options.seed} {number}")
        while time.monotonic() < end:
            index = draw.randrange(len(self.asked))
            tokens = draw.choice(("auto", "auto", "auto", 0, 3, 8))
            body = {**self.asked[index], "foretell": {"num_draft_tokens": tokens}}
            asking = asyncio.ensure_future(stream(self.address, body))
            if draw.random() < self.options.leaving:
                await asyncio.wait({asking}, timeout=draw.uniform(0, 2))
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait({asking})
                    self.left += 1
                    continue
            self._compare(index, tokens, await asking)

    def _compare(self, index: int, tokens: object, answer: Answer) -> None:
        expected = self.expected[index]
        self.complete += 1
        self.tokens += answer.num_tokens
        if (answer.error, answer.token_ids, answer.text) != (
            None,
            expected.token_ids,
            expected.text,
        ):
            self.differences.append(
                {
                    "request": self.asked[index],
                    "num_draft_tokens": tokens,
                    "error": answer.error,
                    "expected": expected.token_ids,
                    "given": answer.token_ids,
                }
            )

    def growth(self) -> float:
        """How much more memory the last third took than the second, as a share."""
        third = len(self.memory) // 3
        middle = [size for _, size in self.memory[third : 2 * third]]
        last = [size for _, size in self.memory[2 * third :]]
        return max(last) / max(middle) - 1 if middle else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32, help="different ones")
    parser.add_argument("--leaving", type=float, default=0.1, help="share of clients that hang up")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    serve = ("--served-name", "demo", "--max-running", str(options.clients), "--memory", "2048")
    with foretell_server(options.model, *serve) as (address, pid):
        soak = Soak(address, pid, options)
        began = time.monotonic()
        asyncio.run(soak.run())
        seconds = time.monotonic() - began
    growth = soak.growth()
    record = {
        "about": {
            "command": command_line(
                "scripts/soak/server_soak.py", sys.argv[1:], ("--model", "--output")
            ),
            "machine": machine(),
            "versions": versions(),
        },
        "settings": {
            name: getattr(options, name)
            for name in ("minutes", "clients", "requests", "leaving", "seed")
        },
        "seconds": seconds,
        "complete_answers": soak.complete,
        "clients_that_hung_up": soak.left,
        "tokens": soak.tokens,
        "differences": soak.differences,
        "memory_bytes": soak.memory[:: max(1, len(soak.memory) // 60)],
        "memory_growth_after_warm_up": growth,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(
        f"{soak.complete} answers, {soak.left} clients hung up, {len(soak.differences)} "
        f"differences, memory grew by {growth:.1%} after the warm-up"
    )
    return 1 if soak.differences or growth > MOST_GROWTH or not soak.complete else 0


if __name__ == "__main__":
    sys.exit(main())
