"""Plans stores: which chunks get a slot of the CPU tier, and which stores need a fence because
their blocks are about to change.

Pure. A fence makes a step wait for stores that still read GPU blocks which the step overwrites.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import compress, count, islice

from offload.index.chunk_batch import ChunkBatch, LazyEntryInfos
from offload.index.retention import NOTHING, Evict
from offload.layout.groups import STATE
from offload.layout.keys import CPU
from offload.layout.prefix_match import present_in
from offload.messages.plan import StoreJob
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind
from offload.planner.late_stores import LateStores
from offload.planner.load_sources import LoadSources
from offload.planner.own_chunks import OwnChunks
from offload.planner.recency import RequestUses
from offload.planner.step_budget import (
    EVICT_COST,
    LEFT_BY_STORES_SHARE,
    STORE_CHUNKS_MIN,
    STORE_COST,
    STORE_PIECE_MAX,
    STORE_PIECE_MIN,
)
from offload.telemetry.removed_chunks import Cause
from policies.base import AdmissionPolicy
from policies.hints import HIGH, LOW


class _EvictionAttempts:
    """Remembers which searches for victims had no result, so that stores do not repeat them: each
    search examines every chunk that must stay. Owned by the store planner.

    What was found in a step holds for the rest of the step. A request that could only have evicted
    its own chunks waits longer (``OwnChunks.is_full``).
    """

    def __init__(self) -> None:
        self._step = 0
        self._entered = 0  # number of chunks that have entered any tier
        self._is_full = False  # nothing can be evicted
        self._is_full_of_own = False  # a request could only have evicted its own chunks
        self._waits = False  # the next victim waits to be written

    def end_step(self) -> None:
        """Begin the next step: searches may find victims again."""
        self._is_full = self._is_full_of_own = self._waits = False
        self._step += 1

    def note_entered(self, chunks: int) -> None:
        """Record that chunks have entered a tier: a search may find other victims than before."""
        self._entered += chunks

    def may_succeed(self, own: OwnChunks | None, *, is_patient: bool) -> bool:
        """True if a search that spares the chunks of ``own`` might find a victim; a patient one
        stops at a victim that waits to be written."""
        if self._is_full or (self._waits and is_patient):
            return False
        return own is None or not own.is_full(self._entered, self._step)

    def stopped_at_unwritten(self) -> None:
        """Record that the next victim waits to be written."""
        self._waits = True

    def failed(self, own: OwnChunks | None) -> None:
        """Record that a search found no victim, or only chunks of ``own``."""
        # Two requests rarely own the same chunks. If the second one finds no victim either,
        # nothing can be evicted.
        self._is_full = self._is_full_of_own or not own
        if own:
            self._is_full_of_own = True
            own.found_full(self._entered, self._step)


class StorePlanner:
    """Plans stores into the CPU tier. Owned by the planner; used on its thread.

    ``storing`` counts the chunks on their way to the CPU tier; this number is bounded. A step
    begins as many stores as its budget allows. ``admission`` decides which chunks may enter
    (``None``: all). ``uses`` is notified when a store has ended, successfully or not.
    ``late_stores`` has chunks of ended requests that wait for their store.
    """

    def __init__(
        self,
        context: PlannerContext,
        sources: LoadSources,
        uses: RequestUses,
        admission: AdmissionPolicy | None,
    ) -> None:
        self.storing = 0
        self.late_stores = LateStores()
        self._groups = context.groups
        self._cpu = context.cpu
        self._saved = tuple(index.resident for index in context.lower)
        self._jobs = context.jobs
        self._stats = context.stats
        self._sources = sources
        self._uses = uses
        self._chunks_max = context.limits.store_chunks
        self._patience = min(STORE_CHUNKS_MIN, self._chunks_max)  # stored at a request's end
        self._admission = admission
        self._budget = context.budget
        self._planned: list[StoreJob] = []
        self._fence: set[int] = set()
        self._attempts = _EvictionAttempts()

    def __len__(self) -> int:
        """The number of stores that were planned and not sent."""
        return len(self._planned)

    def take(self) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """The stores planned since the previous call, and the jobs that need a fence."""
        taken = tuple(self._planned), tuple(sorted(self._fence))
        self._planned, self._fence = [], set()
        self._attempts.end_step()
        return taken

    def answered(self, job: Job) -> None:
        """Finish a store that every rank has answered."""
        self.storing -= len(job.fills)

    def ended(self, job: Job) -> list[bytes]:
        """Commit the chunks of an answered store; return the keys that can be hit now."""
        good, bad = job.verdict()
        if bad:
            self._cpu.abort(bad)
        committed = self._cpu.commit(good, job.infos_of(good))
        self._stats.stored(CPU, committed, bad)
        self.note_entered(len(committed))
        return committed

    def note_entered(self, chunks: int) -> None:
        """Record that chunks have entered a tier: a store may find victims again."""
        self._attempts.note_entered(chunks)

    def own_chunks(self) -> OwnChunks:
        """Make the record of a new request's chunks."""
        return OwnChunks(self._saved)

    def plan(
        self,
        batch: ChunkBatch,
        own: OwnChunks | None = None,
        *,
        ended: bool = False,
        may_wait: bool = False,
    ) -> int:
        """Plan to store chunks of one group whose content is final after this step.

        ``own`` has the earlier chunks of the same request, which must not be evicted for these
        chunks; chunks that need no more attention are added to it. With ``may_wait`` the store
        stops at a victim that waits to be written, instead of cancelling that write. Returns how
        many of the chunks, from the first on, need no more attention: a tier holds them, a job is
        writing them, or they got a slot. The caller may offer the rest again, unless the request
        has ``ended``.
        """
        settled = self._plan(batch, own, ended=ended, may_wait=may_wait)
        if own is not None:
            own.add(batch.keys[:settled])
        return settled

    def _plan(
        self, batch: ChunkBatch, own: OwnChunks | None, *, ended: bool, may_wait: bool
    ) -> int:
        is_offered_once = ended or self._groups[batch.group].kind == STATE
        is_patient = may_wait and not is_offered_once
        chunks_max = self.available(ended=is_offered_once)
        if chunks_max <= 0 or not self._attempts.may_succeed(
            None if ended else own, is_patient=is_patient
        ):
            return 0
        holders = (*self._sources.holders(), *self._cpu.barred)
        fresh, settled = self._absent_prefix(batch, holders, chunks_max)
        if not fresh:
            return settled
        infos = self._groups[batch.group].entries(fresh, 1)
        evict = Evict.WRITTEN if is_patient else Evict.ANYTHING
        if batch.origin.priority == LOW:
            evict = Evict.NOTHING
        grant = self._cpu.reserve(fresh.keys, infos, evict, protect=own or NOTHING)
        if grant.evicted:
            self._stats.evicted(CPU, grant.evicted)
        if (granted := len(grant.locations)) < len(fresh):
            self._no_space(fresh.keys[granted:], evict, own)
            settled = batch.keys.index(fresh.keys[granted])
        if granted:
            self._open(fresh.part(0, granted), infos[:granted], grant.locations)
        if not ended:
            self._budget.stores.take(granted)
        self._budget.spend(STORE_COST * granted + EVICT_COST * len(grant.evicted))
        return settled

    def _no_space(self, refused: Sequence[bytes], evict: Evict, own: OwnChunks | None) -> None:
        """Count chunks that found no slot in this step."""
        if evict is Evict.WRITTEN and self._cpu.unwritten:
            self._attempts.stopped_at_unwritten()
        elif evict is not Evict.NOTHING:
            self._attempts.failed(own)
        self._stats.no_space(len(refused), refused[:1])

    def plan_late(self) -> None:
        """Plan to store chunks of requests that have ended, before those of running requests,
        which can be offered again. Call this after the step's ``fence``."""
        while self.late_stores.chunks:
            batch, own = self.late_stores.take()
            settled = self.plan(batch, own)
            # if nothing was planned and nothing is being stored, waiting would free no space: drop
            # these chunks
            if settled < len(batch) and (settled or self.storing):
                self.late_stores.put_back(batch.part(settled, len(batch)), own)
                return

    def available(self, *, ended: bool = False) -> int:
        """The number of a request's chunks that can be stored in this step without an eviction."""
        always = STORE_CHUNKS_MIN if ended else self._budget.stores.left
        return max(self._budget.above(LEFT_BY_STORES_SHARE) // STORE_COST, always)

    def may_wait(self, chunks: int) -> bool:
        """True if a running request with ``chunks`` chunks to store waits, instead of evicting a
        chunk whose write has not begun.

        It waits only while the lower tiers keep up, and only if it could still store all these
        chunks at its end, when their blocks are still in the GPU's cache. This leaves no holes in a
        prefix that is longer than the CPU tier. A slower disk would keep new chunks out of the CPU
        tier, and the newest chunks are worth the most.
        """
        return not self._cpu.unwritten.is_behind and chunks <= self._patience

    @property
    def piece(self) -> int:
        """The number of a running request's chunks to plan at a time; looking up more is wasted."""
        return min(STORE_PIECE_MAX, max(STORE_PIECE_MIN, self.available()))

    def _absent_prefix(
        self, batch: ChunkBatch, holders: Sequence[Container[bytes]], chunks_max: int
    ) -> tuple[ChunkBatch, int]:
        """The chunks that no tier has, as far as this step (``chunks_max``) and the limit on all
        stores allow, and the number of chunks that were checked."""
        wanted = _absent(batch.keys, holders)
        if True not in wanted:
            return batch.part(0, 0), len(batch)
        # Recurrent states are offered only once; other chunks are offered again if they are refused
        # here.
        allowed = limit = len(batch)
        if self._groups[batch.group].kind != STATE:
            allowed = max(0, self._chunks_max - self.storing)
            limit = min(allowed, chunks_max)
        if self._admission is not None:
            wanted = self._admitted(self._admission, batch, wanted, limit)
        if wanted.count(True) > limit:
            seen = next(islice(compress(count(), wanted), limit, None))
            if limit == allowed:
                self._stats.no_space(1, [batch.keys[seen]])
            batch, wanted = batch.part(0, seen), wanted[:seen]
        return batch.chosen(wanted), len(wanted)

    def _admitted(
        self, policy: AdmissionPolicy, batch: ChunkBatch, wanted: Sequence[bool], chunks_max: int
    ) -> list[bool]:
        """``wanted`` without the chunks that are not admitted; stops after ``chunks_max`` + 1
        admitted chunks."""
        found, admitted = list(wanted), 0
        high = batch.origin.priority == HIGH
        for at in compress(count(), wanted):
            if admitted > chunks_max:
                break
            (entry,) = self._groups[batch.group].entries(batch.part(at, at + 1), 1)
            found[at] = policy.admit(batch.keys[at], entry) or high
            admitted += found[at]
            if not found[at]:
                self._stats.refused(CPU, [batch.keys[at]], Cause.NOT_ADMITTED)
        return found

    def _open(self, batch: ChunkBatch, infos: LazyEntryInfos, slots: Sequence[int]) -> None:
        job = self._jobs.next_id()
        write, keys, blocks = batch.origin.controls.write, batch.keys, batch.blocks
        self._jobs.open(
            Job(job, JobKind.STORE, fills=keys, blocks=blocks, write=write, infos=infos)
        )
        self._planned.append(StoreJob(job, batch.group, batch.blocks, slots))
        self.storing += len(batch)

    def fence(self, blocks: Iterable[int]) -> None:
        """Record that the coming step overwrites these GPU blocks.

        Stores that still read them are fenced. Stores that were planned but not sent are cancelled,
        because their source will be overwritten before the plan arrives.
        """
        self._fence |= self._readers(blocks)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Record that these GPU blocks may be overwritten at any time, by something that waits for
        no fence: no store that reads them is committed."""
        self._jobs.distrust_all(self._readers(blocks))

    def _readers(self, blocks: Iterable[int]) -> set[int]:
        """The stores that were sent and still read these blocks. Cancels those that were not
        sent."""
        if self.late_stores.chunks:
            blocks = tuple(blocks)
            self.late_stores.overwritten(blocks)
        readers = self._jobs.readers(blocks)
        if not readers:
            return readers
        unsent = {store.job for store in self._planned} & readers
        for job_id in unsent:
            self._cancel(job_id)
        return readers - unsent

    def cancel_planned(self) -> None:
        """Cancel the stores that were planned and not sent, and those that wait."""
        self.late_stores.clear()
        for store in list(self._planned):
            self._cancel(store.job)

    def distrust(self) -> None:
        """Commit no store that is open now, because a fence may have been missed."""
        self._jobs.distrust(JobKind.STORE)
        self.cancel_planned()

    def _cancel(self, job_id: int) -> None:
        job = self._jobs.close(job_id)
        self._cpu.abort(job.fills)
        self.storing -= len(job.fills)
        self._planned = [store for store in self._planned if store.job != job_id]
        self._stats.store_cancelled(job.fills)
        self._uses.filled(job.fills)


def _absent(keys: Sequence[bytes], holders: Sequence[Container[bytes]]) -> list[bool]:
    """The chunks that no holder has. Usually these are all chunks, which a single test shows."""
    if all(isinstance(held, dict) and held.keys().isdisjoint(keys) for held in holders):
        return [True] * len(keys)
    return [not here for here in present_in(*holders)(keys)]
