"""The planner: turns what requests need into jobs, and reports into states.

Pure and synchronous; the scheduler's thread owns it and everything below it. It speaks of keys,
GPU block ids and slots, and knows neither requests' tokens nor how bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from offload.chunks import UNKNOWN, GroupInfo, Origin, Wanted
from offload.demotion import DemotionQueue
from offload.errors import InvariantError
from offload.gates import Gates
from offload.index import TierIndex
from offload.layout import STATE
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.load_planner import LoadPlanner
from offload.plans import StepPlan, StepReport, StoreJob
from offload.stats import PlannerStats
from offload.uses import Uses
from policies.base import AdmissionPolicy, EntryInfo
from policies.hints import HIGH, LOW

_NOTHING: Mapping[str, Any] = {}


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
        max_load_blocks: int = 1 << 30,
        gates: Gates | None = None,
        admission: AdmissionPolicy | None = None,
        demotions: Sequence[DemotionQueue] | None = None,
    ) -> None:
        self.cpu = cpu
        self.lower = tuple(lower)
        self.stats = PlannerStats([index.name for index in self.lower])
        self.groups = groups
        self._ledger = Ledger(ranks)
        self.gates = gates or Gates([index.name for index in self.lower])
        self._now = 0.0
        self._loads = LoadPlanner(
            groups,
            cpu,
            self.lower,
            self.gates.tiers,
            self._ledger,
            self.stats,
            max_load_chunks,
            max_load_blocks,
        )
        self._max_store_chunks = max_store_chunks
        self._admission = admission
        self._storing = 0
        self._stores: list[StoreJob] = []
        self._fence: set[int] = set()
        self._deletes: dict[int, list[bytes]] = {}
        self._touches: dict[int, list[bytes]] = {}
        self._uses = Uses(cpu, self.lower, self.touch)
        self._reset = False
        self._epochs: tuple[int, ...] = ()
        if demotions is None:
            flying = max(1, cpu.space.capacity // 4)  # what hangs keeps its slots
            demotions = [
                DemotionQueue(tier, index, gate=self.gates.tiers[tier], max_flying=flying)
                for tier, index in enumerate(self.lower)
            ]
        self._demotions = tuple(demotions)

    # -- lookup ------------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[Container[bytes], ...]:
        """Where a chunk can be found now, nearest first."""
        return self._loads.holders(None)

    def holders_for(self, origin: Origin) -> tuple[Container[bytes], ...]:
        """``holders``, as far as this request may read them."""
        return self._loads.holders(origin.controls.read)

    @property
    def present(self) -> Callable[[bytes], bool]:
        """``present(key)``: whether some tier can give this chunk now, or is about to. The answer
        holds until the next ``tick`` or ``complete``."""
        holders = self.holders
        if len(holders) == 1:
            return holders[0].__contains__
        return lambda key: any(key in holder for holder in holders)

    def used(self, keys: Sequence[bytes], hints: Mapping[str, Any] = _NOTHING) -> None:
        """Note that a request has ended that used these keys of one group (prefix order), and
        what it is known to be followed by: see ``Uses``."""
        self._uses.ended(keys, hints)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note one request's use of these keys (prefix order) in every tier."""
        self.cpu.touch(keys)
        for tier, index in enumerate(self.lower):
            index.touch(keys)
            held = [key for key in keys if key in index]
            if held and self.gates.tiers[tier].writable:
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
        evict = fresh[0].origin.priority != LOW
        grant = self.cpu.reserve([chunk.key for chunk in fresh], infos, protect, evict=evict)
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
            if len(fresh) >= budget and self.groups[chunk.group].kind != STATE:
                self.stats.store_refusals += 1
                return fresh, position
            fresh.append(chunk)
        return fresh, len(chunks)

    def _admits(self, chunk: Wanted) -> bool:
        admitted = self._admission is None or self._admission.admit(chunk.key, self._entry(chunk))
        return admitted or chunk.origin.priority == HIGH

    def _open_store(self, chunks: Sequence[Wanted], slots: tuple[int, ...]) -> None:
        job = self._ledger.next_id()
        blocks = tuple(chunk.blocks for chunk in chunks)
        flat = tuple(block for chunk in blocks for block in chunk)
        keys = tuple(chunk.key for chunk in chunks)
        write = chunks[0].origin.controls.write
        self._ledger.open(Job(job, JobKind.STORE, fills=keys, blocks=flat, write=write))
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
        self._uses.filled(job.fills)

    # -- load --------------------------------------------------------------------------------

    def plan_load(self, request: str, chunks: Sequence[Wanted]) -> Mapping[int, int]:
        """Plan to restore these chunks for a request: see ``LoadPlanner.plan``."""
        return self._loads.plan(request, chunks)

    def plan_failed_load(self, request: str) -> None:
        """Answer a request that waits for a load with a failure, which vLLM recomputes."""
        self._loads.plan_failed(request)

    def request_ended(self, request: str) -> None:
        """A request does not wait for its load any more, even if the load's job goes on."""
        self._loads.request_ended(request)

    def can_load(self, chunks: int, blocks: int, origin: Origin = UNKNOWN) -> bool:
        """Whether the load budgets have room: see ``LoadPlanner.can_load``."""
        return self._loads.can_load(chunks, blocks, origin.priority == LOW)

    def _entry(self, chunk: Wanted) -> EntryInfo:
        return self.groups[chunk.group].entry(chunk, 1)

    # -- a step ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Say what time it is (monotonic seconds), before each ``step`` and ``complete``."""
        self._now = now
        self._loads.tick(now)

    def computed(self, tokens: int, seconds: float) -> None:
        """A request's prompt was computed: so many tokens in the time to its first token."""
        self.gates.prefill.observe(tokens, seconds)

    @property
    def busy(self) -> bool:
        """Whether a worker has, or should get, something to do."""
        return bool(
            len(self._ledger)
            or self._stores
            or len(self._loads)
            or self._due_deletes()
            or self._reset
            or any(len(queue) for queue in self._demotions)
        )

    def step(self, *, idle: bool = False, demote: bool = True) -> StepPlan:
        """Everything planned since the last call, plus the write-through that is due."""
        demotes = []
        for queue in self._demotions if demote else ():
            for job in queue.due(self.cpu, self._ledger, self.groups):
                demotes.append(job.plan)
                self.delete(queue.tier, job.evicted)
                self.stats.evicted(queue.tier, len(job.evicted))
        plan = StepPlan(
            stores=tuple(self._stores),
            loads=self._loads.take(),
            demotes=tuple(demotes),
            deletes={tier: tuple(self._deletes.pop(tier)) for tier in self._due_deletes()},
            touches={tier: tuple(keys) for tier, keys in self._touches.items()},
            fence=tuple(sorted(self._fence)),
            reset=self._reset,
            epochs=self._epochs,
            idle=idle,
        )
        self._stores, self._fence = [], set()
        self._touches = {}
        self._reset, self._epochs = False, ()
        return plan

    def _due_deletes(self) -> list[int]:
        """Tiers with deletions to post; those of a tier that is not written to now wait."""
        return [tier for tier in self._deletes if self.gates.tiers[tier].writable]

    def complete(self, report: StepReport) -> None:
        """Take in what workers have finished."""
        ended = {
            JobKind.STORE: self._stored,
            JobKind.LOAD: self._loaded,
            JobKind.DEMOTE: self._demoted,
            JobKind.PROBE: self._probed,
        }
        for (tier, rank), seen in report.tiers.items():
            self.gates.tiers[tier].observe(rank, seen, self._now)
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
        good, bad = job.verdict()
        self.cpu.abort(bad)
        told = self.cpu.infos(good) if self._demotions else {}
        kept = self.cpu.commit(good)
        self.stats.stored(CPU, len(kept), len(bad))
        for queue in self._demotions:
            if job.write is None or queue.tier in job.write:
                queue.offer(kept, self.cpu, self.groups, told)
        self._uses.filled(job.fills)

    def _loaded(self, job: Job) -> None:
        good, bad = job.verdict()
        self._loads.ended(job, self._now)
        self.cpu.abort(bad)
        self.cpu.commit(good)
        self._uses.filled(job.fills)
        for tier, keys in job.pins:
            index = self.cpu if tier == CPU else self.lower[tier]
            index.unpin(keys)
        self.forget(job.answer.lost)

    def _probed(self, job: Job) -> None:
        self._loads.probed(job, self._now)
        self.forget(job.answer.lost)

    def _demoted(self, job: Job) -> None:
        good, bad = job.verdict()
        index = self.lower[job.fill_tier]
        index.abort(bad)
        kept = index.commit(good)
        for tier, keys in job.pins:
            if tier != CPU:
                raise InvariantError(f"planner: demotion {job.job} pins tier {tier}")
            self.cpu.unpin(keys)
        self._demotions[job.fill_tier].ended(job)
        self.gates.tiers[job.fill_tier].written(self._now, good=bool(good))
        self.stats.stored(job.fill_tier, len(kept), len(bad))
        # What a rank may have written and the index does not keep (it failed on another, or was
        # forgotten meanwhile) must not take space, nor come back after a restart.
        self.delete(job.fill_tier, [key for key in job.fills if key not in index])

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
        self._uses.clear()
        self._deletes, self._touches = {}, {}
        self._ledger.distrust(JobKind.PROBE)
        self._reset, self._epochs = True, ()
        self.stats.resets += 1

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its name."""
        late = {"late_answers": float(self._ledger.late_answers)}
        return self.stats.totals() | late | self.gates.totals()

    def check(self) -> None:
        """Verify the invariants of every part; raises ``InvariantError``."""
        for index in (self.cpu, *self.lower):
            index.check()
        storing = sum(len(j.fills) for j in self._ledger.jobs() if j.kind is JobKind.STORE)
        if storing != self._storing:
            raise InvariantError(f"planner: {storing} chunks being stored, counted {self._storing}")
        if not len(self._ledger) and self.cpu.filling_count:
            raise InvariantError("planner: chunks are being filled and no job is open")
