"""Write-through: committed chunks of the CPU tier on their way to one lower tier.

A chunk waits here pinned ("dirty"): it cannot be evicted before it is written, so that a prefix
longer than the CPU tier reaches the disk without holes. Both the waiting and the flying chunks
are bounded; beyond that a chunk simply is not written through.

Write-through to all lower tiers: what of it a step does. Part of the planner, on its thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby
from operator import not_
from typing import Protocol

from offload.index.chunk_batch import LazyEntryInfos, chosen, joined, sized
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU, group_of
from offload.messages.plan import WriteThroughJob
from offload.planner.jobs import Job, JobKind, JobTable
from offload.planner.pending_deletes import PendingDeletes
from offload.planner.presence import PresenceCache
from offload.planner.step_budget import WRITE_THROUGH, WRITTEN_THROUGH, DeferredWork, StepBudget
from offload.planner.tier_health import TierHealth, TierHealths
from offload.telemetry.counters import PlannerStats
from policies.admission import WriteBudget
from policies.base import AdmissionPolicy, EntryInfo
from policies.hints import HIGH, LOW, PRIORITY

JOBS_AT_ONCE = 8
"""Write-throughs of a tier that are taken in together: that costs less than one by one."""


class WriteThrough:
    """The ``queues`` of the lower tiers, by number; what a step writes through and takes in as
    written comes from its ``budget``. ``delete(tier, keys)`` has records deleted."""

    def __init__(
        self,
        queues: Sequence[WriteThroughQueue],
        cpu: TierIndex,
        job_table: JobTable,
        stats: PlannerStats,
        shared: PresenceCache,
        budget: StepBudget,
        delete: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        self.queues = tuple(queues)
        self._cpu = cpu
        self._job_table = job_table
        self._stats = stats
        self._shared = shared
        self._budget = budget
        self._delete = delete

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk waits for any tier."""
        return any(map(len, self.queues))

    def due(self, deletions: PendingDeletes) -> tuple[WriteThroughJob, ...]:
        """Write through what the budget has left, shared by the tiers: none to one that is behind
        with deletions."""
        queues = [queue for queue in self.queues if not deletions.is_behind(queue.tier)]
        waiting = max(1, sum(1 for queue in queues if len(queue)))
        most = max(1, self._budget.left // (WRITE_THROUGH * waiting))
        write_throughs: list[WriteThroughJob] = []
        for queue in queues:
            jobs, evicted = queue.due(self._cpu, self._job_table, most)
            write_throughs += jobs
            self._delete(queue.tier, evicted)
            self._stats.evicted(queue.tier, evicted)
        return tuple(write_throughs)

    def answered(self, jobs: Sequence[Job], backlog: DeferredWork, now: float) -> None:
        """Write-throughs that every rank has answered."""
        for tier in {job.fill_tier for job in jobs}:
            mine = [job for job in jobs if job.fill_tier == tier]
            for first in range(0, len(mine), JOBS_AT_ONCE):
                some = mine[first : first + JOBS_AT_ONCE]
                cost = WRITTEN_THROUGH * sum(len(job.fills) for job in some)
                backlog.add(cost, partial(self._take_in, tier, some, now))

    def _take_in(self, tier: int, jobs: Sequence[Job], now: float) -> None:
        kept, bad, gone = self.queues[tier].ended(jobs, self._cpu, now)
        self._stats.stored(tier, kept, bad)
        self._shared.written(tier, kept, now)
        # What a rank may have written and the index does not keep (it failed on another, or was
        # forgotten meanwhile) must not take space, nor come back after a restart.
        self._delete(tier, gone)


FLYING_MAX = 1024
"""Chunks on their way to one tier."""


class _Group(Protocol):
    """The part of ``offload.planner.planner.GroupInfo`` that is needed here."""

    @property
    def kind(self) -> str: ...

    @property
    def footprints(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Chunks of one group, at least one, and what the tier's policies are told of them."""

    keys: Sequence[bytes]
    infos: Sequence[EntryInfo]


class WriteThroughQueue:
    """Chunks waiting for one lower tier.

    Nothing is ever taken in for a tier that is ``read_only``.
    ``max_waiting`` and ``max_flying`` count chunks (of these never more than ``FLYING_MAX``);
    ``batch`` is the most that one job carries.
    While ``closed`` nothing is taken in. ``skipped`` counts chunks that found no room or no working
    tier, ``refused`` those that an admission policy or the write budget turned away.
    """

    def __init__(
        self,
        tier: int,
        index: TierIndex,
        *,
        gate: TierHealth | None = None,
        admissions: Sequence[AdmissionPolicy] = (),
        max_waiting: int = 1 << 30,
        max_flying: int = FLYING_MAX,
        batch: int = 32,
        read_only: bool = False,
    ) -> None:
        self.tier = tier
        self._read_only = read_only
        self.skipped = 0
        self.refused = 0
        self.closed = False
        self._index = index
        self._gate = gate or TierHealths([index.name]).tiers[0]
        self._admissions = tuple(admissions)
        self._max_waiting = max_waiting
        self._max_flying = min(max_flying, FLYING_MAX)
        self._batch = min(batch, self._max_flying)
        self._waiting: deque[_Waiting] = deque()
        self._count = 0
        self._flying = 0

    def __len__(self) -> int:
        """Chunks that wait."""
        return self._count

    @property
    def depth(self) -> int:
        """Chunks that wait or are being written."""
        return self._count + self._flying

    @property
    def _room(self) -> int:
        """How many chunks may wait, and stay pinned, for this tier: as long as its breaker has not
        closed again no more than one batch, to see whether the tier works."""
        if self._gate.writes.closed:
            return self._max_waiting
        if not self._gate.writable or self._flying:
            return 0
        return min(self._batch, self._max_waiting)

    def offer(
        self,
        keys: Sequence[bytes],
        cpu: TierIndex,
        groups: Mapping[int, _Group],
        infos: Sequence[EntryInfo] | None = None,
    ) -> None:
        """Queue chunks that were just committed; pins them in the CPU tier. ``infos`` are what is
        known of them, for the tier's policies; with it they are of one group."""
        if self.closed or self._read_only or not keys:
            return
        room = self._room
        if not room:
            self.skipped += len(keys)
            return
        if infos is None:
            for group, part in groupby(keys, group_of):
                mine = list(part)
                self.offer(mine, cpu, groups, [EntryInfo(group, groups[group].kind)] * len(mine))
            return
        infos = sized(infos, groups[group_of(keys[0])].footprints[self.tier])
        # Nothing was stored that a tier holds which may be read: see ``Planner.plan_store``.
        if not self._gate.readable and not self._index.are_absent(keys):
            absent = list(map(self._index.is_absent, keys))
            keys, infos = list(compress(keys, absent)), chosen(infos, absent)
        # Room first: an admission policy may spend a budget.
        room = max(0, room - self._count)
        if self._admissions or _any_is_low(infos):
            flags = self._admitted(keys, infos, room)
            keys, infos = list(compress(keys, flags)), chosen(infos, flags)
        else:
            self.skipped += max(0, len(keys) - room)
            keys, infos = keys[:room], infos[:room]
        if keys:
            cpu.pin(keys)
            self._waiting.append(_Waiting(keys, infos))
            self._count += len(keys)

    def _admitted(self, keys: Sequence[bytes], infos: Sequence[EntryInfo], room: int) -> list[bool]:
        """Which of these may wait for the tier, as far as there is room."""
        flags: list[bool] = []
        for key, info in zip(keys, infos, strict=True):
            if not room:
                self.skipped += len(keys) - len(flags)
                break
            flags.append(self._takes(key, info))
            room -= flags[-1]
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
        """High priority passes every admission but a budget of writes."""
        if info.hints.get(PRIORITY) != HIGH:
            return all(admission.admit(key, info) for admission in self._admissions)
        budgets = [a for a in self._admissions if isinstance(a, WriteBudget)]
        return all(admission.admit(key, info) for admission in budgets)

    def _may_displace(self, info: EntryInfo) -> bool:
        """Low priority takes free space only."""
        return info.hints.get(PRIORITY) != LOW or not self._index.space.missing(info.size_bytes)

    def due(
        self, cpu: TierIndex, job_table: JobTable, most: int = FLYING_MAX
    ) -> tuple[list[WriteThroughJob], list[bytes]]:
        """Open write-throughs of about ``most`` chunks, as far as the bound on flying chunks
        allows: none while the tier's breaker is open, and one to see whether it may close. No more
        are looked at if the tier has no room for them. Returns them, and the chunks that have left
        the tier to make room."""
        if not self._gate.writable:
            self.skipped += self._count
            self.clear(cpu)
        max_flying = self._max_flying if self._gate.writes.closed else 1
        max_flying = min(max_flying, self._flying + most)
        due: list[WriteThroughJob] = []
        evicted: list[bytes] = []
        rest = self._count - (max_flying - self._flying)
        while self._waiting and self._flying < max_flying and self._count > rest:
            batches = -((self._flying - max_flying) // self._batch)  # the last one whole
            due += self._next(batches * self._batch, cpu, job_table, evicted)
        return due, evicted

    def _next(
        self, most: int, cpu: TierIndex, job_table: JobTable, evicted: list[bytes]
    ) -> list[WriteThroughJob]:
        """Write-throughs of at most so many chunks of one group; what was ``evicted`` is added,
        also if that was not enough for any."""
        keys, infos = self._take(most, cpu)
        if not keys:
            return []
        grant = self._index.reserve(keys, infos, remember=False)
        evicted += grant.evicted
        granted = len(grant.places)
        self.skipped += len(keys) - granted
        cpu.unpin(keys[granted:])
        self._flying += granted
        slots = tuple(map(cpu.resident.__getitem__, keys[:granted]))
        due = []
        for first in range(0, granted, self._batch):
            end = min(granted, first + self._batch)
            job, mine = job_table.next_id(), keys[first:end]
            job_table.open(
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

    def _take(self, most: int, cpu: TierIndex) -> tuple[tuple[bytes, ...], Sequence[EntryInfo]]:
        """The next waiting chunks of one group that the tier does not have yet."""
        keys: list[bytes] = []
        infos: list[Sequence[EntryInfo]] = []
        group = group_of(self._waiting[0].keys[0])
        while self._waiting and len(keys) < most:
            batch, left = self._waiting[0], most - len(keys)
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
        held, index = cpu.resident, self._index
        if all(map(held.__contains__, keys)) and index.are_absent(keys):
            return tuple(keys), known
        flags = [key in held and index.is_absent(key) for key in keys]
        cpu.unpin(compress(keys, map(not_, flags)))
        return tuple(compress(keys, flags)), chosen(known, flags)

    @property
    def flying(self) -> int:
        """Chunks that are on their way to the tier."""
        return self._flying

    def ended(
        self, jobs: Sequence[Job], cpu: TierIndex, now: float
    ) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Take in write-throughs of this tier that every rank has answered. Returns the chunks that
        can be hit now, those that could not be written, and those that the index does not keep."""
        good: list[bytes] = []
        bad: list[bytes] = []
        infos: list[Sequence[EntryInfo]] = []
        for job in jobs:
            mine, failed = job.verdict()
            good += mine
            bad += failed
            infos.append(job.infos_of(mine) or ())
            self._flying -= len(job.fills)
            for _cpu, keys in job.pins:
                cpu.unpin(keys)
            self._gate.written(now, good=bool(mine))
        self._index.abort(bad)
        kept = self._index.commit(good, joined(infos))
        if len(kept) == len(good):
            return kept, bad, [key for key in bad if key not in self._index]
        return kept, bad, [key for key in (*good, *bad) if key not in self._index]

    def clear(self, cpu: TierIndex) -> None:
        """Forget what waits; what flies is left to its jobs."""
        for batch in self._waiting:
            cpu.unpin(batch.keys)
        self._waiting.clear()
        self._count = 0


def _any_is_low(infos: Sequence[EntryInfo]) -> bool:
    if isinstance(infos, LazyEntryInfos):
        return infos.priority == LOW
    return any(info.hints and info.hints.get(PRIORITY) == LOW for info in infos)


def queues_of(
    cpu: TierIndex, lower: Sequence[TierIndex], gates: TierHealths
) -> list[WriteThroughQueue]:
    """A queue per lower tier. What hangs keeps its slots: at most a quarter of the CPU tier."""
    flying = max(1, cpu.space.capacity // 4)
    return [
        WriteThroughQueue(tier, index, gate=gates.tiers[tier], max_flying=flying)
        for tier, index in enumerate(lower)
    ]
