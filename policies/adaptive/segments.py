"""Segments: runs of consecutive keys of a prefix that have one owner.

When a request touches thousands of keys, whole segments change their owner. That takes one dict
lookup and one comparison of lists per segment, instead of a lookup and an update per key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_not, ne
from typing import Any, Generic, Protocol, TypeVar

from policies.base import Key

SMALL = 32
"""Shorter segments are joined with their neighbours."""
LONG_MAX = 4096
"""Maximum number of keys in a new segment. After a restart a tier has millions of keys of unknown
owners, and an operation on a segment with holes visits all of its keys."""
_LOOSE_MAX = 256
"""Maximum number of keys that are removed from the middle of a segment at a time."""
_LEFT_MAX = 1024
"""A segment deletes removed keys from its list when there are more than this."""


class SegmentOwner(Protocol):
    """The part of a span's interface that segments need. ``fresh`` means that its segments contain
    keys, in order of insertion, that no request has touched yet."""

    segments: dict[Segment[Any], None]
    fresh: bool


SpanT = TypeVar("SpanT", bound=SegmentOwner)


class Segment(Generic[SpanT]):
    """Keys, tail first. The keys before index ``start`` were removed, and ``live`` of the others
    are still members. The segment is dense if all of the others are.

    ``span`` owns the segment. ``None`` means that a request has taken the segment and will give it
    to a new span.
    """

    __slots__ = ("keys", "live", "span", "start")

    def __init__(self, keys: list[Key], span: SpanT | None) -> None:
        self.keys = keys
        self.start = 0
        self.live = len(keys)
        self.span = span

    def give_to(self, span: SpanT) -> None:
        """Set its owner."""
        self.span = span


class Segments(Generic[SpanT]):
    """Maps keys to segments."""

    def __init__(self) -> None:
        # the policy itself removes single keys from this dict
        self.of: dict[Key, Segment[SpanT]] = {}

    def add(self, keys: list[Key], span: SpanT) -> Segment[SpanT]:
        """Add a new segment of keys that are in no segment."""
        segment = Segment(keys, span)
        self.of.update(zip(keys, repeat(segment)))
        return segment

    def append(self, segment: Segment[SpanT], keys: Sequence[Key]) -> None:
        """Add keys that are in no segment."""
        segment.keys += keys
        segment.live += len(keys)
        self.of.update(zip(keys, repeat(segment)))

    def is_dense(self, segment: Segment[SpanT]) -> bool:
        """Cut removed keys off both ends. Return True if all other keys are members."""
        keys = segment.keys
        if segment.live == len(keys) - segment.start:
            return True
        self.head(segment)
        start, of = segment.start, self.of
        while start < len(keys) and of.get(keys[start]) is not segment:
            start += 1
        segment.start = start
        self._cut_off(segment)
        return segment.live == len(keys) - segment.start

    def left(self, segment: Segment[SpanT], keys: Sequence[Key]) -> None:
        """Record that these keys of the segment, usually its tail, were removed from ``of``."""
        segment.live -= len(keys)
        start = segment.start
        if segment.keys[start : start + len(keys)] == keys:
            segment.start += len(keys)
            self._cut_off(segment)

    def _cut_off(self, segment: Segment[SpanT]) -> None:
        if segment.start > _LEFT_MAX and 2 * segment.start > len(segment.keys):
            del segment.keys[: segment.start]
            segment.start = 0

    def head(self, segment: Segment[SpanT]) -> Key | None:
        """The segment's first remaining key in prefix order."""
        keys, of = segment.keys, self.of
        while keys and of.get(keys[-1]) is not segment:
            keys.pop()
        segment.start = min(segment.start, len(keys))
        return keys[-1] if keys else None

    def members(self, segment: Segment[SpanT]) -> Iterator[Key]:
        """The segment's remaining keys, tail first."""
        is_dense, keys, of = self.is_dense(segment), segment.keys, self.of
        found = map(keys.__getitem__, range(segment.start, len(keys)))
        return found if is_dense else (k for k in found if of.get(k) is segment)

    def cut(self, keys: Sequence[Key]) -> Iterator[tuple[SpanT, Segment[SpanT]]]:
        """Take keys, given in prefix order, out of their spans.

        Returns dense segments that start at 0, with the spans from which they were taken. Skips
        keys without a span and repeated keys.
        """
        keys = keys if isinstance(keys, list) else list(keys)
        at, of = 0, self.of
        while at < len(keys):
            segment = of.get(keys[at])
            if segment is None or segment.span is None:
                at += 1
                continue
            span = segment.span
            part, named = self._part(segment, keys, at)
            part.span = None
            yield span, part
            at += named

    def joined(self, segments: Sequence[Segment[SpanT]]) -> list[Segment[SpanT]]:
        """Join small segments with their neighbours. ``segments`` are dense and consecutive in a
        prefix."""
        groups: list[list[Segment[SpanT]]] = []
        size = 0
        for segment in segments:
            if groups and min(size, segment.live) < SMALL:
                groups[-1].append(segment)
                size += segment.live
            else:
                groups.append([segment])
                size = segment.live
        return [group[0] if len(group) == 1 else self._join(group) for group in groups]

    def _part(
        self, segment: Segment[SpanT], keys: list[Key], at: int
    ) -> tuple[Segment[SpanT], int]:
        """Split off the segment's keys that come next in a request. Returns the new segment and the
        number of the request's keys that it covers."""
        span = segment.span
        assert span is not None  # the caller has checked this
        forwards = False
        size = self._agreeing(segment, keys, at)
        if not size and span.fresh:  # a segment of single keys, in the order of insertion
            size = self._agreeing(segment, keys, at, forwards=True)
            forwards = True
        if not size:
            return self._loose(segment, keys, at)
        del segment.keys[: segment.start]
        segment.start = 0
        if size == segment.live:
            del span.segments[segment]
            if forwards:
                segment.keys.reverse()
            return segment, size
        return self._head(segment, size, forwards), size

    def _agreeing(
        self, segment: Segment[SpanT], keys: list[Key], at: int, *, forwards: bool = False
    ) -> int:
        """Return how many of the request's keys, from position ``at`` on, equal the segment's keys,
        from its head on."""
        if not self.is_dense(segment):
            return 0
        keys_max = min(segment.live, len(keys) - at)
        if forwards:
            own = segment.keys[segment.start : segment.start + keys_max]
        else:
            own = segment.keys[: -keys_max - 1 : -1]
        named = keys[at : at + keys_max]
        if own[0] != named[0]:
            return 0
        return keys_max if own == named else next(compress(count(), map(ne, own, named)))

    def _head(self, segment: Segment[SpanT], size: int, forwards: bool) -> Segment[SpanT]:
        """Cut off a segment's head.

        The larger part keeps the object, so that fewer entries of ``of`` change. If the segment is
        not the span's last one, the rest keeps the object, so that it keeps its position among the
        span's segments.
        """
        keys, span = segment.keys, segment.span
        assert span is not None
        if forwards:
            head, rest = keys[size - 1 :: -1], keys[size:]
        else:
            head, rest = keys[-size:], keys[:-size]
        if size <= len(rest) or next(reversed(span.segments)) is not segment:
            segment.keys, segment.live = rest, len(rest)
            return self.add(head, span)
        del span.segments[segment]
        span.segments[self.add(rest, span)] = None
        segment.keys, segment.live = head, len(head)
        return segment

    def _loose(
        self, segment: Segment[SpanT], keys: list[Key], at: int
    ) -> tuple[Segment[SpanT], int]:
        """Take keys out of the middle of a segment, which then has holes."""
        named = keys[at : at + _LOOSE_MAX]
        owners = map(self.of.get, named)
        end = next(compress(count(), map(is_not, owners, repeat(segment))), len(named))
        found = list(dict.fromkeys(named[:end]))
        found.reverse()
        segment.live -= len(found)
        assert segment.span is not None
        return self.add(found, segment.span), end

    def _join(self, group: Sequence[Segment[SpanT]]) -> Segment[SpanT]:
        """Join dense segments that are consecutive in a prefix; the largest absorbs the others."""
        largest = max(group, key=attrgetter("live"))
        joined: list[Key] = []
        for segment in reversed(group):
            joined += segment.keys
            if segment is not largest:
                self.of.update(zip(segment.keys, repeat(largest)))
        largest.keys, largest.live = joined, len(joined)
        return largest


def run_ends(owners: Sequence[object]) -> Iterable[int]:
    """Find the ends of runs of equal owners, including the end of the list.

    This runs at C speed, because a request may have thousands of keys, mostly of one owner.
    """
    if not owners or owners.count(owners[0]) == len(owners):
        return [len(owners)] if owners else []
    return chain(compress(count(1), map(is_not, owners, owners[1:])), [len(owners)])
