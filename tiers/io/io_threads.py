"""A fixed number of threads that run blocking I/O jobs from one queue.

The number of threads is the queue depth that the device sees. They are daemon threads: a disk that
hangs forever must not keep the process from exiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tiers.io.daemon_threads import start_all
from tiers.io.direct_io import Scratch


class IoJob(Protocol):
    """Work for an I/O thread."""

    def run(self, scratch: Scratch) -> None:
        """Do the work. Blocks; must not raise."""

    def notify(self) -> None:
        """Report the result; called when the job counts as finished. Must not raise."""


class Together:
    """Jobs that report together when the last one has finished. Each message to the event loop
    wakes the loop's thread, which costs more than a small job."""

    def __init__(self, post: Callable[[Together], None]) -> None:
        self.jobs: list[Any] = []
        self._post = post
        self._ended = 0
        self._lock = threading.Lock()

    def take(self) -> list[Any]:
        """Return the jobs once, after all have finished. This breaks a cycle of references, so that
        the views of the slab that the jobs hold are freed at once and not by garbage collection."""
        jobs, self.jobs = self.jobs, []
        return jobs

    def one_ended(self) -> None:
        """Count one finished job. Each job calls it once, from any thread, after ``jobs`` is
        complete."""
        with self._lock:
            self._ended += 1
            is_last = self._ended == len(self.jobs)
        if is_last:
            self._post(self)


class IoThreads:
    """``count`` threads. One thread may call ``submit``; any may call ``busy`` (a hint)."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[IoJob | None] = queue.SimpleQueue()
        self._submitted = 0
        self._finished = [0] * count
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        start_all(self._threads, self.stop)

    def submit(self, job: IoJob) -> None:
        """Queue a job; the caller limits how many."""
        self._submitted += 1
        self._queue.put(job)

    def busy(self) -> bool:
        """Return True if a job is queued or running."""
        return self._submitted > sum(self._finished)

    def _run(self, number: int) -> None:
        scratch = Scratch()
        while (job := self._queue.get()) is not None:
            job.run(scratch)
            self._finished[number] += 1
            job.notify()
            del job

    def stop(self) -> None:
        """Finish the queued jobs and end the threads. Blocks as long as a thread hangs."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
