"""Loads: what a request waits for, planned part by part, and the budget of chunks in flight.

Part of the planner, on the same thread. A load of more chunks than a step may plan (all loads
together) is one job, of which the workers are told a part per step. Until its part is planned no
chunk of it is evicted; what else happens to it (lost, forgotten, its tier shut out) makes the load
fail.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.retention import LoadHolds
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU, group_of
from offload.messages.columns import NO_CHUNKS, Columns
from offload.messages.plan import IN_SLAB, STAGED, LoadItem, LoadJob
from offload.messages.report import JobResult
from offload.planner.jobs import Job, JobKind, JobTable
from offload.planner.load_sources import LoadSources, Pins
from offload.planner.presence import PresenceCache
from offload.planner.tier_health import TierHealth
from offload.telemetry.counters import PlannerStats

PROBE_CHUNKS = 64
FAILED_MAX = 256
STEP_CHUNKS = 256
"""Chunks of loads that one short step plans, if they lie in the CPU tier: one that gets a slot
counts twice, and one for which another is evicted four times. Long steps plan more (``budget``)."""
ACCEPTED_COST = 1 / 16
"""Accepting a chunk of a long load, in these units."""
PART_MAX = 64
"""Chunks that are planned at a time; what they cost is known afterwards."""
NOBODY = LoadItem(b"", 0, (), STAGED, IN_SLAB)
"""A chunk that nobody holds: a load with it fails."""


@dataclass(slots=True, eq=False)
class _Load:
    """What a request waits for. ``fills``, ``pins`` and ``tokens`` are its job's; ``rest`` is
    not planned yet, from chunk ``at`` of its first run on, and ``parts`` are."""

    job: Job
    fills: list[bytes]
    pins: list[Pins]
    rest: list[ChunkBatch]
    read: frozenset[int] | None
    at: int = 0
    parts: int = 0
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: dict[int, int] = field(default_factory=dict)

    def take(self, most: int) -> list[ChunkBatch]:
        """The next chunks of the rest."""
        taken = []
        while self.rest and most > 0:
            run = self.rest[0]
            end = min(len(run), self.at + most)
            taken.append(run.part(self.at, end))
            most -= end - self.at
            self.at = end
            if end == len(run):
                self.rest.pop(0)
                self.at = 0
        return taken


class LoadPlanner:
    """Plans loads over the CPU tier and the lower tiers.

    ``failed`` are the last loads that failed, with their requests, for whoever explains them;
    ``loading`` counts the chunks of all loads that requests wait for and ``holding`` the GPU blocks
    that they fill, at most ``max_chunks`` and ``max_blocks`` but for one load. ``held`` are the
    chunks of loads that are not planned to the end.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        gates: Sequence[TierHealth],
        job_table: JobTable,
        stats: PlannerStats,
        max_chunks: int,
        max_blocks: int,
        shared: PresenceCache,
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        self.loading = self.holding = 0
        self.failed: deque[tuple[str, JobResult]] = deque(maxlen=FAILED_MAX)
        self.held = LoadHolds()
        self.sources = LoadSources(groups, cpu, lower, gates, stats)
        self._gates = tuple(gates)
        self._lower = tuple(lower)
        self._job_table = job_table
        self._stats = stats
        self._max_chunks = max_chunks
        self._max_blocks = max_blocks
        self._shared = shared
        self._step_chunks = self._room = step_chunks
        self._planned: list[LoadJob] = []
        self._waited_for: dict[str, _Load] = {}
        self._queue: deque[_Load] = deque()
        for index in (cpu, *lower):
            index.held = self.held

    def __len__(self) -> int:
        """Parts that were planned and not sent, and loads that are not planned to the end."""
        return len(self._planned) + len(self._queue)

    def holders(
        self, read: frozenset[int] | None, above: int | None = None
    ) -> tuple[Container[bytes], ...]:
        """See ``LoadSources.holders``."""
        return self.sources.holders(read, above)

    def take(self) -> tuple[LoadJob, ...]:
        """What was planned since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def next_step(self, times: int) -> None:
        """The next step may plan so many times what a short one may."""
        self._room = times * self._step_chunks

    def tick(self, now: float) -> None:
        """Time passes: tiers that are shut out may be due for a probe."""
        for tier, gate in enumerate(self._gates):
            if not gate.tick(now):
                continue
            if tier in self._shared.tiers and not gate.reads.closed:
                gate.probe = self._shared.plan_probe(tier, now)
            else:
                gate.probe = self.plan_probe(tier)

    def ended(self, job: Job, now: float) -> None:
        """A load has been answered by every rank."""
        failed = job.answer.failed or bool(job.answer.bad)
        tokens = job.tokens_by_tier or {}
        self._stats.loaded(tokens, failed=failed)
        if failed:
            self.failed.append((job.request, job.answer))
        slowest = max(tokens, default=CPU)
        # The time is the whole load's: it says something of the tier that gave most of it.
        if slowest != CPU and 2 * tokens[slowest] >= sum(tokens.values()):
            if job.answer.late:
                self._gates[slowest].too_late(tokens[slowest], job.answer.seconds, now)
            elif not failed:
                self._gates[slowest].loaded(tokens[slowest], job.answer.seconds, now)
        load = self._waited_for.get(job.request)
        if load is not None and load.job is job:
            self.request_ended(job.request)

    def request_ended(self, request: str) -> None:
        """A request does not wait for its load any more. A read that hangs may go on, but it
        holds no GPU block and must not use up the budgets of loads from other tiers."""
        load = self._waited_for.pop(request, None)
        if load is not None:
            self.loading -= load.job.chunks
            self.holding -= load.job.holds
            if load.rest:
                self._cut(load, NOBODY)

    def cancel(self, request: str) -> None:
        """Nobody wants this request's load any more: what is not planned of it need not be."""
        load = self._waited_for.get(request)
        if load is not None and load.rest:
            self._cut(load)

    def forget_all(self) -> None:
        """Everything is forgotten: loads that are not planned to the end fail."""
        for load in list(self._queue):
            self._cut(load, NOBODY)
        self.sources.promoting.clear()

    def plan(self, request: str, runs: Sequence[ChunkBatch]) -> Mapping[int, int]:
        """Plan to restore these chunks for a request: in this step, or if they are too many in
        several.

        What lies in the CPU tier is pinned; what a lower tier holds is read into a slot of the
        CPU tier, or through a staging buffer where no slot is free. A chunk that nobody holds
        (a bug of the caller) makes the load fail, which is a recomputation, never wrong bytes.
        Returns the tokens that come from each tier (``CPU`` or the lower tier's number): of a load
        that is not planned to the end about those, and the mapping changes when it is.
        """
        read = runs[0].origin.controls.read if runs else None
        job = Job(
            self._job_table.next_id(),
            JobKind.LOAD,
            request=request,
            chunks=sum(map(len, runs)),
            holds=sum(len(run.blocks) for run in runs),
        )
        load = _Load(job, [], [], list(runs), read)
        job.fills, job.pins, job.tokens_by_tier = load.fills, load.pins, load.tokens
        at_once = not self._queue and job.chunks <= min(self._room, PART_MAX)
        if at_once:
            self._plan_part(load, job.chunks)
        else:
            load.tokens |= self.sources.expected(runs, read)
            self.held.hold(job.job, chain.from_iterable(run.keys for run in runs))
            self._room -= int(job.chunks * ACCEPTED_COST)
            self._queue.append(load)
        self._job_table.open(job)
        self.request_ended(request)
        self._waited_for[request] = load
        self.loading += job.chunks
        self.holding += job.holds
        return load.tokens

    def advance(self) -> None:
        """Plan the next parts of the loads that are not planned to the end, in turn."""
        errors: list[Exception] = []
        while self._queue and self._room > 0:
            load = self._queue.popleft()
            try:
                self._plan_part(load, min(self._room, PART_MAX))
            except Exception as error:  # its request must get an answer, and so must the others
                self._cut(load, NOBODY)
                errors.append(error)
            if load.rest:
                self._queue.append(load)
        if errors:
            raise errors[0]

    def _plan_part(self, load: _Load, most: int) -> None:
        job = load.job
        runs = load.take(most)
        later = self.held.holds(job.job)
        if not load.rest:
            self.held.release(job.job)
        taken = self.sources.take(job.job, runs, load.read, later=later)
        if taken is None:
            self._room -= most
            self._cut(load, NOBODY)
            return
        self._room -= taken.cost
        load.fills += taken.fills
        load.pins += taken.pins
        load.counts.update(taken.counts)
        if not load.rest:
            load.tokens.clear()
            load.tokens |= self.sources.tokens(load.counts)
            below = {tier: tokens for tier, tokens in load.tokens.items() if tier >= CPU}
            self._stats.planned(below)
        self._send(load, taken.columns)

    def _send(self, load: _Load, chunks: Columns) -> None:
        job, is_last = load.job, not load.rest
        self._planned.append(LoadJob(job.job, job.request, chunks, load.parts, is_last))
        load.parts += 1

    def _cut(self, load: _Load, *items: LoadItem) -> None:
        """Plan no more of this load than these. What tiers have given is what was planned."""
        self.held.release(load.job.job)
        load.rest = []
        load.tokens.clear()
        load.tokens |= self.sources.tokens(load.counts)
        if load in self._queue:
            self._queue.remove(load)
        self._send(load, Columns.of(items) if items else NO_CHUNKS)

    def plan_probe(self, tier: int) -> int | None:
        """Plan to read a few chunks of a lower tier for nobody, to see how that goes. Returns the
        job, or ``None`` if the tier holds nothing."""
        index = self._lower[tier]
        keys = index.some(PROBE_CHUNKS)
        if not keys:
            return None
        job = self._job_table.next_id()
        index.pin(keys)
        tokens = self.sources.tokens(Counter((group_of(key), tier) for key in keys))
        pins = ((tier, keys),)
        self._job_table.open(Job(job, JobKind.PROBE, pins=pins, tokens_by_tier=tokens))
        items = tuple(LoadItem(key, group_of(key), (), STAGED, tier) for key in keys)
        self._planned.append(LoadJob(job, "", items))
        return job

    def probed(self, job: Job, now: float) -> None:
        """A probe has been answered by every rank."""
        for tier, keys in job.pins:
            self._lower[tier].unpin(keys)
            gate = self._gates[tier]
            if job.distrusted:  # a reset came between: it says nothing of the tier
                gate.probe = None
                continue
            brought = 0 if job.answer.failed else len(keys) - len(job.answer.bad)
            tokens = (job.tokens_by_tier or {}).get(tier, 0) * brought // len(keys)
            gate.probed(tokens, job.answer.seconds, now, good=brought > 0)

    def plan_failed(self, request: str) -> None:
        """Answer a request that waits for a load with a failure, which vLLM recomputes."""
        job = self._job_table.next_id()
        self._job_table.open(Job(job, JobKind.LOAD, request=request))
        self._planned.append(LoadJob(job, request, (NOBODY,)))

    def can_load(self, chunks: int, blocks: int, low: bool = False) -> bool:
        """Whether the budgets have room for a load of so many chunks into so many GPU blocks: one
        of ``low`` priority may fill them to a half. One load is always allowed, however large."""
        share = 2 if low else 1
        if not self.loading or (
            share * (self.loading + chunks) <= self._max_chunks
            and share * (self.holding + blocks) <= self._max_blocks
        ):
            return True
        self._stats.load_refusals += 1
        return False
