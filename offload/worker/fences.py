"""Fences of one rank: a step waits for stores that still read the blocks it is about to overwrite.

Belongs to the thread that drives vLLM's model runner. The loop only completes the futures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from offload.messages.plan import StoreJob
from offload.messages.report import JobResult


class Fences:
    """The stores that were posted and not answered yet, by job."""

    def __init__(self) -> None:
        self._reading: dict[int, Future[None]] = {}
        self._poisoned: set[int] = set()
        self._missed: set[int] = set()  # jobs for which a step has waited without success

    def __len__(self) -> int:
        return len(self._reading)

    def add(self, stores: Iterable[StoreJob]) -> dict[int, Future[None]]:
        """Add stores. Each future must be completed when the store has read its blocks; a store
        whose future is cancelled must not begin."""
        added: dict[int, Future[None]] = {store.job: Future() for store in stores}
        self._reading |= added
        return added

    def remove(self, jobs: Iterable[int]) -> None:
        """Remove stores that were not posted after all."""
        for job in jobs:
            self._reading.pop(job, None)

    def is_reading(self, job: int) -> bool:
        """True if this store may still read its blocks."""
        reading = self._reading.get(job)
        return reading is not None and not reading.done()

    def wait(self, jobs: Sequence[int], timeout_s: float) -> int:
        """Wait until these stores have read their blocks, for at most ``timeout_s`` seconds in all.

        Returns how many have not; they are poisoned. A store that is already poisoned is not waited
        for again. While a store for which a step has waited without success still hangs, no other
        store is waited for either: copies run one after the other.
        """
        deadline = time.monotonic() + timeout_s
        missed = 0
        for job in jobs:
            reading = self._reading.get(job)
            if reading is None or job in self._poisoned:
                continue
            try:
                reading.result(0.0 if self._missed else max(0.0, deadline - time.monotonic()))
            except (FutureTimeoutError, CancelledError):
                self.poison([job])
                self._missed.add(job)
                missed += 1
        return missed

    def poison(self, jobs: Iterable[int]) -> None:
        """Fail these stores, whatever they still copy. One that has not begun never will."""
        for job in jobs:
            if job in self._reading:
                self._reading[job].cancel()
                self._poisoned.add(job)

    def answered(self, job: int, result: JobResult) -> JobResult:
        """A job has ended: return the result that may be reported for it."""
        self._reading.pop(job, None)
        self._missed.discard(job)
        if job not in self._poisoned:
            return result
        self._poisoned.discard(job)
        return JobResult(failed=True)
