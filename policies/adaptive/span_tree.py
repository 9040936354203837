"""Spans: groups of keys whose latest use was by the same request, their kinds, and their position
in the tree of prefixes.

A request that touches its keys moves them from the spans of earlier requests into a new span. The
remaining tail of an earlier span becomes a child of the last key that was taken from it. The policy
thus handles a whole conversation as one object, at the cost of a dict entry per key. Prefixes stay
closed, because eviction takes keys from the tails of spans without children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from policies import hints as names
from policies.adaptive.reuse_table import Kind, ReuseTable, age_bin
from policies.adaptive.segments import LONG_MAX, Segment, Segments
from policies.base import Key, free_among

_LABELS = (
    (names.SESSION_END, "end"),
    (names.ONE_SHOT, "once"),
    (names.PINNED, "pinned"),
    (names.TOOL_CALL, "tool"),
)
"""The labels of spans by hint, the strongest first."""


class Span:
    """Keys last used at ``time``, as segments, tail first. ``live`` is the number of keys that are
    still members.

    ``kind`` is the class of spans for which the policy expects similar reuse, and ``sort`` is its
    longest prefix with a reuse curve, by which the policy chooses victims; both are rows of a
    ``ReuseTable``. ``turn`` counts the requests of the conversation, ``gap`` is the pause before
    the latest one. ``size`` is like ``live``, but includes evicted keys. ``by_age`` and
    ``by_score`` count the keys that the shadow caches hold.
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
        self.segments: dict[Segment[Span], None] = {}
        self.live = self.size = 0
        self.by_age = self.by_score = 0
        self.kind = self.sort = 0
        self.turn = self.gap = 0
        self.label = ""
        self.shared = False  # a prefix that several conversations share
        self.fresh = fresh  # the keys were inserted in this order and not touched yet
        self.hangs_on: Key | None = None

    def lose(self, keys: int) -> None:
        """Count removed keys."""
        self.live -= keys

    def name(self, label: str) -> None:
        """Set the label of this span's kind, from the client's hints."""
        self.label = label

    def classify(self, kind: int) -> None:
        """Set its kind."""
        self.kind = kind

    def sort_as(self, sort: int) -> None:
        """Set the row by which the policy chooses victims."""
        self.sort = sort

    def use(self, now: int) -> None:
        """Count a request that used the whole span."""
        self.time = now
        self.turn += 1

    def share(self, turn: int) -> None:
        """Mark the span as a prefix that several conversations share, used ``turn`` times so
        far."""
        self.shared = True
        self.turn = turn

    def follow(self, before: Span | None) -> None:
        """Make this the next turn of the conversation of ``before``, or the first turn of a new
        one."""
        self.turn = before.turn + 1 if before else 1
        self.gap = self.time - before.time if before else 0

    def set_aged(self, keys: int) -> None:
        """Set how many of its keys the shadow cache in LRU order holds."""
        self.by_age = keys

    def set_scored(self, keys: int) -> None:
        """Set how many of its keys the shadow cache in density order holds."""
        self.by_score = keys


class TakenKeys(NamedTuple):
    """The keys that a touch took from one span: their number (``size``), the position in the
    request at which they end, whether the span ``has_rest``, and the keys in prefix order."""

    span: Span
    size: int
    end: int
    has_rest: bool
    segments: list[Segment[Span]]


