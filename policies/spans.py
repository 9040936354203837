"""Spans: the keys that one request used last, and where they hang in the tree of prefixes.

A request that touches its keys takes them out of the spans of earlier requests and makes them
its own. What an earlier request leaves behind is the tail of its span; it hangs on the last key
that was taken. So whole conversations are handled as one thing, at the cost of a dict
entry per key, and eviction from the tail of spans that nothing hangs on keeps prefixes closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby, repeat

from policies.base import Key


class Span:
    """Keys last used at ``time``, tail first; ``live`` of them are still in this span.

    ``kind`` is the class of spans whose fate is expected to be alike, ``sort`` the part of it
    that is told apart when choosing victims; ``turn`` counts the requests
    of its conversation, ``gap`` is the time since the last of them. ``size`` counts its keys like
    ``live``, but with those that were evicted. ``kept`` belongs to the shadow caches.
    """

    __slots__ = (
        "fresh",
        "gap",
        "hangs_on",
        "kept",
        "keys",
        "kind",
        "label",
        "live",
        "shared",
        "size",
        "sort",
        "start",
        "time",
        "turn",
    )

    def __init__(self, time: int, keys: list[Key]) -> None:
        self.time = time
        self.keys = keys
        self.start = 0  # keys before this place have left the span
        self.live = self.size = len(keys)
        self.kind: tuple[Hashable, ...] = ()
        self.sort: tuple[Hashable, ...] = ()
        self.turn = 0
        self.gap = 0
        self.label = ""
        self.shared = False  # the part of a prefix that several conversations use
        self.fresh = False  # inserted, not touched yet
        self.hangs_on: Key | None = None
        self.kept = [0, 0]


class Taken:
    """A span that a touch took keys from: how many, and whether some were left behind."""

    __slots__ = ("count", "end", "rest", "span")

    def __init__(self, span: Span, count: int, end: int, rest: bool) -> None:
        self.span = span
        self.count = count
        self.end = end
        self.rest = rest


class SpanTree:
    """Which span each member is in, and what hangs on which key."""

    def __init__(self) -> None:
        self.span_of: dict[Key, Span] = {}  # the policy takes single keys out by itself
        self.hanging: dict[Key, OrderedDict[Span, None]] = {}

    def take(self, keys: Sequence[Key]) -> tuple[Sequence[Key], list[Taken]]:
        """Take keys, given in prefix order, out of their spans; returns the members among them
        and the spans they came from. The caller enters them in new spans."""
        get = self.span_of.get
        owners = [get(key) for key in keys]
        if None in owners:
            pairs = [(k, owner) for k, owner in zip(keys, owners, strict=True) if owner]
            keys, owners = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        taken: list[Taken] = []
        end = 0
        for span, group in groupby(owners):
            assert span is not None  # filtered above; said for the type checker
            count = len(list(group))
            end += count
            span.live -= count
            span.size -= count
            taken.append(Taken(span, count, end, span.live > 0))
            if span.live and not span.fresh:
                self._hang(span, keys[end - 1])
            elif not span.live:
                self.unhang(span)
        return keys, taken

    def enter(self, span: Span, hangs_on: Key | None = None) -> None:
        """Make a new span the owner of its keys."""
        self.span_of.update(zip(span.keys, repeat(span)))
        if hangs_on is not None:
            self._hang(span, hangs_on)

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
        span_of, hanging = self.span_of, self.hanging
        stack = [(span, self._first(span))]
        missing = count - len(found)
        while stack:
            span, first = stack.pop()
            keys = span.keys
            for place in range(first, len(keys)):
                if missing <= 0:
                    return
                key = keys[place]
                if key in found or span_of.get(key) is not span:
                    continue
                if key in hanging:
                    below = next((s for s in hanging[key] if self._left(s, found)), None)
                    if below is not None:
                        if any(below is waiting for waiting, _ in stack):
                            return
                        stack.append((span, place))
                        stack.append((below, self._first(below)))
                        break
                if not evictable(key):
                    return
                found[key] = None
                missing -= 1

    def _first(self, span: Span) -> int:
        """The place of the span's last member in the prefix; what left before it is skipped."""
        keys, span_of = span.keys, self.span_of
        while span.start < len(keys) and span_of.get(keys[span.start]) is not span:
            span.start += 1
        return span.start

    def _left(self, span: Span, found: dict[Key, None]) -> bool:
        """Whether a span has members that are not chosen yet; its head is chosen last."""
        keys, span_of = span.keys, self.span_of
        while keys and span_of.get(keys[-1]) is not span:
            keys.pop()
        return bool(keys) and keys[-1] not in found

    def _hang(self, span: Span, key: Key) -> None:
        self.unhang(span)
        span.hangs_on = key
        self.hanging.setdefault(key, OrderedDict())[span] = None
