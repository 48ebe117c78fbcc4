"""Schema-driven fuzzing of `foretell serve`: whatever a client sends, it is no 500.

    python scripts/soak/server_fuzz.py --requests 10000 --output server_fuzz.json

schemathesis makes requests out of the server's own OpenAPI document, valid and invalid ones, for
every path and method. Most of them are given the right model's name, or they would all end there.
A status of 500 or more (but 503) is a finding, and so is an error without OpenAI's shape. The model
is a tiny table, so that time goes into requests. Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from foretell.bench._machine import machine, versions  # noqa: E402

ENGINE = json.dumps({"says": "fox jumps", "max_length": 256})


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server on the table model of the tests; its address."""
    program = [
        sys.executable,
        str(ROOT / "tests" / "fake_engine.py"),
        ENGINE,
        "serve",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*program, "--default-max-tokens", "8", "--timeout", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert found, "the server did not start"
        yield found[0]
        process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def problem(response: Any) -> str | None:
    """What is wrong with a response, if anything is."""
    if response.status_code >= 500 and response.status_code != 503:
        return f"status {response.status_code}"
    if response.status_code >= 400:
        try:
            error = json.loads(response.content)["error"]
        except (ValueError, KeyError, TypeError):
            return "an error without OpenAI's shape"
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            return "an error without OpenAI's shape"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    began, statuses, found = time.monotonic(), Counter[str](), []
    with server() as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        # Bodies have much to go wrong, paths little, and what takes nothing is asked once.
        shares = [20 if op.body else 1 if op.path_parameters else 0 for op in operations]
        for operation, share in zip(operations, shares, strict=True):
            count = max(1, options.requests * share // sum(shares))
            for mode in schemathesis.GenerationMode:
                strategy = operation.as_strategy(generation_mode=mode)
                with contextlib.suppress(hypothesis.errors.Unsatisfiable):
                    explore(strategy, (count + 1) // 2, options.seed, statuses, found, mode)
    record = {
        "about": {
            "command": f"python scripts/soak/server_fuzz.py --requests {options.requests} "
            f"--seed {options.seed}",
            "machine": machine(),
            "versions": {**versions(), "schemathesis": schemathesis.__version__},
        },
        "seconds": time.monotonic() - began,
        "requests": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
        "findings": found[:50],
        "num_findings": len(found),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(json.dumps({name: record[name] for name in ("requests", "statuses", "num_findings")}))
    for finding in found[:5]:
        print(finding, file=sys.stderr)
    return 1 if found or not statuses else 0


def explore(
    strategy: Any, count: int, seed: int, statuses: Counter[str], found: list[Any], mode: Any
) -> None:
    """So many requests of one kind."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def ask(case: Any) -> None:
        named = isinstance(case.body, dict) and isinstance(case.body.get("model"), str)
        if named and sum(statuses.values()) % 8:
            case.body["model"] = "demo"
        response = case.call()
        statuses[f"{case.method} {case.path} {mode.value}: {response.status_code}"] += 1
        wrong = problem(response)
        if wrong is not None:
            found.append({"wrong": wrong, "request": case.as_curl_command()[:2000]})

    ask()


if __name__ == "__main__":
    sys.exit(main())
