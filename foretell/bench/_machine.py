"""What every benchmark says about the machine: its name, and who else used it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from foretell._version import __version__

# Above this many cores a record is not evidence: threads that wait for each other lose far more
# than their share, and so ratios move as well.
MOST_CORES_USED_BY_OTHERS = 0.1


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    """Foretell, its commit in a checkout, and what its speed depends on."""
    folder = Path(__file__).resolve().parent.parent
    try:
        asked = ["git", "log", "-1", "--format=%h", "--", "."]
        ran = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
        commit = ran.stdout.strip()
    except OSError:
        commit = ""
    return {
        "foretell": __version__,
        "commit": commit or "unknown",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "numba", "llvmlite")},
    }


def load_average() -> list[float]:
    """Over 1, 5 and 15 minutes; the run itself counts in the one taken after it."""
    return [round(value, 2) for value in os.getloadavg()]


def seconds_of_others() -> float:
    """Processor seconds that all but this process and its finished children have used."""
    machine = psutil.cpu_times()
    return float(machine.user + machine.nice + machine.system - sum(os.times()[:4]))


def command_line(script: str, words: Sequence[str], private: Sequence[str]) -> str:
    """How a script was called, without the options whose values are places on this machine.

    ``script`` is its path in the repository.
    """
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in private:
            skip = True
        else:
            kept.append(Path(word).name if "/" in word else word)
    return " ".join(["python", script, *kept])
