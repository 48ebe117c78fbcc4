"""A load of streaming clients on `foretell serve`, in several ways, and on llama.cpp's server.

    python benchmarks/server.py --output server.json [--llama-python PYTHON | --llama-server PATH]

Every round asks the same new prompts in each way: one request at a time decoded plainly, all at the
same time decoded plainly (batching alone), and all at the same time with speculation as it is by
default. Each way of each round has an API key of its own, so that nothing is remembered from one
to another. Answers of all ways must be the same tokens. Where --clients has several numbers,
batching is measured with each of them, each number with as many requests or --requests, whichever
is more, the same ones first; one at a time and llama.cpp's server are measured with the first
number, in the first --references rounds. Rates are answers' tokens by wall time,
reading prompts included; what counts are the ratios within a round. llama.cpp's server runs the
same GGUF file with the same requests, for comparison of speed alone. PYTHON is an interpreter with
`xllamacpp`, which brings that server; PATH is a `llama-server`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_load import Answer, foretell_server, many, prompts, stream

from foretell._demo import demo_path
from foretell.bench._machine import command_line, load_average, machine, versions

PLAIN, BATCHING, BOTH, LLAMA = (
    "one at a time, plain",
    "batching",
    "batching, speculation",
    "llama.cpp",
)
PRIVATE = ("--model", "--output", "--llama-python", "--llama-server")
LLAMA_PROGRAM = """
import sys, time, xllamacpp as x
path, slots, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = x.CommonParams()
params.model.path = path
params.n_parallel = slots
params.n_ctx = slots * 512
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
params.n_gpu_layers = 0
params.port = int(sys.argv[4])
server = x.Server(params)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


