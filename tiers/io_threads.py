"""Threads that run blocking I/O, and the one thread that commits.

``IoThreads``: a fixed number of threads over one queue; their number is the queue depth that the
device sees. A job has ``run(scratch)``, which must not raise and reports by its own means.
Threads are daemons: a disk that hangs for ever must not keep the process from exiting.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Protocol

from tiers.direct_io import Scratch


class Job(Protocol):
    """Something to do in an I/O thread."""

    def run(self, scratch: Scratch) -> None:
        """Do it, blocking. Must not raise."""


class IoThreads:
    """``count`` threads. ``submit`` from one thread, ``busy`` from any (a hint)."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._submitted = 0
        self._finished = [0] * count
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; the caller bounds how many."""
        self._submitted += 1
        self._queue.put(job)

    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return self._submitted > sum(self._finished)

    def _run(self, number: int) -> None:
        scratch = Scratch()
        while (job := self._queue.get()) is not None:
            job.run(scratch)
            del job
            self._finished[number] += 1

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued and end; ``False`` if some thread still hangs. Blocks."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
