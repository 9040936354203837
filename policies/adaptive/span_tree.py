"""Spans: the keys that one request used last, and where they hang in the tree of prefixes.

A request that touches its keys takes them out of the spans of earlier requests and makes them
its own. What an earlier request leaves behind is the tail of its span; it hangs on the last key
that was taken. So whole conversations are handled as one thing, at the cost of a dict
entry per key, and eviction from the tail of spans that nothing hangs on keeps prefixes closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from policies.adaptive.segments import LONG_MAX, Segment, Segments
from policies.base import Key, free_among


class Span:
    """Keys last used at ``time``, as segments, the tail first; ``live`` keys are still in it.

    ``kind`` is the class of spans whose fate is expected to be alike, ``sort`` the part of it
    that is told apart when choosing victims, both as rows of a ``ReuseTable``; ``turn`` counts
    the requests of its conversation, ``gap`` is the time since the last of them. ``size`` counts
    its keys like ``live``, but with those that were evicted. ``by_age`` and ``by_score`` count
    those that the shadow caches hold.
    """

    __slots__ = (
        "by_age",
        "by_score",
        "fresh",
        "gap",
        "hangs_on",
        "kind",
        "label",
        "live",
        "segments",
        "shared",
        "size",
        "sort",
        "time",
        "turn",
    )

    def __init__(self, time: int, *, fresh: bool = False) -> None:
        self.time = time
        self.segments: dict[Segment, None] = {}
        self.live = self.size = 0
        self.by_age = self.by_score = 0
        self.kind = self.sort = 0
        self.turn = self.gap = 0
        self.label = ""
        self.shared = False  # the part of a prefix that several conversations use
        self.fresh = fresh  # inserted, in this order, and not touched yet
        self.hangs_on: Key | None = None


Taken = tuple[Span, int, int, bool, list[Segment]]
"""A span that a touch took keys from, how many, where they end in the request, whether some
were left behind, and the keys in prefix order. A plain tuple, because two are made for every
request."""


class SpanTree:
    """Which span each member is in, and what hangs on which key."""

    def __init__(self) -> None:
        self.segments = Segments()
        self.hanging: dict[Key, OrderedDict[Span, None]] = {}

    def span_of(self, key: Key) -> Span | None:
        """The span that a member is in."""
        segment = self.segments.of.get(key)
        return None if segment is None else segment.span

    def add(self, span: Span, keys: Sequence[Key]) -> Segment:
        """Enter keys that are no members in a span, as segments; returns the last."""
        for first in range(0, len(keys) or 1, LONG_MAX):
            segment = self.segments.add(list(keys[first : first + LONG_MAX]), span)
            span.segments[segment] = None
        span.live += len(keys)
        return segment

    def take(self, keys: Sequence[Key]) -> list[Taken]:
        """Take the members among these keys, given in prefix order, out of their spans. The
        caller enters them in others."""
        taken: list[Taken] = []
        found: list[Segment] = []
        end, size = 0, 0
        last: Span | None = None
        for span, segment in self.segments.cut(keys):
            if span is not last and last is not None:
                taken.append(self._taken(last, size, end, found))
                found, size = [], 0
            last = span
            found.append(segment)
            size += segment.live
            end += segment.live
        if last is not None:
            taken.append(self._taken(last, size, end, found))
        return taken

    def _taken(self, span: Span, size: int, end: int, found: list[Segment]) -> Taken:
        """Book what was taken from a span; what is left of it hangs on the last key of that."""
        span.live -= size
        span.size -= size
        if not span.live:
            span.segments.clear()  # those that are empty, which would keep it alive
            if span.hangs_on is not None:
                self.unhang(span)
        elif not span.fresh:
            self._hang(span, _last_key(found))
        return span, size, end, span.live > 0, found

    def enter(self, span: Span, taken: Iterable[Taken], before: Taken | None = None) -> None:
        """Give a span all that was taken; it hangs on the end of what came before that."""
        found = [segment for _, _, _, _, segments in taken for segment in segments]
        for segment in reversed(self.segments.joined(found)):
            segment.span = span
            span.segments[segment] = None
            span.live += segment.live
        span.size = span.live
        if before is not None:
            self._hang(span, _last_key(before[-1]))

    def unhang(self, span: Span) -> None:
        """A span that has no keys any more hangs on nothing."""
        key = span.hangs_on
        if key is not None:
            span.hangs_on = None
            others = self.hanging[key]
            del others[span]
            if not others:
                del self.hanging[key]

    def orphan(self, key: Key) -> None:
        """What hangs on a key that leaves hangs on nothing."""
        for span in self.hanging.pop(key):
            span.hangs_on = None

    def drain(
        self, span: Span, count: int, evictable: Callable[[Key], bool], found: dict[Key, None]
    ) -> None:
        """Add keys to ``found`` from the span's tail, and before each of them what hangs on it,
        until there are ``count``. Stops at a key that must stay: its prefix stays too."""
        if self._drain_run(span, count, evictable, found):
            return
        hanging = self.hanging
        stack: list[tuple[Span, tuple[Key, ...], Iterator[Key]]] = [(span, (), self._members(span))]
        missing = count - len(found)
        while stack:
            span, put_off, members = stack.pop()
            for key in chain(put_off, members):
                if missing <= 0:
                    return
                if key in found:
                    continue
                if key in hanging:
                    below = next((s for s in hanging[key] if self._left(s, found)), None)
                    if below is not None:
                        if any(below is waiting for waiting, _, _ in stack):
                            return
                        stack.append((span, (key,), members))
                        stack.append((below, (), self._members(below)))
                        break
                if not evictable(key):
                    return
                found[key] = None
                missing -= 1

    def _drain_run(
        self, span: Span, count: int, evictable: Callable[[Key], bool], found: dict[Key, None]
    ) -> bool:
        """Drain in the usual case, where all wanted keys may go and nothing hangs on them; does
        nothing otherwise. Returns which."""
        run: list[Key] = []
        missing = count - len(found)
        empty: list[Segment] = []
        is_dense = True
        for segment in span.segments:
            if not segment.live:
                empty.append(segment)
                continue
            is_dense = self.segments.is_dense(segment)
            run += segment.keys[segment.start : segment.start + missing - len(run)]
            if len(run) == missing or not is_dense:
                break
        for segment in empty:
            del span.segments[segment]
        if not is_dense:
            return False
        if not self.hanging.keys().isdisjoint(run):
            return False
        if len(free_among(evictable, run)) < len(run):
            return False
        if found and not found.keys().isdisjoint(run):
            return False
        found.update(dict.fromkeys(run))
        return True

    def _members(self, span: Span) -> Iterator[Key]:
        """The span's members, the last of the prefix first."""
        return chain.from_iterable(map(self.segments.members, tuple(span.segments)))

    def _left(self, span: Span, found: dict[Key, None]) -> bool:
        """Whether a span has members that are not chosen yet; its head is chosen last."""
        while span.segments:
            segment = next(reversed(span.segments))
            if segment.live:
                return self.segments.head(segment) not in found
            del span.segments[segment]
        return False

    def _hang(self, span: Span, key: Key) -> None:
        self.unhang(span)
        span.hangs_on = key
        self.hanging.setdefault(key, OrderedDict())[span] = None


def _last_key(segments: Sequence[Segment]) -> Key:
    return segments[-1].keys[0]
