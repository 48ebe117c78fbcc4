"""Times calls, and tells the samples other processes cut into from those they left alone.

Only the standard library: engines in environments of their own use it too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A sample counts while its threads waited for a core for at most this share of its time.
MOST_WAITING = 0.02


@dataclass(frozen=True)
class Sample:
    """How long something took, and what share of that its threads spent waiting for a core.

    The share adds up over the threads; 0 where the system does not count it.
    """

    seconds: float
    waiting: float

    @property
    def undisturbed(self) -> bool:
        return self.waiting <= MOST_WAITING


class Watch:
    """Times calls, and asks the system how long a process's threads stood in a queue.

    ``process``: the id of another process; by default this one.

    Linux counts for each thread the nanoseconds it was ready to run and did not. That tells
    the samples another process has cut into from those it left alone.
    """

    def __init__(self, process: int | None = None) -> None:
        self._tasks = Path("/proc") / ("self" if process is None else str(process)) / "task"
        self._files: list[int] = []

    def look(self) -> None:
        """Find the process's threads; those that start later are not watched."""
        self.close()
        if self._tasks.exists():
            for task in self._tasks.iterdir():
                try:
                    self._files.append(os.open(task / "schedstat", os.O_RDONLY))
                except OSError:  # the thread has ended
                    continue

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    def _waited(self) -> int:
        total = 0
        for file in self._files:
            try:
                total += int(os.pread(file, 100, 0).split()[1])
            except (OSError, IndexError):
                continue
        return total

    def time(self, call: Callable[[], object]) -> Sample:
        before = self._waited()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        # A thread that ended takes its count with it.
        return Sample(seconds, max(self._waited() - before, 0) / 1e9 / seconds)

    def best_of(self, wanted: int, tries: int, call: Callable[[], object]) -> Sample:
        """The fastest of ``wanted`` undisturbed samples, or the one that waited least."""
        samples: list[Sample] = []
        quiet: list[Sample] = []
        while len(quiet) < wanted and len(samples) < tries * wanted:
            samples.append(self.time(call))
            quiet += [sample for sample in samples[-1:] if sample.undisturbed]
        if quiet:
            return min(quiet, key=lambda sample: sample.seconds)
        return min(samples, key=lambda sample: sample.waiting)

    def undisturbed(self, tries: int, call: Callable[[], object]) -> Sample:
        """The first undisturbed sample; after ``tries`` the one that waited least."""
        least = self.time(call)
        for _ in range(tries - 1):
            if least.undisturbed:
                break
            least = min(least, self.time(call), key=lambda sample: sample.waiting)
        return least
