"""Shadow caches: simulate the tier's content under another eviction order, in units of spans.

They cost a few steps per request instead of per key, and show the adaptive policy which of its
orders would have more hits for the current requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from policies.adaptive.span_tree import Span


class SpanQueues:
    """Queues of spans by ``sort``, oldest first. A heap holds one end of each queue, its first or
    last span: the one with the lower score.

    The span with the lowest score in a queue is assumed to be its oldest or its youngest: scores
    fall with age if spans die out, and rise if spans return after a pause.
    """

    def __init__(self, score: Callable[[Span], float]) -> None:
        self._score = score
        self._queues: dict[int, OrderedDict[Span, None]] = {}
        self._heap: list[tuple[float, int, Span, int]] = []
        self._ticket = count()

    def add(self, span: Span) -> None:
        """Add a span as the youngest of its sort."""
        queue = self._queues.get(span.sort)
        if queue is None:
            queue = self._queues[span.sort] = OrderedDict()
        if not queue:
            heappush(self._heap, (self._score(span), next(self._ticket), span, span.sort))
        queue[span] = None

    def renew(self, span: Span) -> None:
        """Make a span the youngest of its sort."""
        self._queues[span.sort].move_to_end(span)

    def discard(self, span: Span) -> None:
        """Remove a span if it is present."""
        queue = self._queues.get(span.sort)
        if queue is not None:
            queue.pop(span, None)

    def lowest(self) -> Span | None:
        """The span with the lowest score among the ends of all queues, according to the scores at
        the last ``refresh``."""
        heap = self._heap
        while heap:
            _, _, span, sort = heap[0]
            queue = self._queues[sort]
            if span in queue:
                return span
            if queue:
                heapreplace(heap, self._entry(sort, queue))
            else:
                heappop(heap)
        return None

    def in_order(self) -> Iterator[Span]:
        """All spans, lowest score first: merges the queues, each starting at the end with the lower
        score. The queues must not change during the iteration."""
        self.lowest()  # corrects the first entry
        heap: list[tuple[float, int, Span, int | Iterator[Span]]] = list(self._heap)
        begun: set[int] = set()
        while heap:
            _, _, span, rest = heap[0]
            if isinstance(rest, int):
                sort, queue = rest, self._queues[rest]
                if not queue or sort in begun:
                    heappop(heap)
                    continue
                if span not in queue:
                    heapreplace(heap, self._entry(sort, queue))
                    continue
                begun.add(sort)
                rest = iter(queue) if span is next(iter(queue)) else reversed(queue)
                if next(rest) is not span:
                    # the span is no longer at the end, because another span was added after it
                    rest = iter(queue)
                    span = next(rest)
            yield span
            following = next(rest, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (self._score(following), next(self._ticket), following, rest))

    def refresh(self) -> None:
        """Recompute the scores of all ends."""
        self._heap = [self._entry(sort, queue) for sort, queue in self._queues.items() if queue]
        heapify(self._heap)

    def _entry(self, sort: int, queue: OrderedDict[Span, None]) -> tuple[float, int, Span, int]:
        """The heap entry for the end with the lower score of a non-empty queue."""
        oldest, youngest = next(iter(queue)), next(reversed(queue))
        score = self._score(oldest)
        if oldest is not youngest:
            other = self._score(youngest)
            if other < score:
                return other, next(self._ticket), youngest, sort
        return score, next(self._ticket), oldest, sort


class Shadows:
    """Two caches of ``capacity`` keys, one ordered by age and one by score. Of each span, the first
    cache holds the first ``span.by_age`` keys, the second one the first ``span.by_score`` keys.

    ``hits`` counts the hits of the cache by age; ``lead`` is how many more the cache by score had.
    """

    def __init__(self, score: Callable[[Span], float]) -> None:
        self.capacity = 0
        self.lead = 0.0
        self.hits = 0.0
        self.scores = SpanQueues(score)
        self._ages: OrderedDict[Span, None] = OrderedDict()
        self._aged = self._scored = 0  # number of keys in each cache

    def grow(self, keys: int) -> None:
        """Record the number of keys in the tier; the capacity is the largest number seen."""
        self.capacity = max(self.capacity, keys)

    def fade(self, memory: float) -> None:
        """Reduce the weight of past hits, once per request."""
        self.lead *= memory
        self.hits *= memory

    def use(self, span: Span, count: int) -> None:
        """Count the hits of a request that uses the first ``count`` keys of a span, and remove
        these keys from the caches."""
        by_age = min(span.by_age, count)
        by_score = min(span.by_score, count)
        self.hits += by_age
        self.lead += by_score - by_age
        self.forget(span, by_age, by_score)

    def renew(self, span: Span) -> bool:
        """Count the hits of a request that uses all of a span, and make the span the youngest. Does
        nothing and returns False if one of the caches does not hold the whole span."""
        size = span.size
        if span.by_age != size or span.by_score != size:
            return False
        self.hits += size
        self._ages.move_to_end(span)
        self.scores.renew(span)
        return True

    def forget(self, span: Span, by_age: int, by_score: int) -> None:
        """Remove these numbers of a span's keys from the two caches."""
        if by_age:
            self._aged -= by_age
            span.set_aged(span.by_age - by_age)
            if not span.by_age:
                del self._ages[span]
        if by_score:
            self._scored -= by_score
            span.set_scored(span.by_score - by_score)
            if not span.by_score:
                self.scores.discard(span)

    def add(self, span: Span) -> None:
        """Add a new span; cut off the tails of others until everything fits."""
        span.set_aged(span.size)
        span.set_scored(span.size)
        self._aged += span.size
        self._scored += span.size
        self._ages[span] = None
        self.scores.add(span)
        while self._aged > self.capacity:
            oldest = next(iter(self._ages))
            self.forget(oldest, min(oldest.by_age, self._aged - self.capacity), 0)
        while self._scored > self.capacity:
            lowest = self.scores.lowest()
            assert lowest is not None  # the span is not empty
            self.forget(lowest, 0, min(lowest.by_score, self._scored - self.capacity))

    def expel(self, span: Span) -> None:
        """Make a span the oldest in the order by age."""
        if span.by_age:
            self._ages.move_to_end(span, last=False)