@contextlib.contextmanager
def llama_server(options: argparse.Namespace, model: str) -> Iterator[str | None]:
    """llama.cpp's server on the same file, if there is one; its address."""
    if options.llama_python is None and options.llama_server is None:
        yield None
        return
    slots, port = options.clients[0], "8797"
    if options.llama_python is not None:
        program = [
            options.llama_python,
            "-c",
            LLAMA_PROGRAM,
            model,
            str(slots),
            str(options.threads),
            port,
        ]
    else:
        program = [
            options.llama_server, "-m", model, "-np", str(slots), "-c", str(slots * 512),
            "-t", str(options.threads), "-ngl", "0", "--host", "127.0.0.1", "--port", port,
        ]  # fmt: skip
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = f"http://127.0.0.1:{port}"
        if options.llama_python is not None:
            assert process.stdout is not None
            found = None
            while found is None:
                line = process.stdout.readline()
                if not line:
                    raise SystemExit("llama.cpp's server did not start")
                found = re.search(r"http://[\w.]+:\d+", line)
            address = found[0]
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health") as ready:
                if ready.status == 200:
                    break
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def body(prompt: str, options: argparse.Namespace, number: int | str) -> dict[str, Any]:
    """A request. Answers have one length, so that all ways have the same to do."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "foretell": {"num_draft_tokens": number},
    }


async def run(
    way: str, clients: int, address: str, round_: int, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Answer]]:
    """One round of one way, for so many clients."""
    count = max(options.requests, clients) if way in (BATCHING, BOTH) else options.requests
    asked = prompts(count, f"round {round_}")
    number: int | str = "auto" if way == BOTH else 0
    key = key_of(way, clients, round_)

    async def ask(index: int) -> Answer:
        request = body(asked[index], options, number)
        if way == LLAMA:
            del request["foretell"]
            request["stream_options"] = {"include_usage": True}
        return await stream(address, request, key)

    began = time.perf_counter()
    answers = await many(ask, range(count), 1 if way == PLAIN else clients)
    seconds = time.perf_counter() - began
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise SystemExit(f"{way}: {errors[0]}")
    tokens = sum(answer.num_tokens for answer in answers)
    return {
        "way": way,
        "round": round_,
        "clients": 1 if way == PLAIN else clients,
        "requests": count,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": statistics.median(answer.first for answer in answers),
    }, answers


def key_of(way: str, clients: int, round_: int) -> str:
    return f"{way}-{clients}-{round_}".replace(" ", "-").replace(",", "")


def keys(options: argparse.Namespace) -> str:
    return " ".join(
        key_of(way, clients, round_)
        for way in (PLAIN, BATCHING, BOTH)
        for clients in options.clients
        for round_ in range(-1, options.rounds)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", help="a GGUF file (the demo model)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--references", type=int, help="as many rounds as there are")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=[32])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", metavar="PYTHON", help="with xllamacpp installed")
    parser.add_argument("--llama-server", metavar="PATH")
    options = parser.parse_args()
    model = options.model or str(demo_path())
    runs: list[dict[str, Any]] = []
    differences = 0
    serve = ("--served-name", "demo", "--threads", str(options.threads))
    serve += ("--max-running", str(max(options.clients)))
    first_clients = options.clients[0]
    references = options.rounds if options.references is None else options.references
    with (
        foretell_server(model, *serve, FORETELL_API_KEYS=keys(options)) as (address, _),
        llama_server(options, model) as llama,
    ):
        loads = [(way, clients) for clients in options.clients for way in (BATCHING, BOTH)]
        for round_ in range(-1, options.rounds):  # the first one warms up
            order = loads[:2] if round_ < 0 else loads[:: -1 if round_ % 2 else 1]
            if 0 <= round_ < references:
                order = [(PLAIN, first_clients), *order]
            if llama is not None and round_ < references:
                order = [*order, (LLAMA, first_clients)]
            texts: list[list[list[int]]] = []
            for way, clients in order:
                where = llama if way == LLAMA else address
                assert where is not None
                result, answers = asyncio.run(run(way, clients, where, round_, options))
                if way != LLAMA:
                    texts.append([answer.token_ids for answer in answers])
                if round_ >= 0:
                    runs.append(result)
                    print(
                        f"{round_} {way:24} {clients:3} clients "
                        f"{result['tokens_per_second']:7.1f} tokens/s",
                        flush=True,
                    )
            longest = max(texts, key=len)
            differences += sum(
                a != b for text in texts for a, b in zip(longest, text, strict=False)
            )
    record = {
        "about": {
            "command": command_line("benchmarks/server.py", sys.argv[1:], PRIVATE),
            "machine": machine(),
            "versions": versions(),
            "load_average": load_average(),
        },
        "settings": {
            name: getattr(options, name)
            for name in ("rounds", "references", "requests", "clients", "max_tokens", "threads")
        },
        "runs": runs,
        "loads": [_load(runs, clients) for clients in options.clients],
        "different_answers": differences,
    }
    print(json.dumps({name: record[name] for name in ("loads", "different_answers")}))
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    return 1 if differences else 0


def _load(runs: list[dict[str, Any]], clients: int) -> dict[str, Any]:
    """What so many clients got, the medians of rates and of ratios within a round."""
    rates: dict[str, dict[int, float]] = {}
    for one in runs:
        if one["way"] == PLAIN or one["clients"] == clients:
            rates.setdefault(one["way"], {})[one["round"]] = one["tokens_per_second"]

    def ratio(name: str, other: str) -> dict[str, Any]:
        rounds = sorted(rates[name].keys() & rates[other].keys())
        each = [rates[name][round_] / rates[other][round_] for round_ in rounds]
        return {"median": statistics.median(each), "rounds": each}

    return {
        "clients": clients,
        "rates": {way: statistics.median(each.values()) for way, each in rates.items()},
        "ratios": {
            f"{BATCHING} / {PLAIN}": ratio(BATCHING, PLAIN),
            **{f"{BOTH} / {way}": ratio(BOTH, way) for way in rates if way != BOTH},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
