"""The planner: turns what requests need into jobs, and workers' reports into chunk states.

Pure and synchronous. It knows keys, GPU block ids and slots; it knows neither the tokens of
requests nor how bytes move. It composes its parts, runs them once per step, and handles everything
that concerns several of them. Callers use the parts directly.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from offload.errors import InvariantError
from offload.index.capacity import UsableSlots
from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import LoadJob, StepPlan
from offload.messages.report import StepReport
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind, JobTable
from offload.planner.load_sources import LoadSources
from offload.planner.loads import LoadPlanner
from offload.planner.look_ahead.look_ahead import LookAhead
from offload.planner.look_ahead.read_waits import NEVER, ReadWaits
from offload.planner.pending_deletes import PendingDeletes
from offload.planner.presence import PresenceCache, SharedLimits
from offload.planner.recency import Recency, RequestUses
from offload.planner.step_budget import (
    LEFT_TO_WRITE_THROUGH_SHARE,
    TAKE_IN_COST,
    TOUCH_COST,
    DeferredWork,
    StepBudget,
)
from offload.planner.stores import StorePlanner
from offload.planner.tier_health import TierHealths
from offload.planner.tier_probes import TierProbes
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import QueueSettings, WriteThrough
from offload.telemetry.counters import PlannerStats
from offload.telemetry.removed_chunks import RemovalCauses, RemovalLog
from policies.base import AdmissionPolicy

FORGOTTEN_MAX = 16_384
"""Number of chunks per tier for which a reset is remembered as the cause of their absence."""


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """The bounds and choices of one planner.

    ``ranks`` workers answer every job; ``admission`` decides what may enter the CPU tier (``None``:
    everything); ``queue_settings`` are for the write-through to each lower tier; ``shared`` are the
    numbers of the lower tiers that other engines write to as well; ``look_ahead`` is the share of
    the CPU tier for chunks that are read ahead (see ``LookAhead``), ``wait_for_reads`` says which
    requests wait for them (see ``ReadWaits``).
    """

    limits: WorkLimits = field(default_factory=WorkLimits)
    ranks: int = 1
    admission: AdmissionPolicy | None = None
    queue_settings: Sequence[QueueSettings] = ()
    shared: Collection[int] = ()
    shared_limits: SharedLimits = field(default_factory=SharedLimits)
    look_ahead: float = 0.0
    wait_for_reads: str = NEVER


class Planner:
    """Decides stores, loads, write-through and eviction for one engine.

    Owned by the scheduler side (or by ``OffloadManager``) and used on its thread, like its parts:
    ``sources`` finds chunks, ``loads`` and ``stores`` plan jobs, ``write_through`` copies chunks to
    lower tiers, ``deletes`` collects records to be deleted, ``presence`` asks shared tiers,
    ``uses`` and ``recency`` inform the eviction policies, ``health`` says which tiers may be used
    and ``probes`` test those that may not, ``jobs`` holds the open jobs, ``budget`` bounds a step
    and ``deferred`` holds what did not fit,
    ``removals`` and ``causes`` say which chunks have left the tiers lately, and why.
    ``now`` is the time of the last ``tick``.

    ``groups`` maps group ids to their geometry, ``tier_names`` the numbers of tiers to their names.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        lower: Sequence[TierIndex] = (),
        settings: PlannerSettings | None = None,
        *,
        health: TierHealths | None = None,
        slots: UsableSlots | None = None,
    ) -> None:
        settings = settings or PlannerSettings()
        names = [index.name for index in lower]
        self.groups = groups
        self.cpu = cpu
        self.lower = tuple(lower)
        self.tier_names = {CPU: "cpu"} | dict(enumerate(names))
        self._slots = slots
        self.causes = RemovalCauses()
        self.stats = PlannerStats(names, causes=self.causes)
        self.health = TierHealths(names) if health is None else health
        self.jobs = JobTable(settings.ranks)
        self.budget = StepBudget(settings.limits.step_chunks)
        self.removals = RemovalLog()
        context = PlannerContext(
            ranks=settings.ranks,
            limits=settings.limits,
            groups=groups,
            cpu=cpu,
            lower=self.lower,
            shared=frozenset(settings.shared),
            health=self.health,
            jobs=self.jobs,
            stats=self.stats,
            budget=self.budget,
            removals=self.removals,
        )
        self.presence = PresenceCache(context, settings.shared_limits)
        self.sources = LoadSources(context)
        self.loads = LoadPlanner(context, self.sources)
        self.probes = TierProbes(context, self.sources, self.presence)
        self.look_ahead = LookAhead(context, self.sources, settings.look_ahead)
        self.read_waits = ReadWaits(context, self.sources, self.look_ahead, settings.wait_for_reads)
        self.recency = Recency(context)
        self.uses = RequestUses(cpu, self.lower, self.recency.note)
        self.stores = StorePlanner(context, self.sources, self.uses, settings.admission)
        self.deletes = PendingDeletes(context.shared)
        self.write_through = WriteThrough(
            context, self.stores, self.presence, self.deletes, settings.queue_settings
        )
        self.deferred = DeferredWork(self.budget)
        self.now = 0.0
        self._ended = {
            JobKind.STORE: self._stored,
            JobKind.LOAD: self._loaded,
            JobKind.PROBE: self._probed,
            JobKind.AHEAD: self._read_ahead,
        }
        self._reset = False
        self._cancel_loads = False
        self._epochs: dict[int, int] = {}

    # -- a step ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Set the time (monotonic seconds); call this before each ``step`` and ``complete``."""
        self.now = now
        self.stats.tick(now)
        if self.uses.behind and self.uses.is_long:  # before anything else draws from the budget
            self.budget.spend(TOUCH_COST * self.uses.step())
        for tier in self.health.due(now):
            if not (self.health[tier].reads.closed and self.look_ahead.is_reading_from(tier)):
                self.probes.plan(tier, now)
        if self.presence.tiers:
            self.presence.tick(now)

    @property
    def busy(self) -> bool:
        """True if a worker has work, or should get some."""
        return bool(
            len(self.jobs)
            or len(self.stores)
            or self.stores.late_stores.chunks
            or self.uses.behind
            or self.loads.planned
            or self.loads.queue
            or self.look_ahead.planned
            or self.probes.planned
            or (self.presence.tiers and len(self.presence))
            or self.deferred.pieces
            or self._reset
            or self._cancel_loads
            or self._epochs
            or self.write_through.is_waiting
            or self.write_through.can_delete
        )

    def step(self, *, idle: bool = False, write_through: bool = True) -> StepPlan:
        """The plan of this step: everything planned since the previous step, and the write-through
        that is due. Only parts that have work are called."""
        if self.uses.behind:
            self._note_uses()
        leaves = self.deferred.pieces and self.write_through.is_waiting
        errors = self.deferred.end_step(LEFT_TO_WRITE_THROUGH_SHARE if leaves else 0.0)
        if self.loads.queue:
            self.loads.advance()
        if self.look_ahead.queue:
            self.look_ahead.advance(self.now)
        if errors:
            raise errors[0]
        write_throughs, deletes = self.write_through.take(writes=write_through)
        self.budget.end_step(self.now, half=bool(self.loads.queue))  # for loads that continue
        touches = self.recency.take() if self.recency.waiting else {}
        queries = self.presence.take() if self.presence.tiers else ()
        # From here on, nothing may fail: what is taken must be sent. A load that is not sent never
        # ends, and others would join its reads and copy slots that nothing has filled.
        stores, fence = self.stores.take()
        has_loads = self.loads.planned or self.look_ahead.planned or self.probes.planned
        plan = StepPlan(
            stores=stores,
            write_throughs=write_throughs,
            deletes=deletes,
            touches=touches,
            fence=fence,
            reset=self._reset,
            cancel_loads=self._cancel_loads,
            epochs=dict(self._epochs),
            queries=queries,
            idle=idle,
            loads=self._take_loads() if has_loads else (),
        )
        self._reset = self._cancel_loads = False
        self._epochs.clear()
        return plan

    def _take_loads(self) -> tuple[LoadJob, ...]:
        """The loads that were planned, after the reads ahead, which they may join, and before the
        probes, for which no request waits."""
        ahead = self.look_ahead.take() if self.look_ahead.planned else ()
        probes = self.probes.take() if self.probes.planned else ()
        return (*ahead, *self.loads.take(), *probes)

    def _note_uses(self) -> None:
        """Report deferred uses to the policies: at least one piece, more if the budget allows.
        Stops after a long piece, which has used more than its share of the step."""
        share = 0.0
        while self.uses.behind and self.budget.above(share) > 0 and not self.uses.is_long:
            self.budget.spend(TOUCH_COST * self.uses.step())
            share = LEFT_TO_WRITE_THROUGH_SHARE

    def complete(self, report: StepReport) -> None:
        """Process the work that workers have finished, as far as the step's budget allows. An error
        in one part of it does not affect the others; the first one is raised at the end."""
        errors: list[Exception] = []
        try:
            self._observe(report)
        except Exception as error:  # the jobs below must still end
            errors.append(error)
        written: list[Job] = []
        for job_id, result in report.results.items():
            try:
                job = self.jobs.answer(job_id, result)
                if job is not None and job.kind is JobKind.WRITE_THROUGH:
                    written.append(job)
                elif job is not None:
                    self._ended[job.kind](job)
            except Exception as error:  # one bad answer must not affect the others
                errors.append(error)
        if written:
            self.write_through.answered(written, self.deferred, self.now)
        if self.deferred.pieces:
            errors += self.deferred.work()
        if errors:
            raise errors[0]

    def _observe(self, report: StepReport) -> None:
        """Process what a report says about slots and tiers."""
        if report.usable and self._slots is not None:
            self._slots.take_in(report.usable)
        for (tier, rank), seen in report.tiers.items():
            self.health[tier].observe(rank, seen, self.now)
            if seen.losses:  # a chunk must be on every rank
                self._lost(tier)
            elif bad := seen.damaged:
                self.deferred.add(len(bad), partial(self._drop, tier, list(bad), bad))
        if report.answers:
            self.presence.answered(report.answers, self.now)

    def _stored(self, job: Job) -> None:
        self.stores.answered(job)
        self.deferred.add(TAKE_IN_COST * len(job.fills), partial(self._take_in_store, job))

    def _take_in_store(self, job: Job) -> None:
        self.write_through.offer(self.stores.ended(job), job)
        self._filled(job.fills)

    def _filled(self, keys: Sequence[bytes]) -> None:
        """Record that a job that filled these keys has ended, successfully or not."""
        if self.uses.waiting:
            self.uses.filled(keys)

    def _read_ahead(self, job: Job) -> None:
        self.look_ahead.ended(job)
        self._release(job)

    def _loaded(self, job: Job) -> None:
        self.loads.ended(job, self.now)
        self._release(job)
        if mismatched := job.answer.mismatched:
            self.deferred.add(len(mismatched), partial(self._forget_mismatched, mismatched))

    def _release(self, job: Job) -> None:
        """Release the chunks of a job that has read from the tiers; forget the lost ones."""
        for piece in self.sources.release(job, self.budget.piece_chunks, self._filled):
            self.deferred.add(*piece)
        if lost := job.answer.lost:
            self.deferred.add(len(lost), partial(self.forget, lost, job.answer.corrupt))

    def _probed(self, job: Job) -> None:
        self.probes.ended(job, self.now)
        self.forget(job.answer.lost, job.answer.corrupt)

    # -- forgetting --------------------------------------------------------------------------

    def forget(self, keys: Iterable[bytes], corrupt: Container[bytes] = frozenset()) -> None:
        """Drop keys from every lower tier, because a tier has lost their records or found them
        damaged."""
        lost = list(keys)
        for tier in range(len(self.lower)) if lost else ():
            self._drop(tier, lost, corrupt)

    def _forget_mismatched(self, keys: frozenset[bytes]) -> None:
        """Drop chunks from every tier, because their content differs from what was computed."""
        self.sources.end_promotions(keys)
        self.stats.dropped(CPU, self.cpu.drop(keys), keys)
        self.forget(keys, keys)

    def _drop(
        self, tier: int, keys: Sequence[bytes], corrupt: Container[bytes] = frozenset()
    ) -> None:
        dropped = self.lower[tier].drop(keys)
        self.deletes.add(tier, dropped, corrupt)
        self.stats.dropped(tier, dropped, corrupt)

    def _lost(self, tier: int) -> None:
        """Forget all records of a tier after one rank has lost its part: the other ranks' records
        are useless then."""
        keys = tuple(self.lower[tier].resident)
        self.lower[tier].clear()
        self.deletes.add(tier, keys)
        self.stats.dropped(tier, keys, corrupt=())

    def begin_epochs(self, epochs: Mapping[int, int]) -> None:
        """Send the workers the new epochs of these lower tiers; writes to the tiers may resume."""
        self._epochs.update(epochs)
        self.presence.begin_epochs(epochs)
        self.write_through.resume(epochs)

    def fail_loads(self) -> None:
        """Fail all open loads: what they restore may have been computed with old weights."""
        self.loads.fail_planned()
        self._cancel_loads = True

    def forget_all(self) -> None:
        """Forget everything, because the weights have changed: nothing stored so far may be hit
        again, in any tier.

        Open jobs end as usual, but the chunks that they fill are forgotten. Lower tiers are written
        again only after ``begin_epochs``.
        """
        self.stores.cancel_planned()
        self.write_through.suspend()
        indexes = (self.cpu, *self.lower)
        some = [key for index in indexes for key in index.some(FORGOTTEN_MAX)]
        self.stats.reset(some, {n: len(index) for n, index in enumerate(indexes, CPU)})
        for index in indexes:
            index.clear()
        self.fail_loads()
        self.loads.forget_all()
        self.look_ahead.forget_all()
        self.presence.forget_all()
        self.uses.clear()
        self.deletes.clear()
        self.recency.clear()
        self.jobs.distrust(JobKind.PROBE)
        self.jobs.distrust(JobKind.AHEAD)
        self._reset = True
        self._epochs.clear()

    # -- numbers -----------------------------------------------------------------------------

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its name."""
        late: dict[str, float] = {"late_answers": self.jobs.late_answers}
        parts = self.write_through.totals() | self.health.totals() | self.presence.totals()
        parts |= self.look_ahead.counts.totals() | self.read_waits.totals()
        return self.stats.totals() | late | parts

    def check(self) -> None:
        """Verify the invariants of every part; raises ``InvariantError``."""
        for index in (self.cpu, *self.lower):
            index.check()
        storing = sum(len(j.fills) for j in self.jobs.jobs() if j.kind is JobKind.STORE)
        if storing != (counted := self.stores.storing):
            raise InvariantError(f"planner: {storing} chunks being stored, counted {counted}")
        if not (len(self.jobs) or self.deferred.pieces) and self.cpu.filling_count:
            raise InvariantError("planner: chunks are being filled although no job is open")
