"""Shadow caches: what the tier would hold under another order, span by span, without keys.

They cost a few steps per request, not per key, and tell the adaptive policy which of its orders
does better on the very requests it serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from policies.density import Kind
from policies.spans import Span


class AgeQueue:
    """Spans in the order of their last use: LRU."""

    def __init__(self) -> None:
        self._spans: OrderedDict[Span, None] = OrderedDict()

    def add(self, span: Span) -> None:
        """Enter a span as the youngest."""
        self._spans[span] = None

    def discard(self, span: Span) -> None:
        """Take a span out, if it is there."""
        self._spans.pop(span, None)

    def expel(self, span: Span) -> None:
        """Treat a span as the oldest, if it is there."""
        if span in self._spans:
            self._spans.move_to_end(span, last=False)

    def lowest(self) -> Span | None:
        """The oldest span."""
        return next(iter(self._spans), None)


class SpanQueues:
    """Spans by ``sort``, oldest first, and the order of their ends by a score.

    The span of lowest score in a queue is taken to be its oldest or its youngest: a score
    falls with age where spans die out, and rises where they come back after a pause.
    """

    def __init__(self, score: Callable[[Span], float]) -> None:
        self._score = score
        self._queues: dict[Kind, OrderedDict[Span, None]] = {}
        self._heap: list[tuple[float, int, Span, Kind]] = []
        self._ticket = count()

    def add(self, span: Span) -> None:
        """Enter a span as the youngest of its sort."""
        queue = self._queues.get(span.sort)
        if queue is None:
            queue = self._queues[span.sort] = OrderedDict()
        queue[span] = None
        if len(queue) == 1:
            heappush(self._heap, self._entry(span.sort, queue))

    def discard(self, span: Span) -> None:
        """Take a span out, if it is there."""
        queue = self._queues.get(span.sort)
        if queue is not None:
            queue.pop(span, None)

    def lowest(self) -> Span | None:
        """A span of lowest score among the ends of all queues, by scores as of ``refresh``."""
        heap = self._heap
        while heap:
            _, _, span, kind = heap[0]
            queue = self._queues[kind]
            if span in queue:
                return span
            if queue:
                heapreplace(heap, self._entry(kind, queue))
            else:
                heappop(heap)
        return None

    def in_order(self) -> Iterator[Span]:
        """All spans, queue by queue merged by score, each from its worse end. The queues must not
        change meanwhile."""
        self.lowest()  # puts the first entry right
        heap: list[tuple[float, int, Span, Kind | Iterator[Span]]] = list(self._heap)
        begun: set[Kind] = set()
        while heap:
            _, _, span, rest = heap[0]
            if isinstance(rest, tuple):
                kind, queue = rest, self._queues[rest]
                if not queue or kind in begun:
                    heappop(heap)
                    continue
                if span not in queue:
                    heapreplace(heap, self._entry(kind, queue))
                    continue
                begun.add(kind)
                rest = iter(queue) if span is next(iter(queue)) else reversed(queue)
                if next(rest) is not span:  # neither end any more: another came behind it
                    rest = iter(queue)
                    span = next(rest)
            yield span
            following = next(rest, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (self._score(following), next(self._ticket), following, rest))

    def refresh(self) -> None:
        """Compute the scores of all ends afresh."""
        self._heap = [self._entry(kind, queue) for kind, queue in self._queues.items() if queue]
        heapify(self._heap)

    def _entry(self, kind: Kind, queue: OrderedDict[Span, None]) -> tuple[float, int, Span, Kind]:
        """The worse end of a queue that is not empty."""
        oldest, youngest = next(iter(queue)), next(reversed(queue))
        score, other = self._score(oldest), self._score(youngest)
        if other < score:
            return other, next(self._ticket), youngest, kind
        return score, next(self._ticket), oldest, kind


class ShadowCache:
    """A cache of ``capacity`` keys made of the heads of spans (``span.kept[which]`` keys)."""

    def __init__(self, which: int, queue: AgeQueue | SpanQueues) -> None:
        self.capacity = 0
        self._which = which
        self._queue = queue
        self._used = 0

    def use(self, span: Span, count: int) -> int:
        """A request takes ``count`` keys from a span's head; returns how many would hit."""
        kept, which = span.kept, self._which
        hits = min(kept[which], count)
        kept[which] -= hits
        self._used -= hits
        if not kept[which]:
            self._queue.discard(span)
        return hits

    def add(self, span: Span) -> None:
        """A new span enters; others are cut from their tails until all fits."""
        span.kept[self._which] = span.size
        self._used += span.size
        self._queue.add(span)
        while self._used > self.capacity:
            lowest = self._queue.lowest()
            if lowest is None:
                return
            self.use(lowest, self._used - self.capacity)

    def changed(self, span: Span, change: Callable[[Span], None]) -> None:
        """Apply a change of the span's sort, keeping its place in the cache."""
        self._queue.discard(span)
        change(span)
        if span.kept[self._which]:
            self._queue.add(span)
