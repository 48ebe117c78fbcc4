"""Threads of our own, so that no threading layer's rules apply.

All threads run the same function on the same job and share its chunks among themselves (see
``_pass``). The caller is thread 0 and never waits for another thread to show up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[[Any, int], None], Any, object]
"""A function, its argument, and what must stay alive while a thread may still look at it."""


class Pool:
    """``threads`` - 1 helpers that wait for jobs; they cost nothing while they wait.

    A job's function must not touch what it is given before thread 0 runs it: an interrupt (Ctrl-C)
    may come after the helpers have the job and before thread 0 does, and then what the job works
    on is gone. ``_pass`` has a word for that, which only thread 0 sets.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers: _Helpers | None = None

    def run(self, function: Callable[[Any, int], None], argument: Any, keep: object) -> None:
        """Run ``function(argument, thread)`` on every thread; returns when thread 0 is done."""
        self.start(function, argument, keep)
        function(argument, 0)

    def start(self, function: Callable[[Any, int], None], argument: Any, keep: object) -> None:
        """Let all threads but the caller's run ``function(argument, thread)``."""
        helpers = self._helpers
        if helpers is None or helpers.process != os.getpid():  # a forked child has no threads
            helpers = self._helpers = _Helpers(self.threads - 1)
        helpers.offer((function, argument, keep))


class _Helpers:
    """Threads of one process, each with a queue that holds the newest job at most."""

    def __init__(self, count: int) -> None:
        self.process = os.getpid()
        self._queues: list[queue.SimpleQueue[Job | None]] = []
        weakref.finalize(self, _stop, self._queues)
        for thread in range(1, count + 1):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            threading.Thread(
                target=_work, args=(jobs, thread), name=f"foretell-{thread}", daemon=True
            ).start()

    def offer(self, job: Job) -> None:
        """Give every helper a job, in place of one that it has not looked at."""
        for jobs in self._queues:
            with contextlib.suppress(queue.Empty):
                jobs.get_nowait()
            jobs.put(job)


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
