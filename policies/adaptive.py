"""The default policy of the CPU tier: LRU, or learned reuse density where that does better.

Keys are kept in spans (``policies.spans``). Spans are sorted into kinds by what is known of their
conversation: how many requests it has had, how long it was away before the last one, how long its
prompt is, and hints that the client gave. For each kind the policy learns online how soon such
spans are used again, and evicts first what is worth least per key and time (``policies.density``).
Hints are only labels of a kind, so a hint that tells nothing, or lies, loses its effect by itself.
Eviction is always from the tail, and never takes a key that another member's prefix needs.

Two shadow caches (``policies.shadow``) replay LRU and density order beside each other, and the
tier evicts in the order of the one that had more hits lately (choosing policies by shadow caches:
I. Ari et al., "ACME: Adaptive caching using multiple experts", WDAS 2002).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from policies import hints as names
from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.density import Kind, ReuseTable, age_bin
from policies.shadow import AgeQueue, ShadowCache, SpanQueues
from policies.spans import Span, SpanTree, Taken

_LEAD_LEAST = 0.03
"""By this share of LRU's hits, or of its misses if they are fewer, the density order must be
ahead to be in charge."""
_DEAD = 0.2
"""Spans worth less than this share of the average are dead."""
_RESCORE_BLOCKS = 512
_GHOSTS_LEAST = 256
_GHOSTS_PER_SPAN = 6
_FRESH = ("fresh",)
_LABELS = (
    (names.SESSION_END, "end"),
    (names.ONE_SHOT, "once"),
    (names.PINNED, "pinned"),
    (names.TOOL_CALL, "tool"),
)


class AdaptivePolicy(EvictionPolicy):
    """O(1) per key, amortised, plus a few steps per request.

    ``relearn_every`` requests (more, where many spans are remembered) the indices are computed
    afresh. ``memory`` is the share that the
    hit counts of the two orders keep per request: 0.999 compares the last thousand or so.
    ``prior`` is how many observations of its own a kind needs to count as much as its prefix.
    """

    keeps_prefixes_closed = True

    def __init__(self, relearn_every: int = 256, memory: float = 0.999, prior: float = 10.0):
        self._every = relearn_every
        self._memory = memory
        self._prior = prior
        self._start_over()

    def _start_over(self) -> None:
        self._tree = SpanTree()
        self._table = ReuseTable(self._prior)
        self._queues = SpanQueues(self._worth)
        self._by_time: OrderedDict[Span, None] = OrderedDict()
        self._density_queue = SpanQueues(self._worth)
        self._ages = AgeQueue()
        self._shadows = (ShadowCache(0, self._ages), ShadowCache(1, self._density_queue))
        self._ghosts: OrderedDict[Key, Span] = OrderedDict()
        self._now = 0
        self._score_at = 0
        self._learn_at = self._every
        self._requests = 0
        self._lead = 0.0  # hits of density order minus those of LRU, lately
        self._lru_hits = 0.0
        self._touched = 0.0
        self._fresh: Span | None = None
        self._returned: dict[Key, Span] = {}  # heads of ghosts that were inserted again
        self._current: Span | None = None

    @property
    def order(self) -> str:
        """The order in charge: ``lru`` or ``density``."""
        stake = min(self._lru_hits, self._touched - self._lru_hits)
        ahead = self._lead > _LEAD_LEAST * max(0.0, stake)
        return "density" if ahead and self._table.learned else "lru"

    def insert(self, key: Key, info: EntryInfo) -> None:
        if key in self._ghosts:
            self._recall(key)
        fresh = self._fresh
        if fresh is None:
            fresh = self._begin()
        if info.hints:
            fresh.label = _label(info.hints)
        fresh.keys.append(key)
        fresh.live += 1
        self._tree.span_of[key] = fresh

    def touch(self, keys: Sequence[Key]) -> None:
        members, taken = self._tree.take(keys)
        self._current = None
        if not members:
            return
        self._requests += 1
        self._now += len(members)
        hits = [0, 0]
        for part in taken:
            self._leave(part, hits)
        self._lead = self._lead * self._memory + hits[1] - hits[0]
        self._lru_hits = self._lru_hits * self._memory + hits[0]
        self._touched = self._touched * self._memory + len(members)
        self._enter(members, taken)
        self._returned = {k: s for k, s in self._returned.items() if self._waits(k)}
        if self._requests >= self._learn_at:
            self._relearn()
        if self._now >= self._score_at:
            self._rescore()

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        """Label the span that the request left at the end of its keys."""
        label = _label(hints)
        if not label:
            return
        for key in reversed(keys):
            span = self._tree.span_of.get(key)
            if span is not None:
                if not span.shared and not span.fresh:
                    self._relabel(span, label)
                return

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: dict[Key, None] = {}
        drain = self._tree.drain
        for shadow in self._shadows:
            shadow.capacity = max(shadow.capacity, len(self))
        if self._current is not None and self._current.live:
            drain(self._current, count, evictable, found)
        if len(found) < count:
            for span in self._candidates():
                drain(span, count, evictable, found)
                if len(found) >= count:
                    self._current = span
                    break
        if len(found) < count:  # only by breaking prefixes, if at all
            rest = (k for k in self._tree.span_of if k not in found and evictable(k))
            found.update(dict.fromkeys(islice(rest, count - len(found))))
        return list(found)

    def remove(self, key: Key, cause: RemoveCause) -> None:
        tree = self._tree
        span = tree.span_of.pop(key, None)
        if span is None:
            return
        span.live -= 1
        if key in tree.hanging:
            tree.orphan(key)
        if span.live:
            return
        tree.unhang(span)
        self._drop(span)
        if cause is RemoveCause.EVICTED and not span.fresh:
            span.keys = []
            self._ghosts[key] = span

    def clear(self) -> None:
        self._start_over()

    def __len__(self) -> int:
        return len(self._tree.span_of)

    # -- a touch -------------------------------------------------------------------------------

    def _leave(self, part: Taken, hits: list[int]) -> None:
        """A request took keys from a span: learn from it, and book the shadows' hits."""
        span = part.span
        if span.fresh:
            if not part.rest:
                self._drop(span)
            return
        for shadow, number in zip(self._shadows, (0, 1), strict=True):
            hits[number] += shadow.use(span, part.count if part.rest else part.count + span.size)
        if not part.rest:
            self._table.record(span.kind, self._now - span.time, part.count, reused=True)
            self._drop(span)

    def _recall(self, key: Key) -> None:
        """A request brings back the head of a span that was evicted."""
        span = self._returned[key] = self._ghosts.pop(key)
        self._table.record(span.kind, self._now - span.time, span.size, reused=True)
        gained = [shadow.use(span, span.size) for shadow in self._shadows]
        self._lead += gained[1] - gained[0]
        self._lru_hits += gained[0]

    def _enter(self, members: Sequence[Key], taken: Sequence[Taken]) -> None:
        """Make the touched keys one span, or two where others share the head."""
        self._fresh = None
        split, uses, label = 0, 0, ""
        before: Span | None = None
        for part in taken:
            span = part.span
            if span.fresh:
                label = label or span.label
            elif part.rest or span.shared:
                split, before = part.end, None
                uses = max(uses, span.turn if span.shared else 1)
            else:
                before = span
        if split:
            head = Span(self._now, list(reversed(members[:split])))
            head.shared = True
            head.turn = uses + 1
            head.kind = ("shared", min(6, head.turn.bit_length()))
            self._tree.enter(head)
            self._queue(head)
        if split < len(members):
            tail = Span(self._now, list(reversed(members[split:])))
            self._tree.enter(tail, members[split - 1] if split else None)
            before = before or self._returned_in(tail)
            tail.turn = before.turn + 1 if before else 1
            tail.gap = self._now - before.time if before else 0
            tail.label = label
            tail.kind = _kind(tail)
            self._queue(tail)

    def _waits(self, key: Key) -> bool:
        """Whether a key was inserted and its request has not touched it yet."""
        owner = self._tree.span_of.get(key)
        return owner is not None and owner.fresh

    def _returned_in(self, tail: Span) -> Span | None:
        """The evicted span whose head came back among a new span's keys."""
        span_of = self._tree.span_of
        for key, span in self._returned.items():
            if span_of.get(key) is tail and not span.shared:
                return span
        return None

    def _begin(self) -> Span:
        """A span for keys that are inserted before their request touches them."""
        fresh = self._fresh = Span(self._now, [])
        fresh.fresh = True
        fresh.sort = _FRESH
        self._queues.add(fresh)
        self._by_time[fresh] = None
        return fresh

    def _queue(self, span: Span) -> None:
        span.sort = self._table.known(span.kind)
        self._queues.add(span)
        self._by_time[span] = None
        for shadow in self._shadows:
            shadow.add(span)

    def _drop(self, span: Span) -> None:
        """A span has no members any more."""
        self._queues.discard(span)
        self._by_time.pop(span, None)
        if span is self._fresh:
            self._fresh = None
        if span is self._current:
            self._current = None

    def _relabel(self, span: Span, label: str) -> None:
        def change(span: Span) -> None:
            self._queues.discard(span)
            span.label = label
            span.kind = _kind(span)
            span.sort = self._table.known(span.kind)
            self._queues.add(span)

        self._shadows[1].changed(span, change)
        self._current = None
        if self._is_dead(span):
            self._by_time.move_to_end(span, last=False)
            self._ages.expel(span)

    def _is_dead(self, span: Span) -> bool:
        """Whether spans of this kind turned out to be worth next to nothing."""
        table = self._table
        return table.learned and table.worth(span.sort, 0) < _DEAD * table.worth((), 0)

    # -- order ---------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Span]:
        if self.order == "lru":
            return iter(self._by_time)
        return self._queues.in_order()

    def _worth(self, span: Span) -> float:
        return self._table.worth(span.sort, self._now - span.time)

    def _rescore(self) -> None:
        """Scores change as time goes on."""
        self._score_at = self._now + _RESCORE_BLOCKS
        self._queues.refresh()
        self._density_queue.refresh()

    def _relearn(self) -> None:
        self._learn_at = self._requests + max(
            self._every, min(4 * self._every, self._requests // 4)
        )
        limit = max(_GHOSTS_LEAST, _GHOSTS_PER_SPAN * len(self._by_time))
        while len(self._ghosts) > limit:
            _, ghost = self._ghosts.popitem(last=False)
            self._table.record(ghost.kind, self._now - ghost.time, ghost.size, reused=False)
            for shadow in self._shadows:
                shadow.use(ghost, ghost.size)
        self._learn_at = self._requests + max(self._every, len(self._ghosts) // 8)
        now = self._now
        self._table.relearn(
            (span.kind, now - span.time, span.size)
            for span in chain(self._by_time, self._ghosts.values())
            if not span.fresh
        )
        self._rescore()


def _label(hints: Mapping[str, Any]) -> str:
    """The strongest hint's label; empty if none of them says anything here."""
    return next((label for name, label in _LABELS if hints.get(name)), "")


def _kind(span: Span) -> Kind:
    """Label, turn (exact to 8, then by doubling), gap in coarse steps, size by doubling."""
    turn = span.turn if span.turn <= 8 else min(12, 8 + (span.turn // 8).bit_length())
    return (span.label, turn, age_bin(span.gap) // 4, span.size.bit_length())
