"""Threads that run blocking I/O, and the one thread that commits.

``IoThreads``: a fixed number of threads over one queue; their number is the queue depth that the
device sees. A job has ``run(scratch)`` and ``tell()``, which must not raise.
Threads are daemons: a disk that hangs for ever must not keep the process from exiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tiers.io.daemon_threads import start_all
from tiers.io.direct_io import Scratch


class Job(Protocol):
    """Something to do in an I/O thread."""

    def run(self, scratch: Scratch) -> None:
        """Do it, blocking. Must not raise."""

    def tell(self) -> None:
        """Hand over what came of it; called when the job counts as ended. Must not raise."""


class Together:
    """Jobs that are told of at once, by the last of them to end: each message to the event loop
    wakes its thread, which costs more than a small job does."""

    def __init__(self, post: Callable[[Together], None]) -> None:
        self.jobs: list[Any] = []
        self._post = post
        self._ended = 0
        self._lock = threading.Lock()

    def one_ended(self) -> None:
        """Called by each job; from any thread, after ``jobs`` is complete."""
        with self._lock:
            self._ended += 1
            is_last = self._ended == len(self.jobs)
        if is_last:
            self._post(self)


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
        start_all(self._threads, self.stop)

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
            self._finished[number] += 1
            job.tell()
            del job

    def stop(self) -> None:
        """Finish what is queued and end. Blocks, for as long as some thread hangs."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
