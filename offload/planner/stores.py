"""Stores: which chunks get a slot of the CPU tier, and the fences before their blocks change.

Part of the planner, on the same thread. Owns the stores that were planned and not sent, the
fences of the coming step, and the budget of chunks on their way to the CPU tier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import compress, count, islice

from offload.index.chunk_batch import ChunkBatch, GroupInfo, LazyEntryInfos
from offload.index.tier_index import TierIndex
from offload.layout.groups import STATE
from offload.layout.keys import CPU
from offload.layout.prefix_match import present_in
from offload.messages.plan import StoreJob
from offload.planner.jobs import Job, JobKind, JobTable
from offload.planner.step_budget import EVICT, STORE, StepBudget
from offload.telemetry.counters import PlannerStats
from offload.telemetry.removed_chunks import Cause
from policies.base import AdmissionPolicy
from policies.hints import HIGH, LOW

LEAVES = 3
"""Eighths of a step's budget that are left to what follows stores."""
PIECE_MIN = 16
"""To ask for fewer chunks at a time costs more than to ask for some again."""
FEW = 64
"""So many chunks may always be stored of a request that ends, because what it ends with should not
be lost when others have used up the step; and so many in a step of all that go on."""


class StorePlanner:
    """Plans stores into the CPU tier; at most ``max_chunks`` are ``storing`` at a time, and a step
    begins to store what its ``budget`` allows.

    ``admission`` says what may enter (``None``: everything). ``filled(keys)`` is told when a store
    of these keys has ended, however it did.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        job_table: JobTable,
        stats: PlannerStats,
        filled: Callable[[Sequence[bytes]], None],
        max_chunks: int,
        admission: AdmissionPolicy | None,
        budget: StepBudget,
    ) -> None:
        self.storing = 0
        self._groups = groups
        self._cpu = cpu
        self._job_table = job_table
        self._stats = stats
        self._filled = filled
        self._max_chunks = max_chunks
        self._admission = admission
        self._budget = budget
        self._planned: list[StoreJob] = []
        self._fence: set[int] = set()
        self._few = FEW  # of requests that go on, left of this step
        self._is_full = False  # nothing can be evicted in this step: that is not tried again

    def __len__(self) -> int:
        """Stores that were planned and not sent."""
        return len(self._planned)

    def take(self) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """The stores planned since the last call, and the jobs to be fenced."""
        taken = tuple(self._planned), tuple(sorted(self._fence))
        self._planned, self._fence = [], set()
        self._is_full, self._few = False, FEW
        return taken

    def answered(self, job: Job) -> None:
        """A store has been answered by every rank."""
        self.storing -= len(job.fills)

    def ended(self, job: Job) -> list[bytes]:
        """Take in what a store that was answered has filled: the keys that can be hit now."""
        good, bad = job.verdict()
        self._cpu.abort(bad)
        kept = self._cpu.commit(good, job.infos_of(good))
        self._stats.stored(CPU, kept, bad)
        return kept

    def plan(
        self,
        run: ChunkBatch,
        holders: Sequence[Container[bytes]],
        protect: Container[bytes],
        *,
        ended: bool = False,
    ) -> int:
        """Plan to store chunks of one group whose content is final after this step.

        ``holders`` are the chunks that some tier holds already or a job is writing; ``protect`` are
        keys that must not be evicted for these. Returns how many of them, from the first on, need
        no more attention: those that some tier holds and those that got a slot. The rest may be
        asked again, unless their request has ``ended``.
        """
        is_state = self._groups[run.group].kind == STATE
        most = self.room(ended=ended or is_state)
        if self._is_full or most <= 0:
            return 0
        fresh, settled = self._absent_prefix(run, holders, most)
        if not fresh:
            return settled
        infos = self._groups[run.group].entries(fresh, 1)
        evict = run.origin.priority != LOW
        grant = self._cpu.reserve(fresh.keys, infos, protect, evict=evict, remember=False)
        self._stats.evicted(CPU, grant.evicted)
        if (granted := len(grant.places)) < len(fresh):
            self._is_full = evict
            self._stats.store_refusals += len(fresh) - granted
            self._stats.refused(CPU, [fresh.keys[granted]], Cause.NO_SPACE)
            settled = run.keys.index(fresh.keys[granted])
        if granted:
            self._open(fresh.part(0, granted), infos[:granted], grant.places)
        self._few -= 0 if ended else granted
        self._budget.spend(STORE * granted + EVICT * len(grant.evicted))
        return settled

    def room(self, *, ended: bool = False) -> int:
        """Chunks of a request that may be stored in this step if none has to be evicted for
        them."""
        return max(self._budget.above(LEAVES) // STORE, FEW if ended else self._few)

    def _absent_prefix(
        self, run: ChunkBatch, holders: Sequence[Container[bytes]], most: int
    ) -> tuple[ChunkBatch, int]:
        """The chunks that no tier has, as far as this step (``most``) and the budget of all stores
        go, and how many were seen."""
        wanted = _absent(run.keys, holders)
        if True not in wanted:
            return run.part(0, 0), len(run)
        # A recurrent state is offered once; what else is refused here is asked again.
        left = room = len(run)
        if self._groups[run.group].kind != STATE:
            left = max(0, self._max_chunks - self.storing)
            room = min(left, most)
        if self._admission is not None:
            wanted = self._admitted(self._admission, run, wanted, room)
        if wanted.count(True) > room:
            seen = next(islice(compress(count(), wanted), room, None))
            if room == left:
                self._stats.store_refusals += 1
                self._stats.refused(CPU, [run.keys[seen]], Cause.NO_SPACE)
            run, wanted = run.part(0, seen), wanted[:seen]
        return run.chosen(wanted), len(wanted)

    def _admitted(
        self, policy: AdmissionPolicy, run: ChunkBatch, wanted: Sequence[bool], most: int
    ) -> list[bool]:
        """``wanted`` without what is not admitted; asked until there are more than ``most``."""
        found, admitted = list(wanted), 0
        high = run.origin.priority == HIGH
        for at in compress(count(), wanted):
            if admitted > most:
                break
            (entry,) = self._groups[run.group].entries(run.part(at, at + 1), 1)
            found[at] = policy.admit(run.keys[at], entry) or high
            admitted += found[at]
            if not found[at]:
                self._stats.refused(CPU, [run.keys[at]], Cause.NOT_ADMITTED)
        return found

    def _open(self, run: ChunkBatch, infos: LazyEntryInfos, slots: Sequence[int]) -> None:
        job = self._job_table.next_id()
        write, keys, blocks = run.origin.controls.write, run.keys, run.blocks
        self._job_table.open(
            Job(job, JobKind.STORE, fills=keys, blocks=blocks, write=write, infos=infos)
        )
        self._planned.append(StoreJob(job, run.group, run.blocks, slots))
        self.storing += len(run)

    def fence(self, blocks: Iterable[int]) -> None:
        """These GPU blocks are given to new content in the coming step.

        Stores that still read them are fenced; a store that was planned but not sent is
        cancelled, because its source is gone when the plan arrives.
        """
        readers = self._job_table.readers(blocks)
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
        self._job_table.distrust(JobKind.STORE)

    def _cancel(self, job_id: int) -> None:
        job = self._job_table.close(job_id)
        self._cpu.abort(job.fills)
        self.storing -= len(job.fills)
        self._planned = [store for store in self._planned if store.job != job_id]
        self._stats.stores_cancelled += 1
        self._stats.refused(CPU, job.fills, Cause.CANCELLED)
        self._filled(job.fills)


def _absent(keys: Sequence[bytes], holders: Sequence[Container[bytes]]) -> list[bool]:
    """Which of these are in no holder; mostly all are absent, which is asked at once."""
    if all(isinstance(held, dict) and held.keys().isdisjoint(keys) for held in holders):
        return [True] * len(keys)
    return [not here for here in present_in(*holders)(keys)]
