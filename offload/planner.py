"""The planner: turns what requests need into jobs, and reports into states.

Pure and synchronous; the scheduler's thread owns it and everything below it. It speaks of keys,
GPU block ids and slots, and knows neither requests' tokens nor how bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from offload.chunks import GroupInfo, Wanted
from offload.demotion import DemotionQueue
from offload.errors import InvariantError
from offload.index import TierIndex
from offload.layout import STATE
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.load_planner import LoadPlanner
from offload.plans import JobResult, StepPlan, StepReport, StoreJob
from offload.stats import PlannerStats
from policies.base import AdmissionPolicy, EntryInfo


class Planner:
    """Decides stores, loads, write-through and eviction for one engine.

    ``groups`` maps group ids to what is known of them; ``ranks`` is how many workers answer
    every job; ``max_store_chunks`` and ``max_load_chunks`` bound the chunks that may be on their
    way to and from the CPU tier; ``admission`` says what may enter it (``None``: everything).
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        lower: Sequence[TierIndex] = (),
        *,
        ranks: int = 1,
        max_store_chunks: int = 4096,
        max_load_chunks: int = 1 << 30,
        admission: AdmissionPolicy | None = None,
        demotions: Sequence[DemotionQueue] | None = None,
    ) -> None:
        self.cpu = cpu
        self.lower = tuple(lower)
        self.stats = PlannerStats([index.name for index in self.lower])
        self._groups = groups
        self._ledger = Ledger(ranks)
        self._loads = LoadPlanner(
            groups, cpu, self.lower, self._ledger, self.stats, max_load_chunks
        )
        self._max_store_chunks = max_store_chunks
        self._admission = admission
        self._storing = 0
        self._stores: list[StoreJob] = []
        self._fence: set[int] = set()
        self._deletes: dict[int, list[bytes]] = {}
        self._touches: dict[int, list[bytes]] = {}
        self._reset = False
        self._epochs: tuple[int, ...] = ()
        if demotions is None:
            demotions = [DemotionQueue(tier, index) for tier, index in enumerate(self.lower)]
        self._demotions = tuple(demotions)
        self.present = self._make_present()

    # -- lookup ------------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[Container[bytes], ...]:
        """Where a chunk can be found, nearest first; a promotion under way counts."""
        return (self.cpu.resident, *(index.resident for index in self.lower), self._loads.promoting)

    def _make_present(self) -> Callable[[bytes], bool]:
        """``present(key)``: whether some tier can give this chunk now, or is about to."""
        cpu, promoting = self.cpu.resident, self._loads.promoting
        lower = [index.resident for index in self.lower]
        if not lower:
            return lambda key: key in cpu
        if len(lower) == 1:
            only = lower[0]
            return lambda key: key in cpu or key in only or key in promoting
        return lambda key: key in cpu or key in promoting or any(key in tier for tier in lower)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note one request's use of these keys (prefix order) in every tier."""
        self.cpu.touch(keys)
        for tier, index in enumerate(self.lower):
            index.touch(keys)
            held = [key for key in keys if key in index]
            if held:
                self._touches.setdefault(tier, []).extend(held)

    # -- store -------------------------------------------------------------------------------

    def plan_store(self, chunks: Sequence[Wanted], protect: Container[bytes] = frozenset()) -> int:
        """Plan to store chunks of one group whose content is final after this step.

        Returns how many of them, from the first on, need no more attention: those that some
        tier holds already and those that got a slot. The rest may be asked again.
        """
        fresh, settled = self._absent_prefix(chunks)
        if not fresh:
            return settled
        infos = [self._entry(chunk) for chunk in fresh]
        grant = self.cpu.reserve([chunk.key for chunk in fresh], infos, protect)
        self.stats.evicted(CPU, len(grant.evicted))
        taken = fresh[: len(grant.places)]
        if len(taken) < len(fresh):
            self.stats.store_refusals += len(fresh) - len(taken)
            settled = chunks.index(fresh[len(taken)])
        if taken:
            self._open_store(taken, grant.places)
        return settled

    def _absent_prefix(self, chunks: Sequence[Wanted]) -> tuple[list[Wanted], int]:
        """The chunks that no tier has, as far as the store budget goes, and how many were seen."""
        budget = self._max_store_chunks - self._storing
        cpu, present = self.cpu, self.present
        fresh: list[Wanted] = []
        for position, chunk in enumerate(chunks):
            if present(chunk.key) or not cpu.is_absent(chunk.key) or not self._admits(chunk):
                continue
            # A recurrent state is offered once; what else is refused here is asked again.
            if len(fresh) >= budget and self._groups[chunk.group].kind != STATE:
                self.stats.store_refusals += 1
                return fresh, position
            fresh.append(chunk)
        return fresh, len(chunks)

    def _admits(self, chunk: Wanted) -> bool:
        return self._admission is None or self._admission.admit(chunk.key, self._entry(chunk))

    def _open_store(self, chunks: Sequence[Wanted], slots: tuple[int, ...]) -> None:
        job = self._ledger.next_id()
        blocks = tuple(chunk.blocks for chunk in chunks)
        flat = tuple(block for chunk in blocks for block in chunk)
        keys = tuple(chunk.key for chunk in chunks)
        self._ledger.open(Job(job, JobKind.STORE, fills=keys, blocks=flat))
        self._stores.append(StoreJob(job, chunks[0].group, blocks, slots))
        self._storing += len(keys)

    def fence(self, blocks: Iterable[int]) -> None:
        """These GPU blocks are given to new content in the coming step.

        Stores that still read them are fenced; a store that was planned but not sent is
        cancelled, because its source is gone when the plan arrives.
        """
        readers = self._ledger.readers(blocks)
        if not readers:
            return
        unsent = {store.job for store in self._stores} & readers
        for job_id in unsent:
            self._cancel_store(job_id)
        self._fence |= readers - unsent

    def distrust_stores(self) -> None:
        """A fence may have been missed: no store that is open now may be committed."""
        for store in list(self._stores):
            self._cancel_store(store.job)
        self._ledger.distrust(JobKind.STORE)

    def _cancel_store(self, job_id: int) -> None:
        job = self._ledger.close(job_id)
        self.cpu.abort(job.fills)
        self._storing -= len(job.fills)
        self._stores = [store for store in self._stores if store.job != job_id]
        self.stats.stores_cancelled += 1

    # -- load --------------------------------------------------------------------------------

    def plan_load(self, request: str, chunks: Sequence[Wanted]) -> Mapping[int, int]:
        """Plan to restore these chunks for a request: see ``LoadPlanner.plan``."""
        return self._loads.plan(request, chunks)

    def plan_failed_load(self, request: str) -> None:
        """Answer a request that waits for a load with a failure, which vLLM recomputes."""
        self._loads.plan_failed(request)

    def can_load(self, chunks: int) -> bool:
        """Whether the load budget has room. One load is always allowed, however large."""
        return self._loads.can_load(chunks)

    def _entry(self, chunk: Wanted) -> EntryInfo:
        return self._groups[chunk.group].entry(chunk.depth_tokens, 1, chunk.group)

    # -- a step ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a worker has, or should get, something to do."""
        return bool(
            len(self._ledger)
            or self._stores
            or len(self._loads)
            or self._deletes
            or self._reset
            or any(len(queue) for queue in self._demotions)
        )

    def step(self, *, idle: bool = False, demote: bool = True) -> StepPlan:
        """Everything planned since the last call, plus the write-through that is due."""
        demotes = []
        for queue in self._demotions if demote else ():
            for job in queue.due(self.cpu, self._ledger, self._groups):
                demotes.append(job.plan)
                self.delete(queue.tier, job.evicted)
                self.stats.evicted(queue.tier, len(job.evicted))
        plan = StepPlan(
            stores=tuple(self._stores),
            loads=self._loads.take(),
            demotes=tuple(demotes),
            deletes={tier: tuple(keys) for tier, keys in self._deletes.items() if keys},
            touches={tier: tuple(keys) for tier, keys in self._touches.items()},
            fence=tuple(sorted(self._fence)),
            reset=self._reset,
            epochs=self._epochs,
            idle=idle,
        )
        self._stores, self._fence = [], set()
        self._deletes, self._touches = {}, {}
        self._reset, self._epochs = False, ()
        return plan

    def complete(self, report: StepReport) -> None:
        """Take in what workers have finished."""
        ended = {
            JobKind.STORE: self._stored,
            JobKind.LOAD: self._loaded,
            JobKind.DEMOTE: self._demoted,
        }
        errors: list[Exception] = []
        for job_id, result in report.results.items():
            try:
                job = self._ledger.answer(job_id, result)
                if job is not None:
                    ended[job.kind](job)
            except Exception as error:  # one bad answer must not lose the others
                errors.append(error)
        if errors:
            raise errors[0]

    def _stored(self, job: Job) -> None:
        self._storing -= len(job.fills)
        good, bad = self._verdict(job)
        self.cpu.abort(bad)
        kept = self.cpu.commit(good)
        self.stats.stored(CPU, len(kept), len(bad))
        for queue in self._demotions:
            queue.offer(kept, self.cpu, self._groups)

    def _loaded(self, job: Job) -> None:
        good, bad = self._verdict(job)
        self._loads.ended(job)
        self.cpu.abort(bad)
        self.cpu.commit(good)
        for tier, keys in job.pins:
            index = self.cpu if tier == CPU else self.lower[tier]
            index.unpin(keys)
        result = _result(job)
        self.forget(result.lost)
        self.stats.loaded(job.tokens_by_tier or {}, failed=result.failed or bool(result.bad))

    def _demoted(self, job: Job) -> None:
        good, bad = self._verdict(job)
        index = self.lower[job.fill_tier]
        index.abort(bad)
        kept = index.commit(good)
        for tier, keys in job.pins:
            if tier != CPU:
                raise InvariantError(f"planner: demotion {job.job} pins tier {tier}")
            self.cpu.unpin(keys)
        self._demotions[job.fill_tier].ended(job)
        self.stats.stored(job.fill_tier, len(kept), len(bad))
        if bad:
            # Another rank may have written its part; it must not come back after a restart.
            self.delete(job.fill_tier, bad)

    def _verdict(self, job: Job) -> tuple[list[bytes], list[bytes]]:
        """Which of the keys that a job filled may be committed, and which must not."""
        result = _result(job)
        if result.failed or job.distrusted:
            return [], list(job.fills)
        good = [key for key in job.fills if key not in result.bad]
        return good, [key for key in job.fills if key in result.bad]

    # -- forgetting --------------------------------------------------------------------------

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop keys that a tier turned out not to hold intact, from every lower tier."""
        lost = list(keys)
        for tier, index in enumerate(self.lower):
            dropped = index.drop(lost)
            if dropped:
                self.delete(tier, dropped)
                self.stats.dropped(tier, len(dropped))

    def delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Have the workers delete records of a lower tier that its index does not know."""
        if keys:
            self._deletes.setdefault(tier, []).extend(keys)

    def reset(self, epochs: Sequence[int] = ()) -> None:
        """``forget_all``, and go on under the lower tiers' new ``epochs``."""
        self.forget_all()
        self.begin_epochs(epochs)

    def begin_epochs(self, epochs: Sequence[int]) -> None:
        """Tell the workers the new epochs of the lower tiers; writes to them may go on."""
        self._reset, self._epochs = True, tuple(epochs)
        for queue in self._demotions:
            queue.closed = False

    def forget_all(self) -> None:
        """The weights changed: nothing stored so far may be hit again, in any tier.

        Jobs under way end as usual, but what they fill is forgotten. Lower tiers are written
        again only after ``begin_epochs``.
        """
        for store in list(self._stores):
            self._cancel_store(store.job)
        for queue in self._demotions:
            queue.clear(self.cpu)
            queue.closed = True
        for index in (self.cpu, *self.lower):
            index.clear()
        self._loads.promoting.clear()
        self._deletes, self._touches = {}, {}
        self._reset, self._epochs = True, ()
        self.stats.resets += 1

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its name."""
        return self.stats.totals() | {"late_answers": self._ledger.late_answers}

    def check(self) -> None:
        """Verify the invariants of every part; raises ``InvariantError``."""
        for index in (self.cpu, *self.lower):
            index.check()
        storing = sum(len(j.fills) for j in self._ledger.jobs() if j.kind is JobKind.STORE)
        if storing != self._storing:
            raise InvariantError(f"planner: {storing} chunks being stored, counted {self._storing}")
        if not len(self._ledger) and self.cpu.filling_count:
            raise InvariantError("planner: chunks are being filled and no job is open")


def _result(job: Job) -> JobResult:
    if job.result is None:
        raise InvariantError(f"planner: job {job.job} ended without an answer")
    return job.result
