"""Write-through: moves committed chunks of the CPU tier to the lower tiers.

A chunk that waits here can be evicted, which cancels its write: a slow disk must not keep new
chunks out of the CPU tier. Stores wait for the disk only while it keeps up
(``StorePlanner.may_wait``); a prefix that is longer than the CPU tier then reaches the disk without
holes. A chunk that is being written is pinned. The numbers of waiting chunks and of chunks being
written are bounded. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

from offload.index.chunk_batch import LazyEntryInfos, chosen, joined, sized
from offload.layout.keys import CPU, group_of
from offload.messages.plan import Keys, WriteThroughJob
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind
from offload.planner.pending_deletes import PendingDeletes
from offload.planner.presence import PresenceCache
from offload.planner.step_budget import (
    EVICTED_WRITES_MAX,
    WRITE_THROUGH_COST,
    WRITTEN_JOBS_MAX,
    WRITTEN_THROUGH_COST,
    DeferredWork,
)
from offload.planner.stores import StorePlanner
from policies.admission import WriteBudget
from policies.base import AdmissionPolicy, EntryInfo
from policies.hints import HIGH, LOW, PRIORITY


class WriteThrough:
    """Manages write-through to all lower tiers, within the budget of a step, and deletions.

    Owned by the planner; used on its thread. ``queues`` has one queue per lower tier, with
    the tier's ``settings``."""

    def __init__(
        self,
        context: PlannerContext,
        stores: StorePlanner,
        presence: PresenceCache,
        deletes: PendingDeletes,
        settings: Sequence[QueueSettings] = (),
    ) -> None:
        settings = settings or [QueueSettings()] * len(context.lower)
        self.queues = tuple(
            WriteThroughQueue(context, tier, mine) for tier, mine in enumerate(settings)
        )
        self._unwritten = context.cpu.unwritten
        self._stats = context.stats
        self._budget = context.budget
        self._stores = stores
        self._presence = presence
        self._deletes = deletes

    @property
    def is_waiting(self) -> bool:
        """True if a chunk waits for any tier."""
        return any(map(len, self.queues))

    def offer(self, keys: Sequence[bytes], job: Job) -> None:
        """Queue the chunks that this store has committed, for the tiers to which they may be
        written."""
        infos = job.infos_of(keys)
        for queue in self.queues:
            if job.write is None or queue.tier in job.write:
                queue.offer(keys, infos)

    def take(self, *, writes: bool) -> tuple[tuple[WriteThroughJob, ...], Mapping[int, Keys]]:
        """End the step. Returns the write-throughs (none unless ``writes``) and the deletions that
        it sends."""
        ready = self._ready_for_deletes()
        jobs = self._due() if writes else ()
        unwritten = self._unwritten
        if unwritten.gave_up or unwritten.is_behind:
            unwritten.end_step(sum(queue.depth for queue in self.queues))
        return jobs, self._deletes.take(ready) if self._deletes.waiting else {}

    def _ready_for_deletes(self) -> list[int]:
        """The tiers to which deletions may be sent."""
        return [queue.tier for queue in self.queues if queue.is_ready_for_deletes]

    @property
    def can_delete(self) -> bool:
        """True if a deletion waits and may be sent now."""
        waiting = self._deletes.waiting
        return bool(waiting) and not waiting.keys().isdisjoint(self._ready_for_deletes())

    def _due(self) -> tuple[WriteThroughJob, ...]:
        """The jobs of this step, within what is left of the budget, which the tiers share. A tier
        that is behind with deletions gets none."""
        is_behind = self._unwritten.is_behind
        queues = [queue for queue in self.queues if is_behind or not queue.is_idle]
        if self._deletes.waiting:
            queues = [queue for queue in queues if not self._deletes.is_behind(queue.tier)]
        waiting = max(1, sum(1 for queue in queues if len(queue)))
        chunks_max = max(1, self._budget.left // (WRITE_THROUGH_COST * waiting))
        write_throughs: list[WriteThroughJob] = []
        for queue in queues:
            jobs, evicted = queue.due(chunks_max, is_behind=is_behind)
            write_throughs += jobs
            if evicted:
                self._deletes.add(queue.tier, evicted)
                self._stats.evicted(queue.tier, evicted)
        return tuple(write_throughs)

    def answered(self, jobs: Sequence[Job], deferred: DeferredWork, now: float) -> None:
        """Finish write-throughs that every rank has answered."""
        for tier in {job.fill_tier for job in jobs}:
            mine = [job for job in jobs if job.fill_tier == tier]
            for first in range(0, len(mine), WRITTEN_JOBS_MAX):
                some = mine[first : first + WRITTEN_JOBS_MAX]
                cost = WRITTEN_THROUGH_COST * sum(len(job.fills) for job in some)
                deferred.add(cost, partial(self._take_in, tier, some, now))

    def _take_in(self, tier: int, jobs: Sequence[Job], now: float) -> None:
        written = self.queues[tier].ended(jobs, now)
        self._stats.stored(tier, written.committed, written.failed)
        self._stores.note_entered(len(written.committed))
        if tier in self._presence.tiers:
            self._presence.written(tier, written.committed, now)
        # Delete records that a rank may have written but the index does not keep (the write failed
        # on another rank, or the chunk was forgotten meanwhile): otherwise they would take space
        # and reappear after a restart.
        if written.unknown:
            self._deletes.add(tier, written.unknown)

    def suspend(self) -> None:
        """Drop the chunks that wait, because the weights have changed, and queue nothing before
        ``resume``."""
        for queue in self.queues:
            queue.close()

    def resume(self, tiers: Container[int]) -> None:
        """Allow chunks to be queued again for these tiers."""
        for queue in self.queues:
            if queue.tier in tiers:
                queue.reopen()

    def totals(self) -> dict[str, float]:
        """Counters by flat name; those of a tier end in ``:`` and its name."""
        found: dict[str, float] = {}
        for queue in self.queues:
            found[f"write_refusals:{queue.name}"] = queue.refused
            found[f"writes_skipped:{queue.name}"] = queue.skipped
            found[f"writes_given_up:{queue.name}"] = self._unwritten.given_up[queue.tier]
        return found


WRITES_FLYING_MAX = 1024
"""Maximum number of chunks that are being written to one tier."""
SLOW_TIER_SHARE = 1 / 16
"""The limit of a tier that falls behind stays at or above this share of its highest value (by
default 1/64 of the CPU tier), or at or above one job if that is less."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of one lower tier's queue.

    Each of ``admissions`` must admit a chunk; a ``read_only`` tier accepts none. ``flying_max``
    bounds the chunks that are being written (never more than ``WRITES_FLYING_MAX``): by default a
    quarter of the CPU tier, because writes that hang keep their slots. ``batch`` bounds the chunks
    of one job.
    """

    admissions: Sequence[AdmissionPolicy] = ()
    read_only: bool = False
    flying_max: int | None = None
    batch: int = 32


class EndedWrites(NamedTuple):
    """The chunks of write-throughs that have ended. Those ``committed`` can be hit now, those
    ``failed`` could not be written; the tier's index does not keep those ``unknown``."""

    committed: Sequence[bytes]
    failed: Sequence[bytes]
    unknown: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One or more chunks, all of one group, with the infos for the tier's policies."""

    keys: Sequence[bytes]
    infos: Sequence[EntryInfo]


class _WritesInFlight:
    """Limits how many chunks are being written to one tier, and are therefore pinned, at a time:
    about as many as the disk writes in a step. Pinning more would keep old chunks in the CPU tier
    at the cost of newer, more valuable ones. Owned by the tier's queue."""

    def __init__(self, chunks_max: int, batch: int) -> None:
        self._bound_max = chunks_max
        self._bound = chunks_max
        self._bound_min = max(1, min(batch, int(chunks_max * SLOW_TIER_SHARE)))
        self.flying = 0  # chunks being written when the previous step ended

    def step(self, flying: int, *, is_behind: bool) -> int:
        """The limit for this step, in which ``flying`` chunks are being written."""
        finished = self.flying - flying
        if 2 * finished >= self._bound:
            self._bound = min(self._bound_max, 2 * self._bound)
        elif is_behind:
            self._bound = max(self._bound_min, self._bound // 2)
        return self._bound

    def end_step(self, flying: int) -> None:
        """Record how many chunks are being written at the end of the step."""
        self.flying = flying


class WriteThroughQueue:
    """Chunks that wait for one lower tier.

    Owned by ``WriteThrough``. ``skipped`` counts chunks that were not queued because the queue was
    full or the tier unavailable, ``refused`` those that an admission policy or the write budget
    rejected.
    """

    def __init__(self, context: PlannerContext, tier: int, settings: QueueSettings) -> None:
        self.tier = tier
        self.name = context.lower[tier].name
        self.skipped = 0
        self.refused = 0
        self._cpu = context.cpu
        self._unwritten = context.cpu.unwritten
        self._groups = context.groups
        self._jobs = context.jobs
        self._index = context.lower[tier]
        self._health = context.health[tier]
        self._admissions = tuple(settings.admissions)
        self._read_only = settings.read_only
        self._is_closed = False
        self._waiting_max = context.limits.waiting_writes
        quarter = max(1, context.cpu.space.capacity // 4)
        self._flying_max = min(settings.flying_max or quarter, WRITES_FLYING_MAX)
        self._batch = min(settings.batch, self._flying_max)
        self._waiting: deque[_Waiting] = deque()
        # number of chunks in ``_waiting``, including chunks that were evicted meanwhile
        self._count = 0
        self._flying = 0
        self._in_flight = _WritesInFlight(self._flying_max, self._batch)

    def __len__(self) -> int:
        """The number of chunks that wait, including some that were evicted meanwhile."""
        return self._count

    @property
    def depth(self) -> int:
        """The number of chunks that wait or are being written."""
        return self._count + self._flying

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or is being written, and nothing was being written when the
        previous step ended."""
        return not (self._count or self._flying or self._in_flight.flying)

    @property
    def is_ready_for_deletes(self) -> bool:
        """True if deletions may be sent to the tier. False while its circuit breaker is open, and,
        while it is half-open, until every write has returned."""
        health = self._health
        return health.writes.closed or (health.writable and not self._flying)

    @property
    def _limit(self) -> int:
        """The number of chunks that may wait for this tier.

        While its circuit breaker is half-open, this is one batch, which tests whether the tier
        works.
        """
        if self._health.writes.closed:
            return self._waiting_max
        if not self._health.writable or self._flying:
            return 0
        return min(self._batch, self._waiting_max)

    def offer(self, keys: Sequence[bytes], infos: Sequence[EntryInfo]) -> None:
        """Queue chunks of one group that were just committed to the CPU tier."""
        if self._is_closed or self._read_only or not keys:
            return
        left = self._limit
        if not left:
            self.skipped += len(keys)
            return
        infos = sized(infos, self._groups[group_of(keys[0])].footprints[self.tier])
        # The store planner never stores chunks that a readable tier holds (``StorePlanner.plan``),
        # so this check is needed only if no tier is readable.
        if not self._health.readable and not self._index.are_absent(keys):
            absent = list(map(self._index.is_absent, keys))
            keys, infos = list(compress(keys, absent)), chosen(infos, absent)
        self._forget_evicted()
        # Check the limit first, because an admission policy can spend a budget.
        left = max(0, left - self._unwritten.count(self.tier))
        if self._admissions or _any_is_low(infos):
            flags = self._admitted(keys, infos, left)
            keys, infos = list(compress(keys, flags)), chosen(infos, flags)
        else:
            self.skipped += max(0, len(keys) - left)
            keys, infos = keys[:left], infos[:left]
        if keys:
            self._unwritten.add(self.tier, keys)
            self._waiting.append(_Waiting(keys, infos))
            self._count += len(keys)

    def _forget_evicted(self) -> None:
        """Rebuild the queue without evicted chunks once they are the majority."""
        if self._count < 2 * self._unwritten.count(self.tier) + self._batch:
            return
        left: deque[_Waiting] = deque()
        for some in self._waiting:
            flags = self._unwritten.flags(self.tier, some.keys)
            if any(flags):
                left.append(_Waiting(list(compress(some.keys, flags)), chosen(some.infos, flags)))
        count = sum(len(some.keys) for some in left)
        self._waiting, self._count = left, count

    def _admitted(self, keys: Sequence[bytes], infos: Sequence[EntryInfo], left: int) -> list[bool]:
        """The chunks among these that may be queued for the tier, up to ``left``."""
        flags: list[bool] = []
        for key, info in zip(keys, infos, strict=True):
            if not left:
                self.skipped += len(keys) - len(flags)
                break
            flags.append(self._takes(key, info))
            left -= flags[-1]
        return flags + [False] * (len(keys) - len(flags))

    def _takes(self, key: bytes, info: EntryInfo) -> bool:
        if not self._may_displace(info):
            self.skipped += 1
            return False
        if not self._admits(key, info):
            self.refused += 1
            return False
        return True

    def _admits(self, key: bytes, info: EntryInfo) -> bool:
        """True if the policies admit a chunk. Chunks of high priority only have to pass write
        budgets."""
        if info.hints.get(PRIORITY) != HIGH:
            return all(admission.admit(key, info) for admission in self._admissions)
        budgets = [a for a in self._admissions if isinstance(a, WriteBudget)]
        return all(admission.admit(key, info) for admission in budgets)

    def _may_displace(self, info: EntryInfo) -> bool:
        """True if a chunk may be written. A chunk of low priority is written only into free
        space."""
        return info.hints.get(PRIORITY) != LOW or not self._index.space.missing(info.size_bytes)

    def due(
        self, chunks_max: int = WRITES_FLYING_MAX, *, is_behind: bool = False
    ) -> tuple[list[WriteThroughJob], list[bytes]]:
        """Open write-throughs of at most ``chunks_max`` chunks, within the bound on chunks in
        flight. If the disk ``is_behind``, this bound is about the number of chunks that it writes
        in a step. While the tier's circuit breaker is open, nothing is written; while it is
        half-open, one job. Stops after checking as many chunks as may be written, even if the tier
        had no space for them. Returns the jobs, and the chunks evicted from the tier to make
        space."""
        if not self._health.writable:
            self.skipped += self._count
            self.clear()
        flying_max = self._in_flight.step(self._flying, is_behind=is_behind)
        is_probe = not self._health.writes.closed
        if is_probe:
            flying_max = 0 if self._flying else self._batch
        flying_max = min(flying_max, self._flying + chunks_max)
        due: list[WriteThroughJob] = []
        evicted: list[bytes] = []
        evicted_since = min(EVICTED_WRITES_MAX, self._count - self._unwritten.count(self.tier))
        rest = self._count - (flying_max - self._flying) - evicted_since
        while self._waiting and self._flying < flying_max and self._count > rest:
            due += self._next(flying_max - self._flying, evicted)
            if due and is_probe:
                break
        self._in_flight.end_step(self._flying)
        return due, evicted

    def _next(self, chunks_max: int, evicted: list[bytes]) -> list[WriteThroughJob]:
        """Write-throughs of at most ``chunks_max`` chunks of one group. Adds the chunks that it
        evicts to ``evicted``, even if there is still no space for a new one."""
        keys, infos = self._take(chunks_max)
        if not keys:
            return []
        grant = self._index.reserve(keys, infos)
        evicted += grant.evicted
        granted = len(grant.locations)
        self.skipped += len(keys) - granted
        self._cpu.pin(keys[:granted])
        self._flying += granted
        slots = tuple(map(self._cpu.resident.__getitem__, keys[:granted]))
        due = []
        for first in range(0, granted, self._batch):
            end = min(granted, first + self._batch)
            job, mine = self._jobs.next_id(), keys[first:end]
            self._jobs.open(
                Job(
                    job,
                    JobKind.WRITE_THROUGH,
                    fills=mine,
                    fill_tier=self.tier,
                    pins=((CPU, mine),),
                    infos=infos[first:end],
                )
            )
            due.append(WriteThroughJob(job, self.tier, group_of(mine[0]), mine, slots[first:end]))
        return due

    def _take(self, chunks_max: int) -> tuple[tuple[bytes, ...], Sequence[EntryInfo]]:
        """The next waiting chunks of one group that the tier does not have yet."""
        keys: list[bytes] = []
        infos: list[Sequence[EntryInfo]] = []
        group = group_of(self._waiting[0].keys[0])
        while self._waiting and len(keys) < chunks_max:
            batch, left = self._waiting[0], chunks_max - len(keys)
            if group_of(batch.keys[0]) != group:
                break
            keys += batch.keys[:left]
            infos.append(batch.infos[:left])
            if left < len(batch.keys):
                self._waiting[0] = _Waiting(batch.keys[left:], batch.infos[left:])
            else:
                self._waiting.popleft()
        self._count -= len(keys)
        known = joined(infos)
        due = self._unwritten.take(self.tier, keys)
        if len(due) == len(keys) and self._index.are_absent(keys):
            return tuple(keys), known
        flags = []
        for key in keys:  # a chunk that was evicted and stored again is queued twice
            flags.append(key in due and self._index.is_absent(key))
            due.discard(key)
        return tuple(compress(keys, flags)), chosen(known, flags)

    def ended(self, jobs: Sequence[Job], now: float) -> EndedWrites:
        """Process write-throughs of this tier that every rank has answered."""
        good: list[bytes] = []
        bad: list[bytes] = []
        infos: list[Sequence[EntryInfo]] = []
        for job in jobs:
            mine, failed = job.verdict()
            good += mine
            bad += failed
            infos.append(job.infos_of(mine))
            self._flying -= len(job.fills)
            for _cpu, keys in job.pins:
                self._cpu.unpin(keys)
            self._health.written(now, good=bool(mine))
        if bad:
            self._index.abort(bad)
        committed = self._index.commit(good, joined(infos))
        doubtful = bad if len(committed) == len(good) else (*good, *bad)
        return EndedWrites(committed, bad, [key for key in doubtful if key not in self._index])

    def close(self) -> None:
        """Drop the chunks that wait, and accept none before ``reopen``."""
        self.clear()
        self._is_closed = True

    def reopen(self) -> None:
        """Accept chunks again."""
        self._is_closed = False

    def clear(self) -> None:
        """Drop the chunks that wait; chunks that are being written are left to their jobs."""
        self._unwritten.forget(self.tier)
        self._waiting.clear()
        self._count = 0


def _any_is_low(infos: Sequence[EntryInfo]) -> bool:
    if isinstance(infos, LazyEntryInfos):
        return infos.priority == LOW
    return any(info.hints and info.hints.get(PRIORITY) == LOW for info in infos)
