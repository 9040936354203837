"""Loads that requests wait for, planned part by part, and the limits on loads in flight.

One step plans a limited number of chunks for all loads together. A load with more chunks is one job
that is sent to the workers in parts, one per step. Its chunks are not evicted before their part is
planned. The load fails if a chunk is lost or forgotten, or if its tier becomes unavailable. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from offload.index.chunk_batch import UNKNOWN, ChunkBatch, RequestOrigin
from offload.layout.keys import CPU
from offload.messages.plan import IN_SLAB, NO_CHUNKS, STAGED, Columns, LoadItem, LoadJob
from offload.messages.report import JobResult
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind, LoadTokens, Pins
from offload.planner.load_sources import LoadSources
from offload.planner.step_budget import ACCEPT_COST_IN_LOADED_CHUNKS, LOAD_PART_MAX
from policies.base import EntryInfo
from policies.hints import LOW

FAILED_LOADS_MAX = 256
"""Number of failed loads that are remembered."""
MISSING_CHUNK = LoadItem(b"", 0, (), STAGED, IN_SLAB)
"""Stands for a chunk that no tier holds; a load with such a chunk fails."""


@dataclass(slots=True, eq=False)
class _Load(Job):
    """A load that a request waits for: a job whose ``fills``, ``infos`` and ``pins`` grow part by
    part.

    ``parts`` is the number of planned parts. ``rest`` is not planned yet, from chunk ``at`` of its
    first batch on. The load reads the tiers ``read`` (``None``: all). ``counts`` are the planned
    chunks by group and tier; ``before`` are the tokens by tier that loads in flight receive while
    this one is read (``ReadQueue.before``).
    """

    fills: list[bytes] = field(default_factory=list)
    infos: list[EntryInfo] = field(default_factory=list)
    pins: list[Pins] = field(default_factory=list)
    tokens: LoadTokens = field(default_factory=LoadTokens)
    rest: list[ChunkBatch] = field(default_factory=list)
    read: frozenset[int] | None = None
    at: int = 0
    parts: int = 0
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    def take(self, chunks_max: int) -> list[ChunkBatch]:
        """Return up to ``chunks_max`` chunks of the rest."""
        taken = []
        while self.rest and chunks_max > 0:
            batch = self.rest[0]
            end = min(len(batch), self.at + chunks_max)
            taken.append(batch.part(self.at, end))
            chunks_max -= end - self.at
            self.at = end
            if end == len(batch):
                self.rest.pop(0)
                self.at = 0
        return taken


class _HeldLoad:
    """The chunks of one load. The set is made when it is first searched: most loads are planned
    before that."""

    def __init__(self, batches: Sequence[ChunkBatch]) -> None:
        self._batches = batches

    @cached_property
    def keys(self) -> frozenset[bytes]:
        """The keys of all chunks."""
        return frozenset(chain.from_iterable(batch.keys for batch in self._batches))


class LoadHolds:
    """Chunks that loads are about to use, by the job of the load. Owned by the load planner.

    Each load has one set, made at the first search and released as a whole. This is cheaper than a
    count per chunk, because the sets are searched only for chunks that are about to be evicted.
    """

    def __init__(self) -> None:
        self._held: dict[int, _HeldLoad] = {}

    def __len__(self) -> int:
        """The number of loads that hold chunks."""
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        for load in self._held.values():  # noqa: SIM110  # half the time of any()
            if key in load.keys:
                return True
        return False

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """True if no load holds any of these chunks."""
        return all(load.keys.isdisjoint(keys) for load in self._held.values())

    def hold(self, owner: int, batches: Sequence[ChunkBatch]) -> None:
        """Hold these chunks until ``release``."""
        self._held[owner] = _HeldLoad(batches)

    def holds(self, owner: int) -> bool:
        """True if this load holds chunks."""
        return owner in self._held

    def release(self, owner: int) -> None:
        """Release the chunks of this load, if it holds any."""
        self._held.pop(owner, None)


class LoadPlanner:
    """Plans loads from all tiers. Owned by the planner; used on its thread.

    ``loading`` counts the chunks of all loads that requests wait for and ``holding`` the GPU blocks
    that they fill; both are bounded, but one load is always allowed. ``planned`` are the jobs and
    parts of this step, ``queue`` the loads that are partly planned, ``held`` their chunks.
    """

    def __init__(self, context: PlannerContext, sources: LoadSources) -> None:
        self.loading = self.holding = 0
        self._failed: deque[tuple[str, JobResult]] = deque(maxlen=FAILED_LOADS_MAX)
        self.held = LoadHolds()
        self._sources = sources
        self._context = context
        self._health = context.health
        self._jobs = context.jobs
        self._stats = context.stats
        self._allowance = context.budget.loads
        self.planned: list[LoadJob] = []
        self._waited_for: dict[str, _Load] = {}
        self.queue: deque[_Load] = deque()
        for index in context.indexes.values():
            index.retention.register_load_holds(self.held)

    def take(self) -> tuple[LoadJob, ...]:
        """The jobs and parts planned since the previous call."""
        planned, self.planned = tuple(self.planned), []
        return planned

    def take_failed(self) -> dict[str, JobResult]:
        """The results of the loads that have failed since the last call, by request."""
        failed = dict(self._failed)
        self._failed.clear()
        return failed

    def ended(self, job: Job, now: float) -> None:
        """Finish a load that every rank has answered."""
        answer, tokens = job.answer, job.tokens_by_tier
        failed = answer.failed or bool(answer.bad)
        if job.tokens is not None:
            job.tokens.ended(answer.seconds)
        self._stats.loaded(tokens, failed=failed)
        if failed:
            self._failed.append((job.request, answer))
        slowest = max(tokens, default=CPU)
        # The time is that of the whole load, and is attributed to the tier that provided most of
        # it.
        if slowest != CPU and 2 * tokens[slowest] >= sum(tokens.values()):
            if answer.late:
                self._health[slowest].too_late(tokens[slowest], answer.seconds, now)
            elif not failed:
                before = job.before.get(slowest, 0) if isinstance(job, _Load) else 0
                self._health[slowest].loaded(tokens[slowest], answer.seconds, now, before)
        if self._waited_for.get(job.request) is job:
            self.request_ended(job.request)

    def request_ended(self, request: str) -> None:
        """Record that a request no longer waits for its load, even if the load's job continues. The
        job then holds no GPU blocks, so a read that hangs must not count towards the limits on
        loads from other tiers."""
        load = self._waited_for.pop(request, None)
        if load is not None:
            self.loading -= load.chunks
            self.holding -= load.holds
            for tier in self._health.tiers:
                tier.break_even.reads.end(load.job)
            if load.rest:
                self._cut(load, MISSING_CHUNK)

    def cancel(self, request: str) -> None:
        """Plan no more of this request's load, because no request waits for it any more."""
        load = self._waited_for.get(request)
        if load is not None and load.rest:
            self._cut(load)

    def fail_planned(self) -> None:
        """Fail the loads that are partly planned."""
        for load in list(self.queue):
            self._cut(load, MISSING_CHUNK)

    def forget_all(self) -> None:
        """Forget where all chunks are."""
        self._sources.forget_all()

    def plan(self, request: str, batches: Sequence[ChunkBatch]) -> LoadTokens:
        """Plan to restore these chunks for a request: in one step or, if there are too many, in
        several.

        Chunks in the CPU tier are pinned; chunks of a lower tier are read into a slot of the CPU
        tier, or through a staging buffer where no slot is free. If a chunk is in no tier (a bug of
        the caller), the load fails, so the request is recomputed and never gets wrong bytes.
        Returns the tokens that come from each tier, for the request's outcome.
        """
        load = _Load(
            self._jobs.next_id(),
            JobKind.LOAD,
            request=request,
            chunks=sum(map(len, batches)),
            holds=sum(len(batch.blocks) for batch in batches),
            rest=list(batches),
            read=batches[0].origin.controls.read if batches else None,
        )
        if not self.queue and load.chunks <= min(self._allowance.left, LOAD_PART_MAX):
            self._plan_part(load, load.chunks)
        else:
            load.tokens.set(self._sources.expected(batches, load.read))
            self.held.hold(load.job, batches)
            self._allowance.take(int(load.chunks * ACCEPT_COST_IN_LOADED_CHUNKS))
            self.queue.append(load)
        self._jobs.open(load)
        self.request_ended(request)
        self._waited_for[request] = load
        self.loading += load.chunks
        self.holding += load.holds
        load.before = {
            tier: self._health[tier].break_even.reads.begin(load.job, tokens)
            for tier, tokens in load.tokens.by_tier.items()
            if tier != CPU
        }
        return load.tokens

    def advance(self) -> None:
        """Plan the next parts of the partly planned loads, in turn."""
        errors: list[Exception] = []
        while self.queue and self._allowance.left > 0:
            load = self.queue.popleft()
            try:
                self._plan_part(load, min(self._allowance.left, LOAD_PART_MAX))
            except Exception as error:
                # this request must get an answer, and other loads must not be lost
                self._cut(load, MISSING_CHUNK)
                errors.append(error)
            if load.rest:
                self.queue.append(load)
        if errors:
            raise errors[0]

    def _plan_part(self, load: _Load, chunks_max: int) -> None:
        batches = load.take(chunks_max)
        later = self.held.holds(load.job)
        if not load.rest:
            self.held.release(load.job)
        part = self._sources.take(batches, load.read, later=later)
        if part is None:
            self._allowance.take(chunks_max)
            self._cut(load, MISSING_CHUNK)
            return
        self._allowance.take(part.cost)
        load.fills += part.fills
        load.infos += part.infos
        load.pins += part.pins
        for name, chunks in part.counts.items():
            load.counts[name] = load.counts.get(name, 0) + chunks
        if not load.rest:
            load.tokens.set(self._sources.tokens(load.counts))
            self._stats.planned(load.tokens.by_tier)
        self._send(load, part.columns)

    def _send(self, load: _Load, chunks: Columns) -> None:
        is_last = not load.rest
        self.planned.append(LoadJob(load.job, load.request, chunks, load.parts, is_last))
        load.parts += 1

    def _cut(self, load: _Load, *items: LoadItem) -> None:
        """End the planning of this load with these items. Its tokens are then those planned so
        far."""
        self.held.release(load.job)
        load.rest = []
        load.tokens.set(self._sources.tokens(load.counts))
        if load in self.queue:
            self.queue.remove(load)
        self._send(load, Columns.of(items) if items else NO_CHUNKS)

    def plan_failed(self, request: str) -> None:
        """Report a failed load to a waiting request, which vLLM then recomputes. Does nothing if a
        load of this request was planned in this step: that load reports its own end, and a second
        report would end the engine."""
        planned = {job.request for job in self.planned}
        if request in planned.union(load.request for load in self.queue):
            return
        job = self._jobs.next_id()
        self._jobs.open(Job(job, JobKind.LOAD, request=request))
        self.planned.append(LoadJob(job, request, (MISSING_CHUNK,)))

    def can_load(self, chunks: int, blocks: int, origin: RequestOrigin = UNKNOWN) -> bool:
        """True if the limits on loads in flight allow a load of ``chunks`` into ``blocks`` GPU
        blocks.

        Loads of low priority may use half of the limits. One load is always allowed, however large.
        """
        share, limits = 2 if origin.priority == LOW else 1, self._context.limits
        return not self.loading or (
            share * (self.loading + chunks) <= limits.load_chunks
            and share * (self.holding + blocks) <= limits.load_blocks
        )
