"""The planner: turns what requests need into jobs, and reports into states.

Pure and synchronous; the scheduler's thread owns it and everything below it. It speaks of keys,
GPU block ids and slots, and knows neither requests' tokens nor how bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from offload.errors import InvariantError
from offload.index.chunk_batch import UNKNOWN, ChunkBatch, GroupInfo, RequestOrigin
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import StepPlan
from offload.messages.report import StepReport
from offload.planner.jobs import Job, JobKind, JobTable
from offload.planner.loads import STEP_CHUNKS, LoadPlanner
from offload.planner.pending_deletes import PendingDeletes
from offload.planner.presence import PresenceCache, SharedLimits
from offload.planner.recency import Recency, RequestUses
from offload.planner.step_budget import TAKE_IN, TOUCH, DeferredWork, StepBudget
from offload.planner.stores import PIECE_MIN, StorePlanner
from offload.planner.tier_health import TierHealths
from offload.planner.write_through import WriteThrough, WriteThroughQueue, queues_of
from offload.telemetry.counters import PlannerStats
from policies.base import AdmissionPolicy
from policies.hints import LOW

_NOTHING: Mapping[str, Any] = {}
UNITS_PER_CHUNK = 3
"""Of the budget of a step, of which a chunk that it loads from the CPU tier takes half."""
WRITE_THROUGH = 2
"""Eighths of a step's budget that are left to it."""
FORGOTTEN_MAX = 16_384
"""Chunks of each tier that are remembered to have been forgotten by a reset."""


