"""Loads on one rank.

A chunk of a load is already in a slot, is read into a slot, or only passes through a staging
buffer. Reads and copies overlap: a batch goes to the load stream as soon as its bytes are in
memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.messages.plan import IN_SLAB, STAGED, LoadItem, LoadJob
from offload.messages.report import JobResult
from offload.telemetry.counters import WorkerStats
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.open_loads import OpenLoad
from offload.worker.rank_memory import RankMemory
from offload.worker.read_turns import ReadTurns
from offload.worker.staging import Staging, Window
from offload.worker.tier_monitor import WatchedTier
from policies.safe_text import safe_str
from tiers.base import ReadOutcome
from tiers.copy.base import CopyBatch, TransferError
from tiers.tally import Tally

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

logger = logging.getLogger(__name__)

AHEAD_WAIT_S = 60.0
"""A read ahead that has waited this long for its turn is given up. Before its turn,
``load_timeout_s`` does not apply to it unless a request waits for it, because reads ahead wait
while the disk is busy."""


class RankLoads:
    """The state that all loads of a rank share: staging window, reads in flight, and fills.

    A fill is a future per slot that tells whether the bytes that a load reads into the slot are
    intact. Loads of other requests that use the same slot wait for it. A failed fill stays until
    the slot is reused, because a plan made before the failure was known may still use the slot.
    """

    def __init__(
        self,
        memory: RankMemory,
        tiers: Sequence[WatchedTier],
        limits: ExecutorLimits,
        stats: WorkerStats,
        verifier: Verifier | None = None,
    ) -> None:
        self.verifier = verifier
        self.memory = memory
        self.tiers = tiers
        self.stats = stats
        self.read_batch = limits.read_batch
        # One per tier, and one per tier for probes: a tier that hangs must delay neither the other
        # tiers nor the probe that detects its recovery.
        self._reads = [ReadTurns(limits.reads_in_flight, limits.tier_timeout_s) for _ in tiers]
        self._probes = [ReadTurns(1) for _ in tiers]
        self.staging = Staging(memory.staging, len(tiers))
        self._fills: dict[int, asyncio.Future[bool]] = {}
        self._ahead: dict[int, LoadTask] = {}  # by the slots that are read ahead
        self._open: dict[int, LoadTask] = {}
        self.failed = Tally()  # copies

    def open(self, job: LoadJob, load: OpenLoad, after: object | None = None) -> LoadTask:
        """Add a load. Its fills exist from now on, so that later loads can join them.

        Copies into GPU blocks wait for ``after``: a forward pass that was launched earlier may
        still read the blocks.
        """
        task = LoadTask(self, job, load, after)
        task.add(job)
        self._open[job.job] = task
        if job.is_ahead:
            self._ahead.update({item.slot: task for item in job.items})
        return task

    def advance(self, job: LoadJob) -> None:
        """Add a further part of a load.

        If the load was given up, the fills of the part's slots fail, because nothing reads into
        these slots and other loads may be about to join them.
        """
        task = self._open.get(job.job)
        if task is not None:
            task.add(job)
        else:
            self.refuse([job])

    def refuse(self, jobs: Sequence[LoadJob]) -> None:
        """Fail these loads, or parts of loads, without carrying them out."""
        for job in jobs:
            if task := self._open.get(job.job):
                task.give_up()
        for job in jobs:
            try:
                self.expect(job.items)
                self.fail(job.items)
            except Exception as error:  # an invalid load must not affect the others
                logger.warning("kvtiers: a load could not be refused: %r", error)

    def expect(self, items: Iterable[LoadItem]) -> None:
        """Create the fills for these items, which are about to be read."""
        loop = asyncio.get_running_loop()
        for item in items:
            if item.tier != IN_SLAB and item.slot != STAGED:
                self._fills[item.slot] = loop.create_future()

    def fail(self, items: Iterable[LoadItem]) -> None:
        """Fail the fills of these items that have not been read yet; they never will be."""
        for item in items:
            if item.tier != IN_SLAB and item.slot != STAGED:
                self.filled(item.slot, good=False)

    def ended(self, task: LoadTask) -> None:
        """Remove a load that has ended."""
        del self._open[task.job]
        for slot in task.slots_ahead:
            self._ahead.pop(slot, None)

    def abandon(self, request: str) -> None:
        """Abandon this request's load."""
        for task in self._open.values():
            if task.request == request:
                task.abandon()

    def cancel_all(self) -> None:
        """Give up all open loads, because the cache was reset."""
        for task in self._open.values():
            task.give_up()

    def overwrite(self, slots: Iterable[int]) -> None:
        """Drop the fills of these slots, which a store takes over."""
        for slot in slots:
            self._fills.pop(slot, None)

    def fill(self, slot: int) -> asyncio.Future[bool] | None:
        """The fill of a slot, if a load reads or has read into it."""
        return self._fills.get(slot)

    def filled(self, slot: int, good: bool) -> None:
        """Complete the fill of a slot after the read has ended."""
        future = self._fills.get(slot)
        if future is not None and not future.done():
            future.set_result(good)

    def turns(self, tier: int, *, probe: bool) -> ReadTurns:
        """The turns of this tier's reads."""
        return (self._probes if probe else self._reads)[tier]

    def hurry(self, items: Iterable[LoadItem]) -> None:
        """Give reads ahead into the slots of these items the priority of other reads, because a
        request waits for them now."""
        for item in items if self._ahead else ():
            task = self._ahead.get(item.slot)
            if task is not None:
                task.note_awaited()
                for turns in self._reads:
                    turns.hurry(item.slot)

    def release_waiting(self, slots: Collection[int]) -> None:
        """Give up the reads ahead into these slots that have not had their turn."""
        for turns in self._reads:
            turns.release_waiting(slots)


