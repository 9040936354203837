"""Look-ahead: reads chunks of lower tiers into the CPU tier while their requests wait.

Requests enter with the chunks that they will load, as soon as these are known, and leave when their
load is planned or they have ended. Chunks are read in the order in which requests will run, bounded
by a share of the CPU tier, by the reads in flight and by the step's budget. Chunks that were read
for a waiting request are not evicted until that request leaves or makes no progress. Chunks that
the next requests will load are evicted last, whatever the policy says; reads ahead never evict
them. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from operator import not_
from typing import Any

from offload.index.chunk_batch import ChunkBatch
from offload.index.retention import Evict
from offload.layout.keys import CPU, group_of
from offload.messages.plan import LoadItem, LoadJob
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind
from offload.planner.load_sources import LoadSources
from offload.planner.look_ahead.ahead_requests import (
    AheadRequest,
    ChunkCursor,
    OpenRequests,
    StallWatch,
    order_of,
    position_in,
)
from offload.planner.look_ahead.ahead_use import (
    NOT_READ_AHEAD,
    AheadCounts,
    AheadUse,
    HeldChunks,
    ReadProgress,
)
from offload.planner.look_ahead.wanted_soon import WantedSoon
from offload.planner.step_budget import (
    AHEAD_OPEN_REQUESTS_MAX,
    EVICT_COST,
    LEFT_BY_AHEAD_SHARE,
)

AHEAD_BATCH = 16
"""Number of chunks of one job: as many as a worker reads at a time."""
AHEAD_FLYING_MAX = 64
"""Maximum number of chunks being read ahead from one tier. Each tier has this limit, so that a tier
that hangs does not stop reads of the others."""
AHEAD_RETRY_STEPS = 8
"""When no chunk can be evicted for a read ahead, the next attempt is made after this many steps, or
when a job has ended: each attempt examines every chunk that cannot be evicted."""
NEAR_END_SHARE = 1 / 8
"""A request counts as read when at most this share of its chunks is still being read. Its load then
waits for the rest."""


class _ReadsInFlight:
    """The reads ahead that workers have not ended. Owned by ``LookAhead``.

    ``chunks`` counts their chunks by tier.
    """

    def __init__(self, tiers: int) -> None:
        self.chunks = [0] * tiers
        self._requests: dict[int, AheadRequest] = {}  # by job

    def requests(self) -> set[AheadRequest]:
        """The requests for which something is being read."""
        return set(self._requests.values())

    def left(self, tier: int) -> int:
        """The number of chunks whose reads from this tier may begin now."""
        return AHEAD_FLYING_MAX - self.chunks[tier]

    def begin(self, job: int, tier: int, chunks: int, request: AheadRequest) -> None:
        """Count chunks that this job reads for a request."""
        self.chunks[tier] += chunks
        self._requests[job] = request
        request.add_flying(chunks)

    def end(self, job: int, tier: int, chunks: int) -> None:
        """Count the chunks of a job that every rank has answered."""
        self.chunks[tier] -= chunks
        self._requests.pop(job).add_flying(-chunks)


class LookAhead:
    """Reads ahead for waiting requests. Owned by the planner; used on its thread.

    ``share`` of the CPU tier may hold chunks that were read ahead and not used yet, but at most
    half of what clients have not pinned; 0 turns reading ahead off. ``queue`` has the waiting
    requests in the order in which they will run. ``planned`` are the jobs that have not been sent
    yet. ``reads_begun`` is the number of jobs planned so far: while it grows, there is progress.
    ``counts`` says how many chunks were read, and how many of them were used.
    """

    def __init__(self, context: PlannerContext, sources: LoadSources, share: float) -> None:
        self.queue: list[AheadRequest] = []
        self.planned: list[LoadJob] = []
        self.reads_begun = 0
        self.counts = AheadCounts(context.groups, context.ranks)
        self._context = context
        self._cpu = context.cpu
        self._sources = sources
        self._share = share
        self._requests: dict[str, AheadRequest] = {}
        self._open = OpenRequests(share * context.cpu.space.capacity)
        self._watch = StallWatch(self.queue)
        self._held = HeldChunks(self.queue, self._watch, self.counts)
        self._wanted = WantedSoon(self.queue, context.cpu)
        self._in_flight = _ReadsInFlight(len(context.lower))
        # set when nothing could be evicted: the jobs that had ended by then, and the steps since
        self._full: tuple[int, int] | None = None
        self._now = 0.0
        context.cpu.retention.register_ahead(self._held.owners, self._wanted.keys)

    @property
    def is_on(self) -> bool:
        """True if chunks are read ahead at all."""
        return self._share > 0 and bool(self._context.lower)

    # -- requests ----------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """True if some chunk is being read ahead."""
        return any(self._in_flight.chunks)

    def is_reading_from(self, tier: int) -> bool:
        """True if some chunk of this lower tier is being read ahead."""
        return self._in_flight.chunks[tier] > 0

    def others_unread(self, request: str) -> int:
        """The number of other waiting requests whose chunks are not all read."""
        waiting = self._requests.get(request)
        unread = self._in_flight.requests()
        unread = {one for one in unread if self._requests.get(one.request) is one}
        closed = {one for one in unread if not one.is_open}
        is_counted = waiting is not None and (waiting.is_open or waiting in closed)
        return len(self._open) + len(closed) - is_counted

    def batches(self, request: str) -> Sequence[ChunkBatch]:
        """The chunks that a waiting request will load; none if it is not known."""
        waiting = self._requests.get(request)
        return () if waiting is None else waiting.cursor.batches

    def has_read(self, request: str) -> bool:
        """True if chunks were read for a waiting request, or are being read."""
        waiting = self._requests.get(request)
        return waiting is not None and bool(waiting.read)

    def progress(self, request: str) -> ReadProgress | None:
        """The state of a waiting request's reads; ``None`` if the request is not known."""
        waiting = self._requests.get(request)
        if waiting is None:
            return None
        is_read = not waiting.is_open and waiting.flying <= NEAR_END_SHARE * len(waiting.read)
        return ReadProgress(is_read, waiting.since)

    def enter(self, request: str, order: tuple[Any, ...], batches: Sequence[ChunkBatch]) -> None:
        """Add a waiting request that will load these chunks (without blocks, in prefix order), or
        examine the chunks of a known request again. Requests run in the order of ``order``, which
        never changes for a request. Of a very long prompt, only the head is read ahead."""
        with self._forgets_all_on_error():
            if batches or request in self._requests:
                self._enter(request, order, batches)

    def _enter(self, request: str, order: tuple[Any, ...], batches: Sequence[ChunkBatch]) -> None:
        chunks = sum(map(len, batches))
        chunks_max = max(1, self._wanted.chunks_max // max(1, len(batches)))
        batches = [batch.part(0, chunks_max) for batch in batches]
        keys = frozenset(chain.from_iterable(batch.keys for batch in batches))
        waiting = self._requests.get(request)
        if waiting is not None:
            self._renew(waiting, batches, keys, chunks)
        else:
            waiting = AheadRequest(request, order, chunks, keys, ChunkCursor(batches))
            self._requests[request] = waiting
            insort(self.queue, waiting, key=order_of)
            self._open.add(waiting)
            self._wanted.enter(position_in(self.queue, waiting), keys)

    def _renew(
        self,
        waiting: AheadRequest,
        batches: Sequence[ChunkBatch],
        keys: frozenset[bytes],
        chunks: int,
    ) -> None:
        """Replace a request's chunks, and examine them from the first one that the CPU tier does
        not hold."""
        if waiting.is_open:
            self._open.remove(waiting)
        old = waiting.keys
        waiting.renew(chunks, keys, ChunkCursor.at_first(batches, self._cpu.is_absent))
        self._wanted.replace(position_in(self.queue, waiting), old, keys)
        if waiting.is_open:
            self._open.add(waiting)
        self._held.keep(waiting, keys, self._now)

    def leave(self, request: str, load: Sequence[ChunkBatch] = ()) -> AheadUse:
        """Remove a request that no longer waits: this ``load`` was planned for it, or it computes
        everything, or it has ended. Returns how its reads ahead were used."""
        waiting = self._requests.pop(request, None)
        use = NOT_READ_AHEAD
        if waiting is not None:
            with self._forgets_all_on_error():
                use = self._leave(waiting, load)
        wasted = self.counts.take_wasted(request)
        return replace(use, wasted_tokens=wasted) if wasted else use

    def _leave(self, waiting: AheadRequest, load: Sequence[ChunkBatch] = ()) -> AheadUse:
        position = position_in(self.queue, waiting)
        del self.queue[position]
        self._watch.left_queue(waiting)
        if waiting.is_open:
            self._open.remove(waiting)
        self._wanted.leave(position, waiting.keys)
        keys = chain.from_iterable(batch.keys for batch in load)
        return self._held.use(waiting, keys, self._sources.promoting, self._now)

    # -- a step ------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Read further chunks for the requests that run first, as far as the limits allow."""
        self._now = now
        with self._forgets_all_on_error():
            while (stalled := self._watch.find(now)) is not None:
                self._leave(self._requests.pop(stalled.request))
            if self._open and self._may_have_space():
                self._read_on()

    @contextmanager
    def _forgets_all_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.forget_all()  # the next step must not fail again
            self.counts.forget()  # the request may have left
            raise

    def _may_have_space(self) -> bool:
        if self._full is not None:
            ended, steps = self._full
            if ended == self._context.jobs.ended and steps < AHEAD_RETRY_STEPS:
                self._full = (ended, steps + 1)
                return False
            self._full = None
        return True

    def _read_on(self) -> None:
        budget, health = self._context.budget, self._context.health
        readable, working, ahead = health.readable_tiers(), health.ahead_tiers(), budget.ahead
        held_max, has_free = self._held_max, True  # has_free: there is space without an eviction
        for waiting in self._open.first(AHEAD_OPEN_REQUESTS_MAX):
            # From a tier that is slower than computing, reading only a part of a prompt costs more
            # time than it saves.
            tiers = working if waiting.chunks <= held_max else readable
            while (
                waiting.is_open and (has_free or waiting.evicts) and self._may_read(waiting, tiers)
            ):
                if (
                    ahead.left <= 0
                    or self._chunks_left <= 0
                    or budget.above(LEFT_BY_AHEAD_SHARE) <= 0
                ):
                    return
                looked, is_full = self._look(waiting, tiers, min(ahead.left, AHEAD_BATCH))
                ahead.take(looked)
                if is_full and not waiting.evicts:
                    has_free = False
                elif is_full:
                    self._full = (self._context.jobs.ended, 0)
                    return

    @property
    def _held_max(self) -> int:
        """The maximum number of chunks that were read ahead and not used yet."""
        capacity = self._cpu.space.capacity
        return int(min(self._share * capacity, (capacity - self._cpu.retention.client_pinned) / 2))

    @property
    def _chunks_left(self) -> int:
        """The number of chunks for which the share of the CPU tier has space."""
        return self._held_max - len(self._held)

    def _may_read(self, waiting: AheadRequest, tiers: Sequence[int]) -> bool:
        """True if reads of the tier with the request's next chunk may begin now."""
        behind = waiting.cursor.behind
        if behind is not None and behind in tiers:
            return self._in_flight.left(behind) > 0
        return any(self._in_flight.left(tier) > 0 for tier in tiers)

    def _look(
        self, waiting: AheadRequest, tiers: Sequence[int], chunks_max: int
    ) -> tuple[int, bool]:
        """Examine the next chunks of a request and read those that only lower ``tiers`` hold.
        Returns how many were examined, and whether the CPU tier has no space for more."""
        part = waiting.cursor.next(chunks_max)
        missing = part.chosen(list(map(self._cpu.is_absent, part.keys)))
        left = missing.part(0, max(0, self._chunks_left))
        # examined again later; the value is the tier whose reads in flight they wait for, if any
        rest: dict[bytes, int | None] = dict.fromkeys(missing.keys[len(left) :])
        read, is_full = part.origin.controls.read, False
        for tier in tiers:
            if read is not None and tier not in read:
                continue
            held = self._context.lower[tier].resident
            flags = list(map(held.__contains__, left.keys))
            mine, left = left.chosen(flags), left.chosen(list(map(not_, flags)))
            now = mine.part(0, self._in_flight.left(tier))
            count = self._read(waiting, tier, now) if now else 0
            if count < len(now):
                rest |= dict.fromkeys([*mine.keys[count:], *left.keys])  # other tiers may hold some
                is_full = True
                break
            rest |= dict.fromkeys(mine.keys[count:], tier)
        stop = next(filter(rest.__contains__, part.keys), None)
        if stop is None:
            waiting.cursor.advance(len(part))
        else:
            waiting.cursor.advance(part.keys.index(stop), behind=rest[stop])
        if not waiting.is_open:
            self._open.remove(waiting)
        return len(part), is_full

    def _read(self, waiting: AheadRequest, tier: int, chunks: ChunkBatch) -> int:
        """Plan to read these chunks into the CPU tier, as far as there is space; returns how
        many."""
        context = self._context
        infos = context.groups[chunks.group].entries(chunks, 1)
        evict = self._cpu.unwritten.evict_for_reads if waiting.evicts else Evict.NOTHING
        grant = self._cpu.reserve(chunks.keys, infos, evict, protect=self._wanted.keys)
        if grant.evicted:
            context.stats.evicted(CPU, grant.evicted)
            context.budget.spend(EVICT_COST * len(grant.evicted))
        keys = chunks.keys[: len(grant.locations)]
        if not keys:
            return 0
        job = context.jobs.next_id()
        context.lower[tier].pin(keys)
        pins, infos = ((tier, keys),), infos[: len(keys)]
        context.jobs.open(Job(job, JobKind.AHEAD, fills=keys, pins=pins, infos=infos))
        self._sources.begin_promotion(keys, repeat(tier))
        rows = zip(keys, grant.locations, strict=True)
        items = [LoadItem(key, chunks.group, (), slot, tier) for key, slot in rows]
        self.planned.append(LoadJob(job, "", items, is_ahead=True))
        self.reads_begun += 1
        if not self._held.owners.keys().isdisjoint(keys):
            self._held.lose(keys)
        self._held.hold(keys, waiting, self._now)
        self._in_flight.begin(job, tier, len(keys), waiting)
        self.counts.read(keys)
        return len(keys)

    def take(self) -> tuple[LoadJob, ...]:
        """The jobs planned since the previous call."""
        taken, self.planned = tuple(self.planned), []
        return taken

    def ended(self, job: Job) -> None:
        """Finish a read ahead that every rank has answered."""
        ((tier, keys),) = job.pins
        self._in_flight.end(job.job, tier, len(keys))
        tokens = len(keys) * self._context.groups[group_of(keys[0])].chunk_tokens
        if job.answer.late:
            self._context.health[tier].too_late(tokens, job.answer.seconds, self._now)
        good, bad = job.verdict()
        if not bad:
            self._context.health[tier].break_even.ahead_rate.observe(tokens, job.answer.seconds)
        self._held.lose(bad)
        waited_for = list(filter(self._held.owners.__contains__, good))
        self.counts.arrived(waited_for, job.answer.seconds / len(job.fills))

    def forget_all(self) -> None:
        """Forget all chunks and requests."""
        for part in (self._held, self._watch, self._wanted, self._open):
            part.clear()
        self._requests.clear()
        self.queue.clear()
        self._full = None
