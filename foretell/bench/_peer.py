"""The driver's side of an engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from foretell._cache import models_directory
from foretell._errors import ForetellError, shown
from foretell.bench._engines import EngineSpec, Places, settings_of
from foretell.bench._protocol import Answer, Missing, Request
from foretell.bench._record import is_amount, is_count, is_number

WORKERS: Final = {
    "foretell": "_foretell_worker",
    "transformers": "_transformers_worker",
    "openvino": "_openvino_worker",
    "llama.cpp": "_llama_server_worker",
    "openai": "_openai_worker",
}
ROOT: Final = Path(__file__).resolve().parent.parent.parent
# Another Python imports this package's few files for workers from here, and nothing else: what lies
# beside it, the libraries of this Python, must not be mixed with its own.
BOOT: Final = """
import sys
sys.path.insert(0, {root!r})
from foretell.bench import {worker} as worker
{forget}
worker.run()
"""
PATIENCE: Final = 10.0  # seconds for a process to end by itself
LONGEST_ANSWER: Final = 3600.0  # seconds until a process that says nothing is given up
MOST_CHARACTERS: Final = 64 << 20  # of a line
SETTLE: Final = 0.25
"""Seconds to wait before an engine's turn. Threads of OpenMP that have nothing to do look for work
for up to 0.2 seconds before they sleep, and would take a core from the one whose turn it is. Told
to sleep at once they would wake late at each of thousands of loops: llama.cpp decodes at a third of
its speed then."""
QUIET: Final = {"TOKENIZERS_PARALLELISM": "false"}


class PeerError(ForetellError):
    """An engine failed at a request, or its process ended."""


class PeerGone(PeerError):
    """Its process ended."""


class Peer(ABC):
    """An engine that can be asked."""

    profile: str | None = None
    """Once it has started: the worker's."""

    @abstractmethod
    def start(self) -> Mapping[str, str]:
        """Load it, and return its versions. Raises Missing, or PeerError with its last words."""

    @abstractmethod
    def ask(self, request: Request) -> Answer:
        """Raises PeerError, or PeerGone where no further answer will come."""

    @abstractmethod
    def passes(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """T(k) against the limits, or None where it cannot tell."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class ProcessPeer(Peer):
    """One in its own process, with its own threads; between requests it waits on a pipe."""

    def __init__(self, kind: str, settings: dict[str, Any], python: str | None = None) -> None:
        self._settings = settings
        forget = "" if python is None else "sys.path.pop(0)"
        boot = BOOT.format(root=str(ROOT), worker=WORKERS[kind], forget=forget)
        self._command = [python or sys.executable, "-P", "-c", boot]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Mapping[str, str]:
        threads = str(self._settings["threads"])
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                env={**os.environ, **QUIET, **counts},
                start_new_session=True,  # Ctrl-C is for the driver, which then ends the others
            )
        except OSError as error:
            raise Missing(f"cannot run {self._command[0]}: {error.strerror or error}") from None
        hello = self._exchange(self._settings)
        if "missing" in hello:
            raise Missing(hello["missing"])
        versions = hello.get("versions")
        if not isinstance(versions, dict):
            raise PeerGone(f"its process began with {shown(hello)}, which is no greeting")
        self.profile = hello["profile"] if hello.get("profile") in ("used", "none") else None
        return {str(name): str(version) for name, version in versions.items()}

    def ask(self, request: Request) -> Answer:
        time.sleep(SETTLE)
        return checked(self._exchange(asdict(request)))

    def passes(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._exchange({"passes": dict(settings)}).get("passes")
        return found

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """The process and all that it started."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def _exchange(self, value: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(LONGEST_ANSWER, self._kill)
        late.daemon = True
        late.start()
        try:
            print(json.dumps(value), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline(MOST_CHARACTERS)
        except (OSError, ValueError):  # a pipe that is closed, or bytes that are no text
            line = ""
        finally:
            was_late = late.finished.is_set()
            late.cancel()
        if not line:
            raise PeerGone(
                f"its process said nothing for {LONGEST_ANSWER:g} seconds, and was ended"
                if was_late
                else "its process ended without a word"
            )
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise PeerGone(f"its process answered {shown(line)}, which is not of this protocol")
        if "failed" in answer:
            raise PeerError(str(answer["failed"]))
        return answer


def checked(found: Mapping[str, Any]) -> Answer:
    """An answer with numbers that can be reckoned with. Raises PeerError."""
    try:
        answer = Answer(**found)
    except TypeError as error:
        raise PeerError(f"its answer has other fields than asked for ({error})") from None
    counts = (answer.num_tokens, answer.decode_tokens, answer.prompt_tokens)
    times = (answer.decode_seconds, answer.total_seconds, answer.waiting)
    stats = answer.stats if isinstance(answer.stats, dict) else {"stats": None}
    told = [one for value in stats.values() for one in (value if _is_list(value) else [value])]
    if not (
        all(is_count(count) for count in counts)
        and all(is_amount(amount) for amount in times)
        and all(is_number(number) for number in told)
        and _is_list(answer.tokens)
        and all(is_count(token) for token in answer.tokens)
        and isinstance(answer.text, str)
    ):
        raise PeerError(f"its answer makes no sense: {shown(found)}")
    return answer


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def make_peer(specs: Sequence[EngineSpec], places: Places) -> Peer:
    """A process for specs that share one. Raises Skipped."""
    settings = settings_of(specs, places, models_directory() / "converted")
    return ProcessPeer(specs[0].kind, settings, places.pythons.get(specs[0].kind))
