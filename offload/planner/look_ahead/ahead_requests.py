"""The waiting requests for which look-ahead reads: how far each has got, which of them still need
attention, and which have stalled. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from offload.index.chunk_batch import ChunkBatch
from policies.hints import LOW

AHEAD_STALE_S = 60.0
"""If a request has not moved forward in the queue for this time although other requests have left
the queue, the chunks read for it may be evicted."""


@dataclass(slots=True)
class ChunkCursor:
    """A position in the chunks of one request. The chunks before it need no more attention.

    The next chunk is number ``chunk_at`` of batch ``batch_at``. ``behind`` is the tier whose reads
    in flight this chunk waits for, if any.
    """

    batches: Sequence[ChunkBatch]
    batch_at: int = 0
    chunk_at: int = 0
    behind: int | None = None

    @classmethod
    def at_first(
        cls, batches: Sequence[ChunkBatch], is_wanted: Callable[[bytes], bool]
    ) -> ChunkCursor:
        """A cursor at the first wanted chunk of these batches, or at their end."""
        wanted = (
            (batch_at, chunk_at)
            for batch_at, batch in enumerate(batches)
            for chunk_at, key in enumerate(batch.keys)
            if is_wanted(key)
        )
        return cls(batches, *next(wanted, (len(batches), 0)))

    @property
    def is_at_end(self) -> bool:
        """True if no chunk is left."""
        return self.batch_at >= len(self.batches)

    def next(self, chunks_max: int) -> ChunkBatch:
        """The next chunks of one batch, up to ``chunks_max``. Does not move the cursor."""
        batch = self.batches[self.batch_at]
        return batch.part(self.chunk_at, min(len(batch), self.chunk_at + chunks_max))

    def advance(self, chunks: int, behind: int | None = None) -> None:
        """Move on by this number of chunks, at most to the end of the batch. The chunk there waits
        for reads of the tier ``behind``."""
        self.chunk_at += chunks
        self.behind = behind
        if self.chunk_at == len(self.batches[self.batch_at]):
            self.batch_at, self.chunk_at = self.batch_at + 1, 0


@dataclass(slots=True, eq=False)
class AheadRequest:
    """A waiting request, and the progress of the reads for it.

    The request will load ``chunks`` chunks; ``cursor`` moves through the first of them, whose keys
    are ``keys``. ``read`` are the chunks that were read ahead for the request, or are being read;
    ``flying`` counts those that are still being read. ``since`` is the time when the first read
    began; ``None`` while ``read`` is empty.
    """

    request: str
    order: tuple[Any, ...]
    chunks: int
    keys: frozenset[bytes]
    cursor: ChunkCursor
    read: set[bytes] = field(default_factory=set)
    flying: int = 0
    since: float | None = None

    @property
    def is_open(self) -> bool:
        """True if some of the chunks still need attention."""
        return not self.cursor.is_at_end

    @property
    def evicts(self) -> bool:
        """True if reads for this request may evict chunks; for low priority they may not."""
        return self.cursor.batches[0].origin.priority != LOW

    def renew(self, chunks: int, keys: frozenset[bytes], cursor: ChunkCursor) -> None:
        """Replace the chunks that the request will load."""
        self.chunks, self.keys, self.cursor = chunks, keys, cursor

    def add_read(self, keys: Collection[bytes], now: float) -> None:
        """Add chunks that were read for the request, or whose read begins."""
        self.read.update(keys)
        if self.since is None:
            self.since = now

    def discard_read(self, keys: Collection[bytes]) -> None:
        """Remove chunks from those that were read for the request."""
        self.read.difference_update(keys)
        if not self.read:
            self.since = None

    def add_flying(self, chunks: int) -> None:
        """Count chunks whose read has begun or, if negative, has ended."""
        self.flying += chunks


order_of = attrgetter("order")
"""The key by which a queue of requests is sorted: they run in this order."""


def position_in(queue: Sequence[AheadRequest], request: AheadRequest) -> int:
    """The index of a request in a sorted queue."""
    return queue.index(request, bisect_left(queue, request.order, key=order_of))


class OpenRequests:
    """The waiting requests that still need attention.

    There are four kinds: requests that may evict chunks or may not, with prompts of at most
    ``whole_max`` chunks or longer ones. Each kind has a separate list, so that requests of a kind
    that cannot be read now do not hide the others.
    """

    def __init__(self, whole_max: float) -> None:
        self._whole_max = whole_max
        self._kinds: defaultdict[tuple[bool, bool], list[AheadRequest]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def _of_kind(self, request: AheadRequest) -> list[AheadRequest]:
        return self._kinds[request.evicts, request.chunks <= self._whole_max]

    def add(self, request: AheadRequest) -> None:
        """Add a request, at its position in the order."""
        insort(self._of_kind(request), request, key=order_of)

    def remove(self, request: AheadRequest) -> None:
        """Remove a request."""
        requests = self._of_kind(request)
        del requests[position_in(requests, request)]

    def first(self, count: int) -> list[AheadRequest]:
        """The first ``count`` requests of each kind, in the order in which they will run."""
        heads = (requests[:count] for requests in self._kinds.values())
        return sorted(chain.from_iterable(heads), key=order_of)

    def clear(self) -> None:
        """Remove all requests."""
        self._kinds.clear()


class _Sighting(NamedTuple):
    """The position of a request in the queue at the time ``seen``, when ``left`` requests had left
    the queue."""

    position: int
    left: int
    seen: float


class StallWatch:
    """Finds the waiting requests that others overtake. Owned by ``LookAhead``, whose ``queue`` it
    watches; used on the planner's thread.

    While no request leaves the queue, the running requests are slow, but none that waits is
    overtaken.
    """

    def __init__(self, queue: Sequence[AheadRequest]) -> None:
        self._queue = queue
        self._left = 0  # requests that have left the queue
        self._sightings: dict[AheadRequest, _Sighting] = {}  # the last of each, oldest first

    def __len__(self) -> int:
        """The number of requests that are watched."""
        return len(self._sightings)

    def watch(self, request: AheadRequest, now: float) -> None:
        """Watch this request from now on."""
        position = position_in(self._queue, request)
        self._sightings[request] = _Sighting(position, self._left, now)

    def forget(self, request: AheadRequest) -> None:
        """Watch this request no more."""
        self._sightings.pop(request, None)

    def left_queue(self, request: AheadRequest) -> None:
        """Record that a request has left the queue."""
        self._left += 1
        self.forget(request)

    def find(self, now: float) -> AheadRequest | None:
        """A request that has stalled, if there is one: it has not moved forward for
        ``AHEAD_STALE_S``, although others have left the queue."""
        while self._sightings:
            request, last = next(iter(self._sightings.items()))
            if now - last.seen <= AHEAD_STALE_S:
                return None
            position = position_in(self._queue, request)
            if position >= last.position and self._left > last.left:
                return request
            del self._sightings[request]  # to add it at the end
            self.watch(request, now)
        return None

    def clear(self) -> None:
        """Watch no request any more."""
        self._sightings.clear()
