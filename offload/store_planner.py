"""Stores: which chunks get a slot of the CPU tier, and the fences before their blocks change.

Part of the planner, on the same thread. Owns the stores that were planned and not sent, the
fences of the coming step, and the budget of chunks on their way to the CPU tier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from offload.chunks import GroupInfo, Wanted
from offload.coordinator import PresentBatch
from offload.departures import Cause
from offload.index import TierIndex
from offload.layout import STATE
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.plans import StoreJob
from offload.stats import PlannerStats
from policies.base import AdmissionPolicy
from policies.hints import HIGH, LOW


class StorePlanner:
    """Plans stores into the CPU tier; at most ``max_chunks`` are ``storing`` at a time.

    ``admission`` says what may enter (``None``: everything). ``filled(keys)`` is told when a store
    of these keys has ended, however it did.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        ledger: Ledger,
        stats: PlannerStats,
        filled: Callable[[Sequence[bytes]], None],
        max_chunks: int,
        admission: AdmissionPolicy | None,
    ) -> None:
        self.storing = 0
        self._groups = groups
        self._cpu = cpu
        self._ledger = ledger
        self._stats = stats
        self._filled = filled
        self._max_chunks = max_chunks
        self._admission = admission
        self._planned: list[StoreJob] = []
        self._fence: set[int] = set()

    def __len__(self) -> int:
        """Stores that were planned and not sent."""
        return len(self._planned)

    def take(self) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """The stores planned since the last call, and the jobs to be fenced."""
        taken = tuple(self._planned), tuple(sorted(self._fence))
        self._planned, self._fence = [], set()
        return taken

    def ended(self, job: Job, good: Sequence[bytes], bad: Sequence[bytes]) -> list[bytes]:
        """A store has been answered by every rank; the keys that can be hit from now on."""
        self.storing -= len(job.fills)
        self._cpu.abort(bad)
        kept = self._cpu.commit(good)
        self._stats.stored(CPU, kept, bad)
        return kept

    def plan(
        self, chunks: Sequence[Wanted], present: PresentBatch, protect: Container[bytes]
    ) -> int:
        """Plan to store chunks of one group whose content is final after this step.

        ``present`` tells which chunks some tier holds already; ``protect`` are keys that must not
        be evicted for these. Returns how many of them, from the first on, need no more attention:
        those that some tier holds and those that got a slot. The rest may be asked again.
        """
        fresh, settled = self._absent_prefix(chunks, present)
        if not fresh:
            return settled
        infos = self._groups[fresh[0].group].entries(fresh, 1)
        evict = fresh[0].origin.priority != LOW
        grant = self._cpu.reserve([chunk.key for chunk in fresh], infos, protect, evict=evict)
        self._stats.evicted(CPU, grant.evicted)
        taken = fresh[: len(grant.places)]
        if len(taken) < len(fresh):
            self._stats.store_refusals += len(fresh) - len(taken)
            self._stats.refused(CPU, [fresh[len(taken)].key], Cause.NO_ROOM)
            settled = chunks.index(fresh[len(taken)])
        if taken:
            self._open(taken, grant.places)
        return settled

    def _absent_prefix(
        self, chunks: Sequence[Wanted], present: PresentBatch
    ) -> tuple[list[Wanted], int]:
        """The chunks that no tier has, as far as the store budget goes, and how many were seen."""
        budget = self._max_chunks - self.storing
        cpu = self._cpu
        fresh: list[Wanted] = []
        held = present([chunk.key for chunk in chunks])
        if 0 not in held:
            return fresh, len(chunks)
        for position, chunk in enumerate(chunks):
            if held[position] or not cpu.is_absent(chunk.key) or not self._admits(chunk):
                continue
            # A recurrent state is offered once; what else is refused here is asked again.
            if len(fresh) >= budget and self._groups[chunk.group].kind != STATE:
                self._stats.store_refusals += 1
                self._stats.refused(CPU, [chunk.key], Cause.NO_ROOM)
                return fresh, position
            fresh.append(chunk)
        return fresh, len(chunks)

    def _admits(self, chunk: Wanted) -> bool:
        if self._admission is None:
            return True
        entry = self._groups[chunk.group].entry(chunk, 1)
        admitted = self._admission.admit(chunk.key, entry) or chunk.origin.priority == HIGH
        if not admitted:
            self._stats.refused(CPU, [chunk.key], Cause.NOT_ADMITTED)
        return admitted

    def _open(self, chunks: Sequence[Wanted], slots: tuple[int, ...]) -> None:
        job = self._ledger.next_id()
        blocks = tuple(chunk.blocks for chunk in chunks)
        flat = tuple(block for chunk in blocks for block in chunk)
        keys = tuple(chunk.key for chunk in chunks)
        write = chunks[0].origin.controls.write
        self._ledger.open(Job(job, JobKind.STORE, fills=keys, blocks=flat, write=write))
        self._planned.append(StoreJob(job, chunks[0].group, blocks, slots))
        self.storing += len(keys)

    def fence(self, blocks: Iterable[int]) -> None:
        """These GPU blocks are given to new content in the coming step.

        Stores that still read them are fenced; a store that was planned but not sent is
        cancelled, because its source is gone when the plan arrives.
        """
        readers = self._ledger.readers(blocks)
        if not readers:
            return
        unsent = {store.job for store in self._planned} & readers
        for job_id in unsent:
            self._cancel(job_id)
        self._fence |= readers - unsent

    def cancel_planned(self) -> None:
        """Take back what was planned and not sent."""
        for store in list(self._planned):
            self._cancel(store.job)

    def distrust(self) -> None:
        """A fence may have been missed: no store that is open now may be committed."""
        self.cancel_planned()
        self._ledger.distrust(JobKind.STORE)

    def _cancel(self, job_id: int) -> None:
        job = self._ledger.close(job_id)
        self._cpu.abort(job.fills)
        self.storing -= len(job.fills)
        self._planned = [store for store in self._planned if store.job != job_id]
        self._stats.stores_cancelled += 1
        self._stats.refused(CPU, job.fills, Cause.CANCELLED)
        self._filled(job.fills)
