"""Look-ahead: reads chunks of lower tiers into the CPU tier while their requests wait.

Requests enter with the chunks that they will load, as soon as these are known, and leave when their
load is planned or they have ended. Chunks are read in the order in which requests will run, bounded
by a share of the CPU tier, by the reads in flight and by the step's budget. Chunks that were read
for a waiting request are not evicted until that request leaves or makes no progress. Chunks that
the next requests will load are evicted last, whatever the policy says; reads ahead never evict
them. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, not_
from typing import Any

from offload.index.chunk_batch import ChunkBatch
from offload.index.retention import Evict
from offload.layout.keys import CPU, group_of
from offload.messages.plan import LoadItem, LoadJob
from offload.planner.ahead_use import NOT_READ_AHEAD, AheadCounts, AheadUse, ReadProgress
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind
from offload.planner.load_sources import LoadSources
from offload.planner.step_budget import (
    AHEAD_HEIRS_MAX,
    AHEAD_LEAVES,
    AHEAD_OPEN_REQUESTS_MAX,
    AHEAD_REQUEST_CHUNKS_MAX,
    EVICT_COST,
)
from offload.planner.wanted_soon import WantedSoon
from policies.hints import LOW

AHEAD_BATCH = 16
"""Number of chunks of one job: as many as a worker reads at a time."""
AHEAD_FLYING_MAX = 64
"""Maximum number of chunks being read ahead from one tier. Each tier has this limit, so that a tier
that hangs does not stop reads of the others."""
AHEAD_STALE_S = 60.0
"""If a request has not moved forward in the queue for this time although other requests have left
the queue, the chunks read for it may be evicted."""
AHEAD_RETRY_STEPS = 8
"""When no chunk can be evicted for a read ahead, the next attempt is made after this many steps, or
when a job has ended: each attempt examines every chunk that cannot be evicted."""
NEAR_END_SHARE = 1 / 8
"""A request counts as read when at most this share of its chunks is still being read. Its load then
waits for the rest."""


@dataclass(slots=True, eq=False)
class _AheadRequest:
    """A waiting request, and the progress of the reads for it.

    The request will load ``chunks`` chunks; ``batches`` may have only the first of them. The
    batches before ``batch_at``, and in this batch the chunks before ``chunk_at``, need no more
    attention. ``behind`` is the tier whose reads in flight the next chunk waits for, if any.
    ``read`` are the chunks that were read ahead for the request; ``flying`` counts those that are
    still being read. Once the first read has begun, ``position`` is the request's position in the
    queue at the time ``seen``, when ``left`` requests had left the queue.
    """

    request: str
    order: tuple[Any, ...]
    batches: Sequence[ChunkBatch]
    keys: frozenset[bytes]
    chunks: int
    batch_at: int = 0
    chunk_at: int = 0
    behind: int | None = None
    flying: int = 0
    read: set[bytes] = field(default_factory=set)
    position: int = 0
    left: int = 0
    seen: float = 0.0

    @property
    def is_open(self) -> bool:
        """True if some of the chunks still need attention."""
        return self.batch_at < len(self.batches)

    @property
    def evicts(self) -> bool:
        """True if reads for this request may evict chunks; for low priority they may not."""
        return self.batches[0].origin.priority != LOW


_order_of = attrgetter("order")


def _position(requests: Sequence[_AheadRequest], waiting: _AheadRequest) -> int:
    return requests.index(waiting, bisect_left(requests, waiting.order, key=_order_of))


class _OpenRequests:
    """The waiting requests that still need attention.

    There are four kinds: requests that may evict chunks or may not, with prompts of at most
    ``whole_max`` chunks or longer ones. Each kind has a separate list, so that requests of a kind
    that cannot be read now do not hide the others.
    """

    def __init__(self, whole_max: float) -> None:
        self._whole_max = whole_max
        self._kinds: defaultdict[tuple[bool, bool], list[_AheadRequest]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def _of_kind(self, waiting: _AheadRequest) -> list[_AheadRequest]:
        return self._kinds[waiting.evicts, waiting.chunks <= self._whole_max]

    def add(self, waiting: _AheadRequest) -> None:
        insort(self._of_kind(waiting), waiting, key=_order_of)

    def remove(self, waiting: _AheadRequest) -> None:
        requests = self._of_kind(waiting)
        del requests[_position(requests, waiting)]

    def first(self, count: int) -> list[_AheadRequest]:
        """The first ``count`` requests of each kind, in the order in which they will run."""
        heads = (requests[:count] for requests in self._kinds.values())
        return sorted(chain.from_iterable(heads), key=_order_of)

    def clear(self) -> None:
        self._kinds.clear()


class LookAhead:
    """Reads ahead for waiting requests. Owned by the planner; used on its thread.

    ``share`` of the CPU tier may hold chunks that were read ahead and not used yet, but at most
    half of what clients have not pinned; 0 turns reading ahead off. ``queue`` has the waiting
    requests in the order in which they will run. ``planned`` are the jobs that have not been sent
    yet. ``reads_begun`` is the number of jobs planned so far: while it grows, there is progress.
    ``counts`` says how many chunks were read, and how many of them were used.
    """

    def __init__(self, context: PlannerContext, sources: LoadSources, share: float) -> None:
        self.queue: list[_AheadRequest] = []
        self.planned: list[LoadJob] = []
        self.reads_begun = 0
        self.counts = AheadCounts(context.groups, context.ranks)
        self._context = context
        self._cpu = context.cpu
        self._sources = sources
        self._share = share
        self._requests: dict[str, _AheadRequest] = {}
        self._open = _OpenRequests(share * context.cpu.space.capacity)
        # when the first read for each request began; in the order of ``seen``
        self._since: dict[_AheadRequest, float] = {}
        # the chunks read ahead and not used yet, with the request that waits for each
        self._held: dict[bytes, _AheadRequest] = {}
        self._wanted = WantedSoon(self.queue, context.cpu)
        self._flying = [0] * len(context.lower)  # chunks that are being read, by tier
        self._left = 0  # requests that have left the queue
        self._flights: dict[int, _AheadRequest] = {}  # by job: the request for which it reads
        # set when nothing could be evicted: the jobs that had ended by then, and the steps since
        self._full: tuple[int, int] | None = None
        self._now = 0.0
        context.cpu.retention.register_ahead(self._held, self._wanted.keys)

    @property
    def is_on(self) -> bool:
        """True if chunks are read ahead at all."""
        return self._share > 0 and bool(self._context.lower)

    # -- requests ----------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """True if some chunk is being read ahead."""
        return any(self._flying)

    def is_reading_from(self, tier: int) -> bool:
        """True if some chunk of this lower tier is being read ahead."""
        return self._flying[tier] > 0

    def others_unread(self, request: str) -> int:
        """The number of other waiting requests whose chunks are not all read."""
        waiting = self._requests.get(request)
        unread = {one for one in self._flights.values() if self._requests.get(one.request) is one}
        closed = {one for one in unread if not one.is_open}
        is_counted = waiting is not None and (waiting.is_open or waiting in closed)
        return len(self._open) + len(closed) - is_counted

    def batches(self, request: str) -> Sequence[ChunkBatch]:
        """The chunks that a waiting request will load; none if it is not known."""
        waiting = self._requests.get(request)
        return () if waiting is None else waiting.batches

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
        return ReadProgress(is_read, self._since.get(waiting))

    def enter(self, request: str, order: tuple[Any, ...], batches: Sequence[ChunkBatch]) -> None:
        """Add a waiting request that will load these chunks (without blocks, in prefix order), or
        examine the chunks of a known request again. Requests run in the order of ``order``, which
        never changes for a request. Of a very long prompt, only the head is read ahead."""
        with self._forgets_all_on_error():
            if batches or request in self._requests:
                self._enter(request, order, batches)

    def _enter(self, request: str, order: tuple[Any, ...], batches: Sequence[ChunkBatch]) -> None:
        chunks = sum(map(len, batches))
        chunks_max = min(AHEAD_REQUEST_CHUNKS_MAX, self._wanted.chunks_max)
        chunks_max = max(1, chunks_max // max(1, len(batches)))
        batches = [batch.part(0, chunks_max) for batch in batches]
        keys = frozenset(chain.from_iterable(batch.keys for batch in batches))
        waiting = self._requests.get(request)
        if waiting is not None:
            self._renew(waiting, batches, keys, chunks)
        else:
            waiting = self._requests[request] = _AheadRequest(request, order, batches, keys, chunks)
            insort(self.queue, waiting, key=_order_of)
            self._open.add(waiting)
            self._wanted.enter(_position(self.queue, waiting), keys)

    def _renew(
        self,
        waiting: _AheadRequest,
        batches: Sequence[ChunkBatch],
        keys: frozenset[bytes],
        chunks: int,
    ) -> None:
        """Replace a request's chunks, and examine them from the first one that the CPU tier does
        not hold."""
        old, waiting.keys = waiting.keys, keys
        self._wanted.replace(_position(self.queue, waiting), old, keys)
        if waiting.is_open:
            self._open.remove(waiting)
        missing = (
            (batch_at, chunk_at)
            for batch_at, batch in enumerate(batches)
            for chunk_at, key in enumerate(batch.keys)
            if self._cpu.is_absent(key)
        )
        waiting.batches, waiting.chunks, waiting.behind = batches, chunks, None
        waiting.batch_at, waiting.chunk_at = next(missing, (len(batches), 0))
        if waiting.is_open:
            self._open.add(waiting)
        gone = waiting.read - keys
        waiting.read -= gone
        self._release(waiting, gone)
        if not waiting.read:
            self._since.pop(waiting, None)

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

    def _leave(self, waiting: _AheadRequest, load: Sequence[ChunkBatch] = ()) -> AheadUse:
        position = _position(self.queue, waiting)
        del self.queue[position]
        self._left += 1
        if waiting.is_open:
            self._open.remove(waiting)
        self._wanted.leave(position, waiting.keys)
        self._since.pop(waiting, None)
        used = waiting.read.intersection(chain.from_iterable(batch.keys for batch in load))
        late = used & self._sources.promoting.keys()
        for key in used:
            del self._held[key]
        use = self.counts.used(used, late)
        self._release(waiting, waiting.read - used)
        return use

    def _release(self, waiting: _AheadRequest, rest: Collection[bytes]) -> None:
        """Allow the eviction of chunks that were read for a request that does not use them, unless
        one of the next requests wants them."""
        for heir in self.queue[:AHEAD_HEIRS_MAX] if rest else ():
            mine = heir.keys.intersection(rest)
            if mine:
                self._hold(mine, heir)
                rest = frozenset(rest) - mine
        for key in rest:
            del self._held[key]
        self.counts.wasted(dict.fromkeys(rest, waiting.request))

    def _hold(self, keys: Collection[bytes], waiting: _AheadRequest) -> None:
        self._held.update(dict.fromkeys(keys, waiting))
        waiting.read.update(keys)
        if waiting not in self._since:
            self._since[waiting] = self._now
            self._see(waiting, _position(self.queue, waiting))

    # -- a step ------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Read further chunks for the requests that run first, as far as the limits allow."""
        self._now = now
        with self._forgets_all_on_error():
            self._give_up_late()
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

    def _see(self, waiting: _AheadRequest, position: int) -> None:
        waiting.position, waiting.left, waiting.seen = position, self._left, self._now

    def _give_up_late(self) -> None:
        """Give up what was read for requests that others overtake. While no request leaves the
        queue, the running ones take their time, and nobody is overtaken."""
        while self._since:
            waiting = next(iter(self._since))
            if self._now - waiting.seen <= AHEAD_STALE_S:
                return
            position = _position(self.queue, waiting)
            if position >= waiting.position and self._left > waiting.left:
                self._leave(self._requests.pop(waiting.request))
                continue
            self._see(waiting, position)
            self._since[waiting] = self._since.pop(waiting)  # move it to the end of ``_since``

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
                if ahead.left <= 0 or self._chunks_left <= 0 or budget.above(AHEAD_LEAVES) <= 0:
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

    def _may_read(self, waiting: _AheadRequest, tiers: Sequence[int]) -> bool:
        """True if reads of the tier with the request's next chunk may begin now."""
        behind = waiting.behind
        if behind is not None and behind in tiers:
            return self._flying[behind] < AHEAD_FLYING_MAX
        return any(self._flying[tier] < AHEAD_FLYING_MAX for tier in tiers)

    def _look(
        self, waiting: _AheadRequest, tiers: Sequence[int], chunks_max: int
    ) -> tuple[int, bool]:
        """Examine the next chunks of a request and read those that only lower ``tiers`` hold.
        Returns how many were examined, and whether the CPU tier has no space for more."""
        batch = waiting.batches[waiting.batch_at]
        part = batch.part(waiting.chunk_at, min(len(batch), waiting.chunk_at + chunks_max))
        missing = part.chosen(list(map(self._cpu.is_absent, part.keys)))
        left = missing.part(0, max(0, self._chunks_left))
        # examined again later; the value is the tier whose reads in flight they wait for, if any
        rest: dict[bytes, int | None] = dict.fromkeys(missing.keys[len(left) :])
        read, is_full = batch.origin.controls.read, False
        for tier in tiers:
            if read is not None and tier not in read:
                continue
            held = self._context.lower[tier].resident
            flags = list(map(held.__contains__, left.keys))
            mine, left = left.chosen(flags), left.chosen(list(map(not_, flags)))
            now = mine.part(0, AHEAD_FLYING_MAX - self._flying[tier])
            count = self._read(waiting, tier, now) if now else 0
            if count < len(now):
                rest |= dict.fromkeys([*mine.keys[count:], *left.keys])  # other tiers may hold some
                is_full = True
                break
            rest |= dict.fromkeys(mine.keys[count:], tier)
        stop = next(filter(rest.__contains__, part.keys), None)
        waiting.behind = None if stop is None else rest[stop]
        waiting.chunk_at += len(part) if stop is None else part.keys.index(stop)
        if waiting.chunk_at == len(batch):
            waiting.batch_at, waiting.chunk_at = waiting.batch_at + 1, 0
        if not waiting.is_open:
            self._open.remove(waiting)
        return len(part), is_full

    def _read(self, waiting: _AheadRequest, tier: int, chunks: ChunkBatch) -> int:
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
        self._sources.begin_promotion(keys, job)
        rows = zip(keys, grant.locations, strict=True)
        items = [LoadItem(key, chunks.group, (), slot, tier) for key, slot in rows]
        self.planned.append(LoadJob(job, "", items, is_ahead=True))
        self.reads_begun += 1
        if not self._held.keys().isdisjoint(keys):
            self._lost(keys)
        self._hold(keys, waiting)
        self._flying[tier] += len(keys)
        waiting.flying += len(keys)
        self._flights[job] = waiting
        self.counts.read(keys)
        return len(keys)

    def take(self) -> tuple[LoadJob, ...]:
        """The jobs planned since the previous call."""
        taken, self.planned = tuple(self.planned), []
        return taken

    def ended(self, job: Job) -> None:
        """Finish a read ahead that every rank has answered."""
        ((tier, keys),) = job.pins
        self._flying[tier] -= len(job.fills)
        self._flights.pop(job.job).flying -= len(job.fills)
        tokens = len(keys) * self._context.groups[group_of(keys[0])].chunk_tokens
        if job.answer.late:
            self._context.health[tier].too_late(tokens, job.answer.seconds, self._now)
        good, bad = job.verdict()
        if not bad:
            self._context.health[tier].break_even.ahead_rate.observe(tokens, job.answer.seconds)
        self._lost(bad)
        waited_for = list(filter(self._held.__contains__, good))
        self.counts.arrived(waited_for, job.answer.seconds / len(job.fills))

    def _lost(self, keys: Iterable[bytes]) -> None:
        """Stop holding chunks that could not be read, or that were dropped after their read: the
        CPU tier does not have them."""
        lost = {}
        for key in keys:
            waiting = self._held.pop(key, None)
            if waiting is not None:
                waiting.read.discard(key)
                lost[key] = waiting.request
                if not waiting.read:
                    self._since.pop(waiting, None)
        self.counts.wasted(lost)

    def forget_all(self) -> None:
        """Forget all chunks and requests."""
        self.counts.wasted({key: waiting.request for key, waiting in self._held.items()})
        for state in (self.queue, self._requests, self._open, self._since, self._held):
            state.clear()
        self._wanted.clear()
        self._full = None
