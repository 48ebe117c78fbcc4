"""llama.cpp's own server, started and asked by a process that ends with the driver."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections import deque
from threading import Thread
from typing import Any

from foretell.bench._http import ask
from foretell.bench._protocol import Answer, Missing, Request, Worker, main

INSTALL = (
    "build llama.cpp (cmake -B build -DGGML_NATIVE=ON && cmake --build build --target "
    "llama-server) or install its package, and name the binary: --llama-server FILE"
)
PATIENCE = 120.0  # seconds until the model is loaded
# All of what llama.cpp would do to probabilities by itself is switched off.
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


class LlamaServerWorker(Worker):
    """A server with one slot. Its mode is a ``--spec-type``, "plain" for none."""

    def __init__(self, settings: dict[str, Any]) -> None:
        binary = find(settings["llama_server"])
        [mode] = settings["modes"]
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [binary, "--model", settings["model"], "--host", "127.0.0.1"]
        command += ["--port", str(port), "--parallel", "1", "--ctx-size", "0"]
        command += ["--threads", str(settings["threads"])]
        command += ["--threads-batch", str(settings["threads"])]
        if mode != "plain":
            command += ["--spec-type", mode]
        if settings["draft"] is not None and mode.startswith("draft"):
            command += ["--model-draft", settings["draft"]]
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self.process = self._server.pid
        self.versions = {"llama.cpp": version(binary)}

    def _wait(self) -> None:
        said: deque[bytes] = deque(maxlen=5)  # read to the end, or the server would stand still
        Thread(target=lambda: said.extend(self._server.stderr or ()), daemon=True).start()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self._server.poll() is not None:
                end = b"".join(said).decode(errors="replace").strip()
                raise RuntimeError(f"llama-server ended at once: {end[-400:]}")
            try:
                ask(f"{self._url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready after {PATIENCE:.0f} s")

    def answer(self, request: Request) -> Answer:
        body = {
            "prompt": list(request.prompt),
            "n_predict": request.max_tokens,
            "cache_prompt": request.turn > 0,
            "return_tokens": True,
            **SAMPLING,
            **request.sampling,
        }
        start = time.perf_counter()
        answer = ask(f"{self._url}/completion", body)
        total = time.perf_counter() - start
        timings = answer["timings"]
        # The first token is the prompt's, and the time it came is where "predicted" begins.
        predicted = int(timings["predicted_n"])
        decoded = max(predicted - 1, 0)
        drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
        return Answer(
            tokens=list(answer.get("tokens", ())),
            text=str(answer.get("content", "")),
            num_tokens=predicted,
            decode_tokens=decoded,
            decode_seconds=float(timings["predicted_ms"]) / 1000,
            total_seconds=total,
            prompt_tokens=len(request.prompt),
            stats={
                "num_steps": decoded - accepted,
                "num_draft_tokens": drafted,
                "num_accepted_tokens": accepted,
            },
        )

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def find(binary: str | None) -> str:
    """The binary named, or the one on the path."""
    found = shutil.which(binary or "llama-server")
    if found is None:
        raise Missing(f"there is no {binary or 'llama-server on the path'}; {INSTALL}")
    return found


def version(binary: str) -> str:
    """What it says of itself."""
    ran = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.+)", ran.stdout + ran.stderr)
    return found[1].strip() if found else "unknown"


def spec_types(binary: str | None, *, draft: bool) -> list[str]:
    """The ``--spec-type``s it has: those that need no other model, and with ``draft`` a model's."""
    try:
        found = find(binary)
    except Missing:
        return []
    ran = subprocess.run([found, "--help"], capture_output=True, text=True, check=False)
    line = re.search(r"--spec-type ([\w,-]+)", ran.stdout + ran.stderr)
    names = line[1].split(",") if line else []
    return [
        name for name in names if name.startswith("ngram") or (draft and name == "draft-simple")
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run() -> None:
    """The process's whole life."""
    main(LlamaServerWorker)