class LoadTask:
    """One load.

    `run` returns when the load no longer uses its slots: when all parts have arrived and ended, or
    when the load was given up and the parts that had arrived have ended.
    """

    def __init__(
        self, loads: RankLoads, job: LoadJob, load: OpenLoad, after: object | None
    ) -> None:
        self.job = job.job
        self.request = job.request
        self.is_ahead = job.is_ahead
        self._is_probe = not (job.request or job.is_ahead)
        self._loads = loads
        self._load = load
        self._items: list[LoadItem] = []
        self._after = after
        self._is_whole = False
        self._parts = 0
        self._new: list[LoadItem] = []
        self._news = asyncio.Event()
        self._came_at = 0.0
        self._waits_for_turn = job.is_ahead
        self._clock_begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self._running = 0
        self._is_given_up = False
        self._late = False
        self._bad: set[bytes] = set()
        self._lost: set[bytes] = set()
        self._corrupt: set[bytes] = set()
        self._mismatched: frozenset[bytes] = frozenset()
        self._failed = False
        self._copying = 0
        self._no_copies = asyncio.Event()
        self._no_copies.set()
        self.abandoned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the load was abandoned."""

    def add(self, job: LoadJob) -> None:
        """Add a part. If an earlier part is missing, the load is given up: an incomplete load must
        not be taken for a complete one."""
        if job.part != self._parts:
            self.give_up()
        self._parts = job.part + 1
        self._loads.expect(job.items)
        self._items += job.items
        self._new += job.items
        self._is_whole = self._is_whole or job.is_last
        self._came_at = asyncio.get_running_loop().time()
        self._news.set()

    @property
    def slots_ahead(self) -> Collection[int]:
        """The slots that are read ahead."""
        return [item.slot for item in self._items] if self.is_ahead else ()

    def note_awaited(self) -> None:
        """Record that a request waits for this read ahead from now on."""
        if self._waits_for_turn:
            self._begin_clock()

    def _begin_clock(self) -> None:
        loop = asyncio.get_running_loop()
        self._waits_for_turn, self._came_at = False, loop.time()
        self._clock_begins.set_result(None)
        self._began = time.perf_counter()

    def time_left(self, timeout_s: float) -> float:
        """Seconds until the load is late, counted as ``timeout_s`` after its newest part arrived.

        The clock does not run while the load only waits for its next part. For a read ahead, it
        starts when the read gets its turn, or when a request waits for the read.
        """
        if not self._running and not self._news.is_set():
            return timeout_s
        if self._waits_for_turn:
            timeout_s = max(timeout_s, AHEAD_WAIT_S)
        return self._came_at + timeout_s - asyncio.get_running_loop().time()

    async def wait_in_time(self, body: asyncio.Future[JobResult], timeout_s: float) -> None:
        """Wait until the load's ``body`` has ended, or the load was abandoned or is late."""
        while (
            not (body.done() or self.abandoned.done()) and (left_s := self.time_left(timeout_s)) > 0
        ):
            events: set[asyncio.Future[Any]] = {body, self.abandoned}
            if self._waits_for_turn:  # the time left becomes shorter when this ends
                events.add(self._clock_begins)
            await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def copies_ended(self) -> None:
        """Wait until no copy into the request's GPU blocks is under way."""
        await self._no_copies.wait()

    def give_up(self, *, late: bool = False) -> None:
        """Start no further copy into the request's GPU blocks, because the request no longer waits
        (``late``: because it has waited too long). A read ahead that never had its turn is not
        late."""
        self._is_given_up = True
        self._late = self._late or (late and not self._waits_for_turn)
        if self.is_ahead:
            self._loads.release_waiting(self.slots_ahead)
        elif late:
            self._loads.stats.load_timed_out()
        self._news.set()

    def abandon(self) -> None:
        """Abandon the load, so that its request does not wait for reads."""
        self.give_up()
        if not self.abandoned.done():
            self.abandoned.set_result(None)

    async def run(self) -> JobResult:
        """Restore every item; never raises. The time of a read ahead counts from its turn on."""
        parts: list[asyncio.Future[list[BaseException | None]]] = []
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._new:
                    parts += self._start()
                if self._is_whole or self._is_given_up:
                    break
            for outcome in [one for part in parts for one in await part]:
                if outcome is not None:
                    logger.warning("kvtiers: a load failed: %r", outcome)
                    self._failed = True
        finally:
            for part in parts:
                part.cancel()
            self._loads.fail(self._items)
            self._loads.ended(self)
        seconds = time.perf_counter() - self._began
        if not self.is_ahead:
            self._loads.stats.load_ended(seconds)
        return JobResult(
            bad=frozenset(self._bad),
            lost=frozenset(self._lost),
            failed=self._failed or self._is_given_up,
            seconds=seconds,
            corrupt=frozenset(self._corrupt),
            late=self._late,
            mismatched=self._mismatched,
        )

    def _start(self) -> list[asyncio.Future[list[BaseException | None]]]:
        """Start the items that have arrived; start none if they cannot be understood."""
        items, self._new = self._new, []
        try:
            pieces = self._pieces(items)
        except Exception as error:  # items that have begun must still be completed
            logger.warning("kvtiers: a part of a load could not be read: %r", error)
            self.give_up()
            return []
        part = asyncio.gather(*pieces, return_exceptions=True)
        self._running += 1
        part.add_done_callback(self._part_ended)
        return [part]

    def _part_ended(self, _part: object) -> None:
        self._running -= 1

    def _pieces(self, new: Sequence[LoadItem]) -> list[Coroutine[Any, Any, None]]:
        """The parallel parts of a load: chunks in slots, chunks that other loads read, and one
        batch of reads each."""
        ready: list[LoadItem] = []
        joined: list[LoadItem] = []
        by_source: dict[tuple[int, bool], list[LoadItem]] = {}
        for item in new:
            if item.tier != IN_SLAB:
                by_source.setdefault((item.tier, item.slot == STAGED), []).append(item)
            elif item.slot == STAGED:
                # an item without slot and tier is the planner's request to fail
                self._bad.add(item.key)
            else:
                fill = self._loads.fill(item.slot)
                (joined if fill is not None and not fill.done() else ready).append(item)
        reads = []
        for (tier, staged), items in by_source.items():
            step = self._loads.read_batch
            if staged:
                step = max(1, min(step, self._window(tier).size))
            reads += [(tier, items[at : at + step]) for at in range(0, len(items), step)]
        pieces = [self._join(ready), self._join(joined)]
        return pieces + [self._read(tier, batch) for tier, batch in reads]

    def _window(self, tier: int) -> Window:
        return self._loads.staging.window(tier, probe=self._is_probe)

    async def _join(self, items: Sequence[LoadItem]) -> None:
        """Copy chunks from slots, once other loads' reads into them have succeeded."""
        self._loads.hurry(items)
        good = []
        for item in items:
            fill = self._loads.fill(item.slot)
            if fill is None or await asyncio.shield(fill):
                good.append(item)
            else:
                self._bad.add(item.key)
        await self._copy(good)

    async def _read(self, tier: int, items: Sequence[LoadItem]) -> None:
        """Read one batch from a lower tier and copy the intact chunks."""
        staged = items[0].slot == STAGED
        window = self._window(tier)
        if staged and not window.size:
            self._bad.update(item.key for item in items)
            return
        slots = await window.take(len(items)) if staged else [item.slot for item in items]
        try:
            turns = self._loads.turns(tier, probe=self._is_probe)
            async with turns.turn(slots, is_ahead=self.is_ahead):
                if self._waits_for_turn:
                    self._begin_clock()
                outcomes = await self._read_into(tier, items, slots)
            good = []
            for item, slot, outcome in zip(items, slots, outcomes, strict=True):
                if outcome is ReadOutcome.OK:
                    good.append((item, slot))
                else:
                    self._note_bad(item, outcome)
                if not staged:
                    self._loads.filled(slot, outcome is ReadOutcome.OK)
            await self._copy([item for item, _ in good], [slot for _, slot in good])
        finally:
            if staged:
                window.give(slots)

    def _load_has_ended(self) -> bool:
        return self._load.is_ok is not None

    async def _read_into(
        self, tier: int, items: Sequence[LoadItem], slots: Sequence[int]
    ) -> list[ReadOutcome]:
        loads, memory = self._loads, self._loads.memory
        if self._is_given_up:
            return [ReadOutcome.BUSY] * len(items)
        sizes = [memory.groups[item.group].record_bytes for item in items]
        views = [memory.slab.slot_view(slot, size) for slot, size in zip(slots, sizes, strict=True)]
        started = time.perf_counter()
        try:
            outcomes = await loads.tiers[tier].read([item.key for item in items], views)
        except Exception as error:  # the tier may be third-party code
            logger.warning("kvtiers: tier %d could not be read: %s", tier, safe_str(error))
            return [ReadOutcome.BUSY] * len(items)
        loads.stats.read(tier, sum(sizes), time.perf_counter() - started)
        return outcomes

    def _note_bad(self, item: LoadItem, outcome: ReadOutcome) -> None:
        self._bad.add(item.key)
        if outcome in (ReadOutcome.MISS, ReadOutcome.CORRUPT):
            self._lost.add(item.key)
        if outcome is ReadOutcome.CORRUPT:
            self._corrupt.add(item.key)
            self._loads.stats.corrupt(item.tier)

    async def _copy(self, items: Sequence[LoadItem], slots: Sequence[int] | None = None) -> None:
        """Copy slots into GPU blocks, unless the request has ended or the load is a probe without
        blocks."""
        if not items or not items[0].blocks or self._is_given_up:
            return
        if slots is None:
            slots = [item.slot for item in items]
        by_group: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            by_group.setdefault(item.group, []).append(position)
        batches = [
            CopyBatch(
                group,
                np.asarray([items[at].blocks for at in positions], dtype=np.int64),
                np.asarray([slots[at] for at in positions], dtype=np.int64),
            )
            for group, positions in by_group.items()
        ]
        engine = self._loads.memory.engine
        self._copying += 1
        self._no_copies.clear()
        try:
            ticket = self._load.submit(lambda: engine.submit_load(batches, self._after))
            if ticket is None:
                self._failed = True
                return
            await ticket.ended()
            if self._loads.verifier is not None:
                mismatched = await self._loads.verifier.mismatched(items, self._load_has_ended)
                self._mismatched |= mismatched
                self._bad |= mismatched
        except TransferError as error:
            if count := self._loads.failed.add("load"):
                logger.warning("kvtiers: %d loads were not copied, the last: %s", count, error)
            self._failed = True
            return
        finally:
            self._copying -= 1
            if not self._copying:
                self._no_copies.set()
        loaded_bytes = sum(self._loads.memory.groups[item.group].chunk_bytes for item in items)
        self._loads.stats.copied(loaded_bytes=loaded_bytes)
