"""The default policy of the CPU tier: LRU, or learned reuse density while that has more hits.

The policy keeps keys in spans (``policies.adaptive.span_tree``) and sorts spans into kinds by four
facts about their conversation: its number of requests, the pause before the last one, the length of
its prompt, and the client's hints. For each kind it learns online how soon such spans are used
again, and it first evicts the spans with the lowest worth per key and time
(``policies.adaptive.reuse_table``). Hints are only labels of a kind, so an uninformative or wrong
hint loses its effect. Eviction starts at the tail of a span and never takes a key that is in
another member's prefix.

Two shadow caches (``policies.adaptive.shadow_caches``) simulate LRU order and density order, and
the tier evicts in the order that had more hits recently (choosing policies by shadow caches: I. Ari
et al., "ACME: Adaptive caching using multiple experts", WDAS 2002).

Owns the default policy of the CPU tier.

Must not know tiers, or any policy but itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice, repeat
from typing import Annotated, Any

from policies.adaptive.reuse_table import ReuseTable
from policies.adaptive.segments import LONG_MAX, SMALL, Segment, run_ends
from policies.adaptive.shadow_caches import Shadows, SpanQueues
from policies.adaptive.span_tree import (
    Span,
    SpanTree,
    TakenKeys,
    keeps_head,
    kind_of,
    label_of,
    shared_kind,
)
from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_in, hints_among
from policies.options import Range

_LEAD_MIN = 0.03
"""The density order is used if it leads by more than this share of LRU's hits or misses, whichever
are fewer."""
_DEAD = 0.2
"""A span counts as dead if its worth is less than this share of the average."""
_RESCORE_BLOCKS = 512
_RESCORES = 4
"""The number of times that the policy recomputes all scores per turnover, that is, while requests
touch as many keys as the tier holds. It recomputes them at most once every ``_RESCORE_BLOCKS``
keys."""
_WAITING_MAX = 4096
"""With more spans than this, the policy learns from a systematic sample, so that no request is
delayed for long."""
_GHOSTS_MIN = 256
_GHOSTS_PER_SPAN = 4


class AdaptivePolicy(EvictionPolicy):
    """Evicts by LRU or by learned density. O(1) per key, amortised, plus a few steps per request.

    The policy recomputes its indices every ``relearn_every`` requests, or less often if it
    remembers many spans. Each request multiplies the hit counts of the two orders by ``memory``:
    0.999 covers about the last thousand requests. A kind needs ``prior`` observations to count as
    much as the more general kind that is its prefix.
    """

    keeps_prefixes_closed = True

    def __init__(
        self,
        relearn_every: Annotated[int, Range(1)] = 256,
        memory: Annotated[float, Range(0, 1, above=True)] = 0.999,
        prior: Annotated[float, Range(0, above=True)] = 10.0,
    ) -> None:
        self._every = relearn_every
        self._memory = memory
        self._prior = prior
        self._start_over()

    def _start_over(self) -> None:
        self._tree = SpanTree()
        self._table = ReuseTable(self._prior)
        self._queues: SpanQueues | None = None  # ``None`` while LRU order is used
        self._by_time: OrderedDict[Span, None] = OrderedDict()
        self._shadows = Shadows(self._worth)
        self._stale = False  # true if the scores in ``_queues`` are outdated
        self._segment_of = self._tree.segments.of
        self._hanging = self._tree.hanging
        self._ghosts: OrderedDict[Key, Span] = OrderedDict()
        self._now = 0
        self._score_at = 0
        self._learn_at = self._every
        self._requests = 0
        self._touched = 0.0  # number of touched keys, decayed like the counts of the shadows
        self._fresh = Span(0, fresh=True)  # keys that no request has touched yet
        # the segment of ``_fresh`` into which single keys are inserted
        self._open: Segment[Span] | None = None
        self._returned: dict[Key, Span] = {}  # heads of ghosts that were inserted again
        self._current: Span | None = None

    @property
    def order(self) -> str:
        """The current order: ``lru`` or ``density``."""
        return "lru" if self._queues is None else "density"

    def insert(self, key: Key, info: EntryInfo) -> None:
        if key in self._ghosts:
            self._recall(key)
        if info.hints:
            self._fresh.name(label_of(info.hints))
        self._tree.append(self._fresh, self._opened(), (key,))

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        if not self._ghosts.keys().isdisjoint(keys):
            for key in filter(self._ghosts.__contains__, keys):
                self._recall(key)
        for hints in hints_among(infos):
            self._fresh.name(label_of(hints))
        keys = keys if isinstance(keys, list) else list(keys)
        if len(keys) >= SMALL:
            self._open = None
            self._tree.add(self._fresh, keys)
        elif keys:
            self._tree.append(self._fresh, self._opened(), keys)

    def _opened(self) -> Segment[Span]:
        """Return the segment that takes single insertions."""
        segment = self._open
        if segment is None or not segment.live or len(segment.keys) >= LONG_MAX:
            segment = self._open = self._tree.add(self._fresh, [])
        return segment

    def touch(self, keys: Sequence[Key]) -> None:
        taken = self._tree.take(keys)
        self._current = None
        if not taken:
            return
        count = taken[-1].end
        self._requests += 1
        self._now += count
        shadows = self._shadows
        shadows.fade(self._memory)
        self._touched = self._touched * self._memory + count
        renewed = taken.pop(0) if keeps_head(taken) else None
        if renewed is not None:
            self._renew(renewed)
        for part in taken:
            self._leave(part)
        self._enter(taken, count, renewed)
        if self._returned:
            self._returned = {k: s for k, s in self._returned.items() if self._waits(k)}
        if self._requests >= self._learn_at:
            self._relearn()
        if self._now >= self._score_at:
            self._rescore()

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        """Label the span that the request left at the end of its keys."""
        label = label_of(hints)
        if not label:
            return
        for key in reversed(keys):
            span = self._tree.span_of(key)
            if span is not None:
                if not span.shared and not span.fresh:
                    self._relabel(span, label)
                return

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: dict[Key, None] = {}
        drain = self._tree.drain
        self._shadows.grow(len(self))
        if self._current is not None and self._current.live:
            drain(self._current, count, evictable, found)
        if len(found) < count:
            for span in self._candidates():
                drain(span, count, evictable, found)
                if len(found) >= count:
                    self._current = span
                    break
            else:
                drain(self._fresh, count, evictable, found)
        if len(found) < count:  # if necessary by breaking prefixes
            rest = free_in(filterfalse(found.__contains__, self._segment_of), evictable)
            found.update(dict.fromkeys(list(islice(rest, count - len(found)))))
        return list(found)

    def remove(self, key: Key, cause: RemoveCause) -> None:
        segment = self._segment_of.pop(key, None)
        if segment is not None:
            if key in self._hanging:
                self._tree.orphan(key)
            self._gone(segment, [key], cause)

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        if not self._hanging.keys().isdisjoint(keys):
            for key in keys:
                self.remove(key, cause)
            return
        segments = list(map(self._segment_of.pop, keys, repeat(None)))
        start = 0
        for end in run_ends(segments):
            segment = segments[start]
            if segment is not None:
                self._gone(segment, keys[start:end], cause)
            start = end

    def _gone(self, segment: Segment[Span], keys: Sequence[Key], cause: RemoveCause) -> None:
        """Record that keys have left a segment."""
        self._tree.segments.left(segment, keys)
        span = segment.span
        assert span is not None  # set only during a touch
        span.lose(len(keys))
        if span.live:
            return
        self._tree.vacate(span)
        self._drop(span)
        if cause is RemoveCause.EVICTED and not span.fresh:
            self._ghosts[keys[-1]] = span

    def clear(self) -> None:
        self._start_over()

    def __len__(self) -> int:
        return len(self._segment_of)

    # -- touches -----------------------------------------------------------------------------------

    def _leave(self, part: TakenKeys) -> None:
        """Learn from the keys that a request took from a span, and count the shadow caches'
        hits."""
        span, count, has_rest = part.span, part.size, part.has_rest
        if span.fresh:
            if has_rest:
                self._settle(span)
            else:
                self._drop(span)
            return
        self._shadows.use(span, count if has_rest else count + span.size)
        if not has_rest:
            self._table.record(span.kind, self._now - span.time, count, reused=True)
            self._drop(span)

    def _recall(self, key: Key) -> None:
        """Learn from the insertion of the head of an evicted span."""
        span = self._returned[key] = self._ghosts.pop(key)
        self._table.record(span.kind, self._now - span.time, span.size, reused=True)
        self._shadows.use(span, span.size)

    def _renew(self, part: TakenKeys) -> None:
        """Record that a request used all of a shared span. The span remains as it is."""
        span, count = part.span, part.size
        table, shadows = self._table, self._shadows
        table.record(span.kind, self._now - span.time, count, reused=True)
        self._drop(span)
        evicted = span.size
        self._tree.enter(span, [part])
        span.use(self._now)
        span.classify(shared_kind(table, span))
        sort = table.known(span.kind)
        if evicted or sort != span.sort or not shadows.renew(span):
            shadows.use(span, count + evicted)
            span.sort_as(sort)
            shadows.add(span)
        self._line_up(span)

    def _enter(self, taken: Sequence[TakenKeys], count: int, renewed: TakenKeys | None) -> None:
        """Turn the touched keys into one span, or into two if other conversations share the head.
        ``count`` includes the keys of a ``renewed`` span, which is the head."""
        if self._fresh.segments or any(part.span is self._fresh for part in taken):
            if self._fresh.live:  # these keys are of other requests
                self._settle(self._fresh)
            self._fresh = Span(self._now, fresh=True)
            self._open = None
        start = renewed.end if renewed else 0
        split, uses, label = start, 0, ""
        before: Span | None = None
        for span, _, end, has_rest, _ in taken:
            if span.fresh:
                label = label or span.label
            elif has_rest or span.shared:
                split, before = end, None
                uses = max(uses, span.turn if span.shared else 1)
            else:
                before = span
        above = [part for part in taken if part.end <= split]
        if above:
            head = Span(self._now)
            head.share(uses + 1)
            head.classify(shared_kind(self._table, head))
            self._tree.enter(head, above)
            self._queue(head)
        if split < count:
            tail = Span(self._now)
            self._tree.enter(tail, taken[len(above) :], above[-1] if above else renewed)
            tail.follow(before or self._returned_in(tail))
            tail.name(label)
            tail.classify(self._table.row(kind_of(tail)))
            self._queue(tail)

    def _waits(self, key: Key) -> bool:
        """Return True if a key was inserted and its request has not touched it yet."""
        owner = self._tree.span_of(key)
        return owner is not None and owner.fresh

    def _returned_in(self, tail: Span) -> Span | None:
        """Return the evicted span whose head is among a new span's keys."""
        span_of = self._tree.span_of
        for key, span in self._returned.items():
            if span_of(key) is tail and not span.shared:
                return span
        return None

    def _settle(self, span: Span) -> None:
        """Add a span of untouched keys to the orders. Called when a request has touched other
        keys."""
        if span not in self._by_time:
            self._line_up(span)

    def _queue(self, span: Span) -> None:
        span.sort_as(self._table.known(span.kind))
        self._line_up(span)
        self._shadows.add(span)

    def _line_up(self, span: Span) -> None:
        self._by_time[span] = None
        if self._queues is not None:
            self._queues.add(span)

    def _drop(self, span: Span) -> None:
        """Remove a span without members from all orders."""
        if self._queues is not None:
            self._queues.discard(span)
        self._by_time.pop(span, None)
        if span is self._current:
            self._current = None

    def _relabel(self, span: Span, label: str) -> None:
        scores, queues = self._shadows.scores, self._queues
        scores.discard(span)
        if queues is not None:
            queues.discard(span)
        span.name(label)
        span.classify(self._table.row(kind_of(span)))
        span.sort_as(self._table.known(span.kind))
        if queues is not None:
            queues.add(span)
        if span.by_score:
            scores.add(span)
        self._current = None
        if self._is_dead(span):
            self._by_time.move_to_end(span, last=False)
            self._shadows.expel(span)

    def _is_dead(self, span: Span) -> bool:
        """Return True if spans of this kind have turned out to be almost worthless."""
        table = self._table
        return table.learned and table.worth(span.sort, 0) < _DEAD * table.worth(0, 0)

    # -- order ---------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Span]:
        if self._queues is None:
            return iter(self._by_time)
        if self._stale:
            self._stale = False
            self._queues.refresh()
        return self._queues.in_order()

    def _worth(self, span: Span) -> float:
        return self._table.worth(span.sort, self._now - span.time)

    def _rescore(self) -> None:
        """Recompute the scores, which change with time, and choose the order."""
        self._score_at = self._now + max(_RESCORE_BLOCKS, len(self) // _RESCORES)
        self._stale = True
        self._shadows.scores.refresh()
        shadows = self._shadows
        stake = min(shadows.hits, self._touched - shadows.hits)
        if shadows.lead <= _LEAD_MIN * max(0.0, stake) or not self._table.learned:
            self._queues = None
        elif self._queues is None:
            self._queues = SpanQueues(self._worth)
            for span in self._by_time:
                self._queues.add(span)

    def _relearn(self) -> None:
        limit = max(_GHOSTS_MIN, _GHOSTS_PER_SPAN * len(self._by_time))
        now = self._now
        while len(self._ghosts) > limit:
            _, ghost = self._ghosts.popitem(last=False)
            self._table.record(ghost.kind, now - ghost.time, ghost.size, reused=False)
            self._shadows.forget(ghost, ghost.by_age, ghost.by_score)
        known = chain(self._by_time, self._ghosts.values())
        step = 1 + (len(self._by_time) + len(self._ghosts)) // _WAITING_MAX
        self._table.relearn(
            (span.kind, now - span.time, step * span.size, False)
            for span in islice(known, None, None, step)
            if not span.fresh
        )
        self._learn_at = self._requests + max(
            self._every, min(8 * self._every, self._requests // 2), len(self._ghosts) // 8
        )
        self._rescore()
