"""How much memory there is left to take: of the machine, and of the container it may be in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken, by the machine and by every control group that limits this process.

    Of a control group that is its limit minus what its processes use; files in the page cache
    give way and do not count. Groups that cannot be read limit nothing. ``root`` is where /proc
    and /sys are.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2; beside version 1 it lies in a folder of its own
            for top in (mount, mount / "unified"):
                yield from _left(top, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _left(mount / "memory", path, *names)


def _left(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """What is left in a group and in those around it, each of which can have a limit.

    In a container the path may be that of the host, which is not there: then the top is its own.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts) + 1):
        folder = top.joinpath(*parts[:depth])
        try:
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(
                int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
            )
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
        yield max(most - max(used - cached, 0), 0)