class SpanTree:
    """Maps members to spans, and keys to the spans that are their children."""

    def __init__(self) -> None:
        self.segments = Segments[Span]()
        self.hanging: dict[Key, OrderedDict[Span, None]] = {}

    def span_of(self, key: Key) -> Span | None:
        """The span that contains this key; ``None`` if the key is not a member."""
        segment = self.segments.of.get(key)
        return None if segment is None else segment.span

    def add(self, span: Span, keys: Sequence[Key]) -> Segment[Span]:
        """Add keys that are not members to a span, as new segments. Return the last segment."""
        for first in range(0, len(keys) or 1, LONG_MAX):
            segment = self.segments.add(list(keys[first : first + LONG_MAX]), span)
            span.segments[segment] = None
        span.live += len(keys)
        return segment

    def append(self, span: Span, segment: Segment[Span], keys: Sequence[Key]) -> None:
        """Add keys that are not members to one of a span's segments."""
        self.segments.append(segment, keys)
        span.live += len(keys)

    def take(self, keys: Sequence[Key]) -> list[TakenKeys]:
        """Take the members among these keys, given in prefix order, out of their spans. The caller
        puts them into other spans."""
        taken: list[TakenKeys] = []
        found: list[Segment[Span]] = []
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

    def _taken(self, span: Span, size: int, end: int, found: list[Segment[Span]]) -> TakenKeys:
        """Record that keys were taken from a span. Its remaining keys become a child of the last
        taken key."""
        span.live -= size
        span.size -= size
        if not span.live:
            self.vacate(span)
        elif not span.fresh:
            self._hang(span, _last_key(found))
        return TakenKeys(span, size, end, span.live > 0, found)

    def enter(
        self, span: Span, taken: Iterable[TakenKeys], before: TakenKeys | None = None
    ) -> None:
        """Add all taken keys to a span, and make the span a child of the last key in ``before``."""
        found = [segment for part in taken for segment in part.segments]
        for segment in reversed(self.segments.joined(found)):
            segment.give_to(span)
            span.segments[segment] = None
            span.live += segment.live
        span.size = span.live
        if before is not None:
            self._hang(span, _last_key(before.segments))

    def vacate(self, span: Span) -> None:
        """Detach a span that has no keys left from its parent, and drop its empty segments, which
        would keep it alive."""
        span.segments.clear()
        if span.hangs_on is not None:
            self.unhang(span)

    def unhang(self, span: Span) -> None:
        """Detach a span from its parent, if it has one."""
        key = span.hangs_on
        if key is not None:
            span.hangs_on = None
            others = self.hanging[key]
            del others[span]
            if not others:
                del self.hanging[key]

    def orphan(self, key: Key) -> None:
        """Detach all children of a key that is removed."""
        for span in self.hanging.pop(key):
            span.hangs_on = None

    def drain(
        self, span: Span, count: int, evictable: Callable[[Key], bool], found: dict[Key, None]
    ) -> None:
        """Add keys to ``found``, from the span's tail on, each after its child spans, until there
        are ``count``.

        Stops at a key that is not evictable, because its prefix must stay, too.
        """
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
        """Drain in the usual case: all keys needed are evictable and have no children.

        Otherwise does nothing and returns False.
        """
        run: list[Key] = []
        missing = count - len(found)
        empty: list[Segment[Span]] = []
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
        """The span's members, tail first."""
        return chain.from_iterable(map(self.segments.members, tuple(span.segments)))

    def _left(self, span: Span, found: dict[Key, None]) -> bool:
        """Return True if a span has members that are not chosen yet. Checking its head suffices,
        because the head is chosen last."""
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


def _last_key(segments: Sequence[Segment[Span]]) -> Key:
    return segments[-1].keys[0]


def keeps_head(taken: Sequence[TakenKeys]) -> bool:
    """True if a request shares exactly one complete shared span."""
    first = taken[0]
    if first.has_rest or not first.span.shared:
        return False
    for i in range(1, len(taken)):
        span, has_rest = taken[i].span, taken[i].has_rest
        if span.shared or (has_rest and not span.fresh):
            return False
    return True


def shared_kind(table: ReuseTable, span: Span) -> int:
    """The row of a span that several conversations share."""
    return table.row(("shared", min(6, span.turn.bit_length())))


def label_of(hints: Mapping[str, Any]) -> str:
    """The label of the strongest hint, or empty if no hint has a label."""
    return next((label for name, label in _LABELS if hints.get(name)), "")


def kind_of(span: Span) -> Kind:
    """The kind of a span: its label, its turn (exact up to 8, then in powers of two), its gap (in
    coarse steps) and its size (in powers of two)."""
    turn = span.turn if span.turn <= 8 else min(12, 8 + (span.turn // 8).bit_length())
    return (span.label, turn, age_bin(span.gap) // 4, span.size.bit_length())
