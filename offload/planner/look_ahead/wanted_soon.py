"""The chunks that the next requests of the queue will load: they are evicted last. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from offload.index.tier_index import TierIndex
from offload.planner.look_ahead.ahead_requests import AheadRequest
from offload.planner.step_budget import AHEAD_WANTED_REQUESTS_MAX

WANTED_SHARE = 0.5
"""Maximum share of the CPU tier that wanted chunks, which are evicted last, may take."""
WANTED_CHUNKS_MAX = 2000
"""Maximum number of wanted chunks, and of chunks of one request that are read ahead. An eviction
may have to test all of them: with 4,096 a step took up to 2.7 ms, with 16,384 up to 4 ms."""


class WantedSoon:
    """The chunks of the first requests in ``queue``, as many as the limit allows. Owned by
    ``LookAhead``, whose queue it is; used on the planner's thread.

    ``keys`` has the wanted chunks, each with the number of requests that want it. The retention of
    the CPU tier reads this counter. A ``position`` is a request's index in ``queue``.
    """

    def __init__(self, queue: Sequence[AheadRequest], cpu: TierIndex) -> None:
        self.keys: Counter[bytes] = Counter()
        self._requests = 0  # number of requests, from the first on, whose chunks are wanted
        self._queue = queue
        self._cpu = cpu

    @property
    def chunks_max(self) -> int:
        """The maximum number of wanted chunks."""
        return min(WANTED_CHUNKS_MAX, int(self._cpu.space.capacity * WANTED_SHARE))

    def enter(self, position: int, keys: frozenset[bytes]) -> None:
        """Record that a request with these chunks has entered the queue at this position."""
        if position < self._requests:
            self.keys.update(keys)
            self._requests += 1
        self._limit()

    def replace(self, position: int, old: frozenset[bytes], new: frozenset[bytes]) -> None:
        """Record that the chunks of the request at this position have changed."""
        if position < self._requests:
            self._forget(old)
            self.keys.update(new)
        self._limit()

    def leave(self, position: int, keys: frozenset[bytes]) -> None:
        """Record that the request with these chunks has left the queue, at this position."""
        if position < self._requests:
            self._requests -= 1
            self._forget(keys)
            self._limit()

    def clear(self) -> None:
        """Forget all chunks: the queue is empty."""
        self.keys.clear()
        self._requests = 0

    def _limit(self) -> None:
        """Forget the chunks of the last requests while there are too many; then add those of the
        next requests, as far as the limit allows."""
        while len(self.keys) > self.chunks_max:
            self._requests -= 1
            self._forget(self._queue[self._requests].keys)
        for request in self._queue[self._requests : self._requests + AHEAD_WANTED_REQUESTS_MAX]:
            if len(self.keys) + len(request.keys) > self.chunks_max:
                break
            self.keys.update(request.keys)
            self._requests += 1

    def _forget(self, keys: frozenset[bytes]) -> None:
        counts = list(map(self.keys.pop, keys, repeat(1)))
        if counts.count(1) < len(counts):  # other requests want some of them, too
            rest = zip(keys, counts, strict=True)
            self.keys.update({key: count - 1 for key, count in rest if count > 1})