class Planner:
    """Decides stores, loads, write-through and eviction for one engine.

    ``groups`` maps group ids to what is known of them; ``ranks`` is how many workers answer
    every job; ``max_store_chunks`` and ``max_load_chunks`` bound the chunks that may be on their
    way to and from the CPU tier; ``admission`` says what may enter it (``None``: everything).
    ``shared`` are the numbers of lower tiers that other engines write to as well. ``step_chunks``
    bounds the chunks that one step loads and, by a ``StepBudget``, what it does besides; the rest
    follows in the next steps.
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
        gates: TierHealths | None = None,
        admission: AdmissionPolicy | None = None,
        write_through_queues: Sequence[WriteThroughQueue] | None = None,
        shared: Collection[int] = (),
        shared_limits: SharedLimits | None = None,
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        self.cpu = cpu
        self.lower = tuple(lower)
        self.stats = stats = PlannerStats([index.name for index in self.lower])
        self.groups = groups
        self._job_table = job_table = JobTable(ranks)
        self.gates = gates or TierHealths([index.name for index in self.lower])
        tiers = self.gates.tiers
        self._now = 0.0
        self.shared = PresenceCache(shared, self.lower, tiers, groups, ranks, shared_limits)
        self._loads = LoadPlanner(
            groups,
            cpu,
            self.lower,
            tiers,
            job_table,
            stats,
            max_load_chunks,
            max_load_blocks,
            self.shared,
            step_chunks,
        )
        self.failed_loads, self.removals = self._loads.failed, self._loads.sources.removals
        self._deletions = PendingDeletes()
        self._touches = Recency(cpu, self.lower, tiers)
        self._uses = RequestUses(cpu, self.lower, self._touches.note)
        self.budget = budget = StepBudget(UNITS_PER_CHUNK * step_chunks)
        self._piece_chunks = max(1, step_chunks // 2)
        told = self._uses.filled
        self._stores = StorePlanner(
            groups, cpu, job_table, stats, told, max_store_chunks, admission, budget
        )
        self._backlog = DeferredWork(budget)
        self._reset = False
        self._epochs: dict[int, int] = {}
        if write_through_queues is None:
            write_through_queues = queues_of(cpu, self.lower, self.gates)
        self._write_through_queues = WriteThrough(
            write_through_queues, cpu, job_table, stats, self.shared, budget, self.delete
        )

    # -- lookup ------------------------------------------------------------------------------

    @property
    def holders(self) -> tuple[Container[bytes], ...]:
        """Where a chunk can be found now, nearest first."""
        return self._loads.holders(None)

    def holders_for(
        self, origin: RequestOrigin, above: int | None = None
    ) -> tuple[Container[bytes], ...]:
        """``holders``, as far as this request may read them; without lower tiers from the
        ``above``-th on if that is given."""
        return self._loads.holders(origin.controls.read, above)

    @property
    def present(self) -> Callable[[bytes], bool]:
        """``present(key)``: whether some tier can give this chunk now, or is about to. The answer
        holds until the next ``tick`` or ``complete``."""
        holders = self.holders
        return lambda key: any(key in holder for holder in holders)

    def used(self, keys: Sequence[bytes], hints: Mapping[str, Any] = _NOTHING) -> None:
        """A request has ended that used these keys of one group (prefix order): see
        ``RequestUses``."""
        self._uses.ended(keys, hints)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note one request's use of these keys (prefix order) in every tier."""
        for tier in range(CPU, len(self.lower)):
            self._touches.note(tier, keys)

    # -- store -------------------------------------------------------------------------------

    def plan_store(
        self, run: ChunkBatch, protect: Container[bytes] = frozenset(), *, ended: bool = False
    ) -> int:
        """Plan to store chunks of one group: see ``StorePlanner.plan``."""
        return self._stores.plan(run, (*self.holders, *self.cpu.barred), protect, ended=ended)

    @property
    def store_piece(self) -> int:
        """Chunks to plan at a time for a request that goes on; more are looked for in vain."""
        return min(STEP_CHUNKS // 2, max(PIECE_MIN, self._stores.room()))

    def fence(self, blocks: Iterable[int]) -> None:
        """These GPU blocks are given to new content in the coming step."""
        self._stores.fence(blocks)

    def distrust_stores(self) -> None:
        """A fence may have been missed: no store that is open now may be committed."""
        self._stores.distrust()

    # -- load --------------------------------------------------------------------------------

    def plan_load(self, request: str, runs: Sequence[ChunkBatch]) -> Mapping[int, int]:
        """Plan to restore these chunks for a request: see ``LoadPlanner.plan``."""
        return self._loads.plan(request, runs)

    def cancel_load(self, request: str) -> None:
        """Nobody waits for this request's load any more: plan no more of it."""
        self._loads.cancel(request)

    def plan_failed_load(self, request: str) -> None:
        """Answer a request that waits for a load with a failure, which vLLM recomputes."""
        self._loads.plan_failed(request)

    def request_ended(self, request: str) -> None:
        """A request does not wait for its load any more, even if the load's job goes on."""
        self._loads.request_ended(request)

    def can_load(self, chunks: int, blocks: int, origin: RequestOrigin = UNKNOWN) -> bool:
        """Whether the load budgets have room: see ``LoadPlanner.can_load``."""
        return self._loads.can_load(chunks, blocks, origin.priority == LOW)

    # -- a step ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Say what time it is (monotonic seconds), before each ``step`` and ``complete``."""
        self._now = self.stats.now = now
        if self._uses.is_long:  # before anything else draws from this step's budget
            self.budget.spend(TOUCH * self._uses.step())
        self._loads.tick(now)
        self.shared.tick(now)

    def computed(self, tokens: int, seconds: float) -> None:
        """A request's prompt was computed: so many tokens in the time to its first token."""
        self.gates.prefill.observe(tokens, seconds)

    @property
    def busy(self) -> bool:
        """Whether a worker has, or should get, something to do."""
        return bool(
            len(self._job_table)
            or len(self._stores)
            or len(self._uses)
            or len(self._loads)
            or len(self.shared)
            or len(self._backlog)
            or any(map(self._deletions.waiting, self._ready_for_deletions()))
            or self._reset
            or self._epochs
            or self._write_through_queues.is_waiting
        )

    def step(self, *, idle: bool = False, write_through: bool = True) -> StepPlan:
        """Everything planned since the last call, plus the write-through that is due."""
        self._note_uses()
        errors = self._backlog.end_step(
            WRITE_THROUGH if self._write_through_queues.is_waiting else 0
        )
        self._loads.advance()
        if errors:
            raise errors[0]
        ready = self._ready_for_deletions()
        write_throughs = self._write_through_queues.due(self._deletions) if write_through else ()
        stores, fence = self._stores.take()
        plan = StepPlan(
            stores=stores,
            write_throughs=write_throughs,
            deletes=self._deletions.take(ready),
            touches=self._touches.take(),
            fence=fence,
            reset=self._reset,
            epochs=dict(self._epochs),
            questions=self.shared.take(),
            idle=idle,
            loads=self._loads.take(),  # the last: what is taken must be sent
        )
        self._reset = False
        self._epochs.clear()
        self.budget.end_step(self._now, half=len(self._loads) > 0)  # for loads that go on
        self._loads.next_step(self.budget.times)
        return plan

    def _note_uses(self) -> None:
        """Tell policies of the next uses, as far as the step goes, but always of some; not after a
        long one, which has taken more than a step's share."""
        eighths = 0
        while self.budget.above(eighths) > 0 and not self._uses.is_long and len(self._uses):
            self.budget.spend(TOUCH * self._uses.step())
            eighths = WRITE_THROUGH

    def _ready_for_deletions(self) -> list[int]:
        """Tiers that may be sent deletions: not one that is shut out, nor one whose only write
        since then has not come back, behind which they would queue up."""
        return [
            queue.tier
            for queue in self._write_through_queues.queues
            if (gate := self.gates.tiers[queue.tier]).writes.closed
            or (gate.writable and not queue.flying)
        ]

    def complete(self, report: StepReport) -> None:
        """Take in what workers have finished, as much as a step may."""
        ended = {
            JobKind.STORE: self._stored,
            JobKind.LOAD: self._loaded,
            JobKind.PROBE: self._probed,
        }
        for (tier, rank), seen in report.tiers.items():
            self.gates.tiers[tier].observe(rank, seen, self._now)
            if seen.losses:  # a chunk is there on every rank or not at all
                self._lost(tier)
            elif bad := seen.damaged:
                self._backlog.add(len(bad), partial(self._drop, tier, list(bad), bad))
        self.shared.answered(report.answers, self._now)
        errors: list[Exception] = []
        written: list[Job] = []
        for job_id, result in report.results.items():
            try:
                job = self._job_table.answer(job_id, result)
                if job is not None and job.kind is JobKind.WRITE_THROUGH:
                    written.append(job)
                elif job is not None:
                    ended[job.kind](job)
            except Exception as error:  # one bad answer must not lose the others
                errors.append(error)
        self._write_through_queues.answered(written, self._backlog, self._now)
        errors += self._backlog.work()
        if errors:
            raise errors[0]

    def _stored(self, job: Job) -> None:
        self._stores.answered(job)
        self._backlog.add(TAKE_IN * len(job.fills), partial(self._take_in_store, job))

    def _take_in_store(self, job: Job) -> None:
        kept = self._stores.ended(job)
        infos = job.infos_of(kept)
        for queue in self._write_through_queues.queues:
            if job.write is None or queue.tier in job.write:
                queue.offer(kept, self.cpu, self.groups, infos)
        self._uses.filled(job.fills)

    def _loaded(self, job: Job) -> None:
        self._loads.ended(job, self._now)
        for piece in self._loads.sources.let_go(job, self._piece_chunks, self._uses.filled):
            self._backlog.add(*piece)
        lost, corrupt = job.answer.lost, job.answer.corrupt
        self._backlog.add(len(lost), partial(self.forget, lost, corrupt))
        if wrong := job.answer.wrong:
            self._backlog.add(len(wrong), partial(self._forget_wrong, wrong))

    def _probed(self, job: Job) -> None:
        self._loads.probed(job, self._now)
        self.forget(job.answer.lost, job.answer.corrupt)

    # -- forgetting --------------------------------------------------------------------------

    def forget(self, keys: Iterable[bytes], corrupt: Container[bytes] = frozenset()) -> None:
        """Drop keys that a tier turned out not to hold intact, from every lower tier."""
        lost = list(keys)
        for tier in range(len(self.lower)):
            self._drop(tier, lost, corrupt)

    def _forget_wrong(self, keys: frozenset[bytes]) -> None:
        """Drop chunks that were not what was computed from every tier."""
        self.stats.dropped(CPU, self.cpu.drop(keys), keys)
        self.forget(keys, keys)

    def _drop(
        self, tier: int, keys: Sequence[bytes], corrupt: Container[bytes] = frozenset()
    ) -> None:
        dropped = self.lower[tier].drop(keys)
        self.delete(tier, dropped)
        if tier in self.shared.tiers:  # a damaged record would stay, because a present key does
            self._deletions.add(tier, [key for key in dropped if key in corrupt])
        self.stats.dropped(tier, dropped, corrupt)

    def _lost(self, tier: int) -> None:
        """A rank's tier has lost all its records: what the others hold of them is of no use."""
        keys = tuple(self.lower[tier].resident)
        self.lower[tier].clear()
        self.delete(tier, keys)
        self.stats.dropped(tier, keys, corrupt=())

    def delete(self, tier: int, keys: Sequence[bytes]) -> None:
        """Have the workers delete records of a lower tier that its index does not know. Not of a
        shared one, where others may know them."""
        if keys and tier not in self.shared.tiers:
            self._deletions.add(tier, keys)

    def reset(self, epochs: Mapping[int, int]) -> None:
        """``forget_all``, and go on under these new epochs of lower tiers."""
        self.forget_all()
        self.begin_epochs(epochs)

    def begin_epochs(self, epochs: Mapping[int, int]) -> None:
        """Tell the workers the new epochs of these lower tiers; writes to them may go on."""
        self._epochs.update(epochs)
        self.shared.begin_epochs(epochs)
        for queue in self._write_through_queues.queues:
            if queue.tier in epochs:
                queue.closed = False

    def forget_all(self) -> None:
        """The weights changed: nothing stored so far may be hit again, in any tier.

        Jobs under way end as usual, but what they fill is forgotten. Lower tiers are written
        again only after ``begin_epochs``.
        """
        self._stores.cancel_planned()
        for queue in self._write_through_queues.queues:
            queue.clear(self.cpu)
            queue.closed = True
        indexes = (self.cpu, *self.lower)
        some = [key for index in indexes for key in index.some(FORGOTTEN_MAX)]
        self.stats.reset(some, {n: len(index) for n, index in enumerate(indexes, CPU)})
        for index in indexes:
            index.clear()
        self._loads.forget_all()
        self.shared.forget_all()
        self._uses.clear()
        self._deletions.clear()
        self._touches.clear()
        self._job_table.distrust(JobKind.PROBE)
        self._reset = True
        self._epochs.clear()

    @property
    def loading_chunks(self) -> int:
        """Chunks on their way to the GPU."""
        return self._loads.loading

    def queue_depth(self, tier: int) -> int:
        """Chunks on their way into a tier."""
        return (
            self._stores.storing if tier == CPU else self._write_through_queues.queues[tier].depth
        )

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its name."""
        late: dict[str, float] = {"late_answers": self._job_table.late_answers}
        for queue, index in zip(self._write_through_queues.queues, self.lower, strict=True):
            late[f"write_refusals:{index.name}"] = queue.refused
            late[f"writes_skipped:{index.name}"] = queue.skipped
        return self.stats.totals() | late | self.gates.totals() | self.shared.totals()

    def check(self) -> None:
        """Verify the invariants of every part; raises ``InvariantError``."""
        for index in (self.cpu, *self.lower):
            index.check()
        storing = sum(len(j.fills) for j in self._job_table.jobs() if j.kind is JobKind.STORE)
        if storing != (counted := self._stores.storing):
            raise InvariantError(f"planner: {storing} chunks being stored, counted {counted}")
        if not (len(self._job_table) or len(self._backlog)) and self.cpu.filling_count:
            raise InvariantError("planner: chunks are being filled and no job is open")
