"""Write-through: committed chunks of the CPU tier on their way to one lower tier.

A chunk waits here pinned ("dirty"): it cannot be evicted before it is written, so that a prefix
longer than the CPU tier reaches the disk without holes. Both the waiting and the flying chunks
are bounded; beyond that a chunk simply is not written through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.gates import Gates, TierGate
from offload.index import TierIndex
from offload.keys import GROUP_BYTES, group_of
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.plans import DemoteJob
from policies.admission import WriteBudget
from policies.base import AdmissionPolicy, EntryInfo
from policies.hints import HIGH, LOW, PRIORITY

_NOTHING: Mapping[bytes, EntryInfo] = {}


FLYING_MOST = 128
"""Chunks on their way to one tier."""


class _Group(Protocol):
    """The part of ``offload.planner.GroupInfo`` that is needed here."""

    @property
    def kind(self) -> str: ...

    @property
    def footprints(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class DueDemotion:
    """A demotion to post, and the keys that left the tier to make room for it."""

    plan: DemoteJob
    evicted: tuple[bytes, ...]


class DemotionQueue:
    """Chunks waiting for one lower tier.

    Nothing is ever taken in for a tier that is ``read_only``.
    ``max_waiting`` and ``max_flying`` count chunks (of these never more than ``FLYING_MOST``);
    ``batch`` is the most that one job carries.
    While ``closed`` nothing is taken in. ``skipped`` counts chunks that found no room or no working
    tier, ``refused`` those that an admission policy or the write budget turned away.
    """

    def __init__(
        self,
        tier: int,
        index: TierIndex,
        *,
        gate: TierGate | None = None,
        admissions: Sequence[AdmissionPolicy] = (),
        max_waiting: int = 1 << 30,
        max_flying: int = FLYING_MOST,
        batch: int = 32,
        read_only: bool = False,
    ) -> None:
        self.tier = tier
        self._read_only = read_only
        self.skipped = 0
        self.refused = 0
        self.closed = False
        self._index = index
        self._gate = gate or Gates([index.name]).tiers[0]
        self._admissions = tuple(admissions)
        self._max_waiting = max_waiting
        self._max_flying = min(max_flying, FLYING_MOST)
        self._batch = min(batch, self._max_flying)
        self._waiting: deque[bytes] = deque()
        self._told: dict[bytes, EntryInfo] = {}
        self._flying = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def depth(self) -> int:
        """Chunks that wait or are being written."""
        return len(self._waiting) + self._flying

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
        told: Mapping[bytes, EntryInfo] = _NOTHING,
    ) -> None:
        """Queue chunks that were just committed; pins them in the CPU tier. ``told`` is what is
        known of them, for the tier's policies."""
        if self.closed or self._read_only:
            return
        room = self._room
        if not room:
            self.skipped += len(keys)
            return
        if not self._index.are_absent(keys):
            keys = [key for key in keys if self._index.is_absent(key)]
        # Room first: an admission policy may spend a budget.
        room -= len(self._waiting)
        queued: list[bytes] = []
        if not self._admissions and not any(_is_low(info) for info in told.values()):
            queued = list(keys[: max(0, room)])
            self.skipped += len(keys) - len(queued)
        else:
            for at, key in enumerate(keys):
                if len(queued) >= room:
                    self.skipped += len(keys) - at
                    break
                if self._takes(key, groups, told):
                    queued.append(key)
        self._told.update((key, told[key]) for key in queued if key in told)
        cpu.pin(queued)
        self._waiting.extend(queued)

    def _takes(
        self, key: bytes, groups: Mapping[int, _Group], told: Mapping[bytes, EntryInfo]
    ) -> bool:
        known = told.get(key)
        if not self._admissions and (known is None or not _is_low(known)):
            return True
        info = self._info(key, groups, told)
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

    def _info(
        self, key: bytes, groups: Mapping[int, _Group], told: Mapping[bytes, EntryInfo]
    ) -> EntryInfo:
        group = group_of(key)
        size = groups[group].footprints[self.tier]
        above = told.get(key)
        if above is None:
            return EntryInfo(group, groups[group].kind, size_bytes=size)
        return EntryInfo(*above[:3], size, *above[4:])  # ``_replace`` takes three times as long

    def due(
        self, cpu: TierIndex, ledger: Ledger, groups: Mapping[int, _Group]
    ) -> list[DueDemotion]:
        """Open as many demotions as the bound on flying chunks allows: none while the tier's
        breaker is open, and one to see whether it may close."""
        if not self._gate.writable:
            self.skipped += len(self._waiting)
            self.clear(cpu)
        max_flying = self._max_flying if self._gate.writes.closed else 1
        due = []
        while self._waiting and self._flying < max_flying:
            job = self._next(cpu, ledger, groups)
            if job is not None:
                due.append(job)
        return due

    def _next(
        self, cpu: TierIndex, ledger: Ledger, groups: Mapping[int, _Group]
    ) -> DueDemotion | None:
        keys = self._take_batch(cpu)
        if not keys:
            return None
        group = group_of(keys[0])
        infos = [self._info(key, groups, self._told) for key in keys]
        for key in keys:
            self._told.pop(key, None)
        grant = self._index.reserve(keys, infos)
        granted = tuple(keys[: len(grant.places)])
        refused = keys[len(granted) :]
        self.skipped += len(refused)
        cpu.unpin(refused)
        if not granted:
            return None
        job = ledger.next_id()
        pins = ((CPU, granted),)
        ledger.open(Job(job, JobKind.DEMOTE, fills=granted, fill_tier=self.tier, pins=pins))
        self._flying += len(granted)
        slots = tuple(cpu.place(key) for key in granted)
        return DueDemotion(DemoteJob(job, self.tier, group, granted, slots), grant.evicted)

    def _take_batch(self, cpu: TierIndex) -> list[bytes]:
        """The next waiting keys of one group that the tier does not have yet."""
        keys: dict[bytes, None] = {}
        suffix = self._waiting[0][-GROUP_BYTES:]
        resident = cpu.resident
        while self._waiting and len(keys) < self._batch:
            key = self._waiting[0]
            if key[-GROUP_BYTES:] != suffix:
                break
            self._waiting.popleft()
            if key in resident and key not in keys and self._index.is_absent(key):
                keys[key] = None
            else:
                cpu.unpin((key,))
                if key not in keys:
                    self._told.pop(key, None)
        return list(keys)

    @property
    def flying(self) -> int:
        """Chunks that are on their way to the tier."""
        return self._flying

    def ended(self, job: Job) -> None:
        """A demotion of this tier has been answered by every rank."""
        self._flying -= len(job.fills)

    def clear(self, cpu: TierIndex) -> None:
        """Forget what waits; what flies is left to its jobs."""
        cpu.unpin(self._waiting)
        self._waiting.clear()
        self._told.clear()


def _is_low(info: EntryInfo) -> bool:
    return bool(info.hints) and info.hints.get(PRIORITY) == LOW


def queues_of(cpu: TierIndex, lower: Sequence[TierIndex], gates: Gates) -> list[DemotionQueue]:
    """A queue per lower tier. What hangs keeps its slots: at most a quarter of the CPU tier."""
    flying = max(1, cpu.space.capacity // 4)
    return [
        DemotionQueue(tier, index, gate=gates.tiers[tier], max_flying=flying)
        for tier, index in enumerate(lower)
    ]
