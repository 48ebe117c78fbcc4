"""Threads of our own, so that no threading layer's rules apply.

All threads run the same function on the same job and share its chunks among themselves (see
``_pass``). The caller is thread 0 and never waits for another thread to show up.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[[Any, int], None], Any, object]
"""A function, its argument, and what must stay alive while a thread may still look at it."""


class Pool:
    """``threads`` - 1 helpers that wait for jobs; they cost nothing while they wait."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queues: list[queue.SimpleQueue[Job | None]] = []
        self._process = 0
        weakref.finalize(self, _stop, self._queues)

    def run(self, function: Callable[[Any, int], None], argument: Any, keep: object) -> None:
        """Run ``function(argument, thread)`` on every thread; returns when thread 0 is done."""
        if self._process != os.getpid():  # at first, and in a forked child, which has no threads
            self._start()
        for jobs in self._queues:
            jobs.put((function, argument, keep))
        function(argument, 0)

    def _start(self) -> None:
        self._process = os.getpid()
        self._queues.clear()
        for thread in range(1, self.threads):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            threading.Thread(
                target=_work, args=(jobs, thread), name=f"foretell-{thread}", daemon=True
            ).start()


def _work(jobs: queue.SimpleQueue[Job | None], thread: int) -> None:
    while (job := jobs.get()) is not None:
        function, argument, _keep = job
        function(argument, thread)
        del job, function, argument, _keep  # nothing of a job outlives it here


def _stop(queues: list[queue.SimpleQueue[Job | None]]) -> None:
    for jobs in queues:
        jobs.put(None)


def default_threads() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
