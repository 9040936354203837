"""Performs one lower tier's writes on one rank, in the order of the plans.

Deletes and resets are barriers: a write planned after a delete may need the freed space, and a
record planned before a reset must not carry the new epoch. Writes between barriers overlap.

A failed delete or reset is repeated before the next write. Until a reset has succeeded, every write
fails: the tier holds records of other weights, and would accept a write of a key that it already
has without replacing the record. A delete must be repeated because the index no longer counts the
space of its keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from offload.messages.plan import WriteThroughJob
from offload.messages.report import JobResult
from offload.telemetry.counters import WorkerStats
from offload.worker.rank_memory import RankMemory
from offload.worker.tier_monitor import CallsInFlight, WatchedTier
from policies.safe_text import safe_repr
from tiers.base import TierError, WriteOutcome

logger = logging.getLogger(__name__)

ReportResult = Callable[[int, JobResult], None]


class TierWriter:
    """A FIFO of operations for one tier, run by one task."""

    def __init__(
        self,
        tier: WatchedTier,
        memory: RankMemory,
        stats: WorkerStats,
    ) -> None:
        self._tier = tier
        self._memory = memory
        self._stats = stats
        self._queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._calls = CallsInFlight()
        self._writing: set[asyncio.Task[None]] = set()
        self._answer: ReportResult = lambda _job, _result: None
        self._task: asyncio.Task[None] | None = None
        self._reported = False
        self._undeleted: dict[bytes, None] = {}
        self._epoch_due: int | None = None
        self._resets = 0  # number of resets that are still in the queue
        self._caught_up = asyncio.Event()

    def start(self, answer: ReportResult) -> None:
        """Start working; ``answer`` receives each write-through's result."""
        self._answer = answer
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stop at once; queued operations are abandoned."""
        if self._task is not None:
            self._task.cancel()
        for task in self._writing:
            task.cancel()

    async def caught_up(self, timeout_s: float) -> bool:
        """True if the tier has reached the epoch that was last requested; waits at most
        ``timeout_s`` for it."""
        if self.is_behind:
            self._caught_up.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._caught_up.wait(), timeout_s)
        return not self.is_behind

    @property
    def is_behind(self) -> bool:
        """True if the tier has not begun the epoch that was last requested."""
        return self._resets > 0 or self._epoch_due is not None

    async def finish(self) -> None:
        """Wait until every queued operation is done."""
        await self._queue.join()
        await self._drain_writes()

    def write(self, job: WriteThroughJob) -> None:
        """Queue a write-through."""
        self._queue.put_nowait(lambda: self._start_write(job))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Queue a deletion, which is a barrier for later writes."""
        if keys:
            self._queue.put_nowait(lambda: self._delete(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Queue a use notification."""
        if keys:
            self._queue.put_nowait(lambda: self._tier.touch(tuple(keys)))

    def reset(self, epoch: int) -> None:
        """Queue a reset. Earlier writes end before it, and later writes belong to the new epoch."""
        self._resets += 1
        self._queue.put_nowait(lambda: self._reset(epoch))

    async def _run(self) -> None:
        while True:
            operation = await self._queue.get()
            try:
                await operation()
            except TierError as error:
                self._report(error)
            except Exception as error:  # one failed operation must not end the tier's writes
                self._report(error)
            finally:
                self._queue.task_done()

    async def _delete(self, keys: Sequence[bytes]) -> None:
        self._undeleted.update(dict.fromkeys(keys))
        if self._undeleted:
            await self._tier.delete(tuple(self._undeleted))
            self._undeleted.clear()

    async def _reset(self, epoch: int) -> None:
        self._epoch_due = epoch
        self._resets -= 1
        await self._drain_writes()
        await self._begin_epoch()

    async def _begin_epoch(self) -> None:
        if self._epoch_due is not None:
            await self._tier.reset(self._epoch_due)
            self._epoch_due = None
            self._undeleted.clear()
            self._caught_up.set()

    async def _start_write(self, job: WriteThroughJob) -> None:
        try:
            await self._begin_epoch()
        except Exception as error:  # the job must be answered, whatever the tier does
            self._report(error)
            self._answer(job.job, JobResult(failed=True))
            return
        try:
            await self._delete(())
        except Exception as error:  # try the write nevertheless
            self._report(error)
            for key in job.keys:
                self._undeleted.pop(key, None)
        while len(self._writing) >= self._calls.limit:
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.ensure_future(self._write(job))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _drain_writes(self) -> None:
        if self._writing:
            await asyncio.wait(set(self._writing))

    async def _write(self, job: WriteThroughJob) -> None:
        result = JobResult(failed=True)
        nbytes = self._memory.groups[job.group].record_bytes
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            views = [self._memory.slab.slot_view(slot, nbytes) for slot in job.slots]
            outcomes = await self._tier.write(job.keys, views)
            bad = frozenset(
                key
                for key, outcome in zip(job.keys, outcomes, strict=True)
                if outcome is not WriteOutcome.OK
            )
            result = JobResult(bad=bad)
            written_bytes = nbytes * (len(job.keys) - len(bad))
            self._stats.wrote(job.tier, written_bytes, loop.time() - began, failures=len(bad))
        except Exception as error:  # the job must be answered, whatever the tier does
            self._report(error)
        finally:
            self._calls.ended(loop.time() - began)
            self._answer(job.job, result)

    def _report(self, error: Exception) -> None:
        """Log once that the tier fails, and count every failure."""
        self._stats.tier_failed()
        if not self._reported:
            self._reported = True
            logger.error("kvtiers: a tier failed; its writes are skipped: %s", safe_repr(error))
