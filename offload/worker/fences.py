"""Fences of one rank: a step waits for stores that still read the blocks it is about to overwrite.

On a GPU the step waits only until the store is submitted. From then on the GPU itself keeps the
order: later launches of the model wait for the end of the copy.

Belongs to the model-runner thread. The loop and the copy lanes only complete the futures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from offload.messages.plan import StoreJob
from offload.messages.report import JobResult

logger = logging.getLogger(__name__)


class Reading(Future[None]):
    """A store that reads its GPU blocks; completed when it has read them."""

    def __init__(self) -> None:
        super().__init__()
        self._end: Future[object | None] = Future()
        self.add_done_callback(lambda _: self._end_is(None))

    def will_end_at(self, event: object) -> None:
        """Record that the store is submitted; on a GPU, ``event`` marks its end. May be called from
        any thread."""
        self._end_is(event)

    def end(self, timeout_s: float) -> object | None:
        """Wait for the event that marks the end, or for the end itself (``None``)."""
        return self._end.result(timeout_s)

    def _end_is(self, event: object | None) -> None:
        with suppress(InvalidStateError):  # the store may end before it has an event
            self._end.set_result(event)


class Fences:
    """Waits for stores. ``reading`` has those that were posted and have no answer yet, by job."""

    def __init__(self) -> None:
        self.reading: dict[int, Reading] = {}
        self._poisoned: set[int] = set()
        self._missed: set[int] = set()  # jobs for which a step has waited without success

    def __len__(self) -> int:
        return len(self.reading)

    def add(self, stores: Iterable[StoreJob]) -> dict[int, Reading]:
        """Add stores. Each future must be completed when the store has read its blocks; a store
        whose future is cancelled must not begin."""
        added = {store.job: Reading() for store in stores}
        self.reading |= added
        return added

    def is_reading(self, job: int) -> bool:
        """True if this store may still read its blocks."""
        reading = self.reading.get(job)
        return reading is not None and not reading.done()

    @property
    def any_reading(self) -> bool:
        """True if any store may still read its blocks."""
        return any(not reading.done() for reading in self.reading.values())

    def fail_unstarted(self) -> None:
        """Fail the stores that have not begun to copy; they never will."""
        for job, reading in self.reading.items():
            if reading.cancel():
                self._poisoned.add(job)

    def wait(self, jobs: Sequence[int], timeout_s: float, hold: Callable[[object], None]) -> int:
        """Wait until these stores have read their blocks, for at most ``timeout_s`` seconds in all.

        Returns the number of stores that have not read them in time; these stores fail, as after
        ``poison``. Does not wait for a store that has failed in this way before. As long as a store
        for which an earlier step stopped waiting still hangs, this waits for no other store either,
        because copies run one after the other.
        """
        deadline = time.monotonic() + timeout_s
        missed = 0
        for job in jobs:
            reading = self.reading.get(job)
            if reading is None or job in self._poisoned:
                continue
            try:
                self._wait(reading, deadline, hold)
            except (FutureTimeoutError, CancelledError):
                self.poison([job])
                self._missed.add(job)
                missed += 1
        return missed

    def _wait(self, reading: Reading, deadline: float, hold: Callable[[object], None]) -> None:
        """Wait for one store. Raises ``FutureTimeoutError`` or ``CancelledError`` if it fails."""

        def left() -> float:
            return 0.0 if self._missed else max(0.0, deadline - time.monotonic())

        event = reading.end(left())
        if event is not None and not reading.done():
            try:
                hold(event)
                return
            except Exception as error:  # the GPU's driver cannot wait, so wait here
                logger.warning("kvtiers: the model's stream cannot wait for a copy: %s", error)
        reading.result(left())

    def poison(self, jobs: Iterable[int]) -> None:
        """Fail these stores, even if they still copy. A store that has not begun never begins."""
        for job in jobs:
            if job in self.reading:
                self.reading[job].cancel()
                self._poisoned.add(job)

    def end_store(self, job: int, result: JobResult) -> JobResult:
        """End a store, and return the result that may be reported for it."""
        self.reading.pop(job, None)
        self._missed.discard(job)
        if job not in self._poisoned:
            return result
        self._poisoned.discard(job)
        return JobResult(failed=True)
