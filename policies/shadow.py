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

_LOOKS = 16
"""After so many answers all scores are computed afresh."""


class SpanQueues:
    """Spans by kind, oldest first, and the order of their ends by a score.

    The span of lowest score in a queue is taken to be its oldest or its youngest: a score
    falls with age where spans die out, and rises where they come back after a pause.
    """

    def __init__(self, score: Callable[[Span], float]) -> None:
        self._score = score
        self._queues: dict[Kind, OrderedDict[Span, None]] = {}
        self._heap: list[tuple[float, int, Span, Kind]] = []
        self._ticket = count()
        self._looks = 0

    def add(self, span: Span) -> None:
        """Enter a span as the youngest of its kind."""
        queue = self._queues.get(span.kind)
        if queue is None:
            queue = self._queues[span.kind] = OrderedDict()
        queue[span] = None
        if len(queue) == 1:
            heappush(self._heap, self._entry(span.kind, queue))

    def discard(self, span: Span) -> None:
        """Take a span out, if it is there."""
        queue = self._queues.get(span.kind)
        if queue is not None:
            queue.pop(span, None)

    def lowest(self) -> Span | None:
        """A span of lowest score among the ends of all queues; scores may be a little old."""
        self._looks += 1
        if self._looks >= _LOOKS:
            self.refresh()
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
        """All spans, queue by queue merged by score, each from its worse end. The queues must
        not change meanwhile."""
        heap: list[tuple[float, int, Span, Iterator[Span]]] = []
        for kind, queue in self._queues.items():
            if queue:
                worse = self._entry(kind, queue)[2]
                spans = iter(queue) if worse is next(iter(queue)) else reversed(queue)
                first = next(spans)
                heap.append((self._score(first), next(self._ticket), first, spans))
        heapify(heap)
        while heap:
            _, _, span, spans = heap[0]
            yield span
            following = next(spans, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (self._score(following), next(self._ticket), following, spans))

    def refresh(self) -> None:
        """Compute the scores of all ends afresh."""
        self._looks = 0
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

    def __init__(self, which: int, score: Callable[[Span], float]) -> None:
        self.capacity = 0
        self._which = which
        self._queues = SpanQueues(score)
        self._used = 0

    def use(self, span: Span, count: int) -> int:
        """A request takes ``count`` keys from a span's head; returns how many would hit."""
        kept = span.kept
        hits = min(kept[self._which], count)
        kept[self._which] -= hits
        self._used -= hits
        if not kept[self._which]:
            self._queues.discard(span)
        return hits

    def add(self, span: Span) -> None:
        """A new span enters; others are cut from their tails until all fits."""
        span.kept[self._which] = span.size
        self._used += span.size
        self._queues.add(span)
        while self._used > self.capacity:
            lowest = self._queues.lowest()
            if lowest is None:
                return
            cut = min(lowest.kept[self._which], self._used - self.capacity)
            lowest.kept[self._which] -= cut
            self._used -= cut
            if not lowest.kept[self._which]:
                self._queues.discard(lowest)

    def leave(self, span: Span) -> bool:
        """Prepare a change of the span's kind; whether it is to come ``back`` after."""
        self._queues.discard(span)
        return span.kept[self._which] > 0

    def back(self, span: Span) -> None:
        """Enter a span again whose kind was changed."""
        self._queues.add(span)

    def refresh(self) -> None:
        """Scores changed."""
        self._queues.refresh()
