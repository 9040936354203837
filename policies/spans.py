"""Spans: the keys that one request used last, and where they hang in the tree of prefixes.

A request that touches its keys takes them out of the spans of earlier requests and makes them
its own. What an earlier request leaves behind is the tail of its span; it hangs on the last key
that was taken. So whole conversations are handled as one thing, at the cost of a dict
entry per key, and eviction from the tail of spans that nothing hangs on keeps prefixes closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count, repeat
from operator import is_not

from policies.base import Key, free_among


class Span:
    """Keys last used at ``time``, tail first; ``live`` of them are still in this span.

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
        self.begin(time, keys)

    def begin(self, time: int, keys: list[Key]) -> None:
        """Be a new span of these keys."""
        self.time = time
        self.keys = keys
        self.start = 0  # keys before this place have left the span
        self.live = self.size = len(keys)
        self.by_age = self.by_score = 0
        self.kind = self.sort = 0
        self.turn = self.gap = 0
        self.label = ""
        self.shared = False  # the part of a prefix that several conversations use
        self.fresh = False  # inserted, not touched yet
        self.hangs_on: Key | None = None


Taken = tuple[Span, int, int, bool]
"""A span that a touch took keys from, how many, where they end in the request, and whether some
were left behind. A plain tuple, because two are made for every request."""


class SpanTree:
    """Which span each member is in, and what hangs on which key."""

    def __init__(self) -> None:
        self.span_of: dict[Key, Span] = {}  # the policy takes single keys out by itself
        self.hanging: dict[Key, OrderedDict[Span, None]] = {}

    def take(self, keys: Sequence[Key]) -> tuple[Sequence[Key], list[Taken]]:
        """Take keys, given in prefix order, out of their spans; returns the members among them
        and the spans they came from. The caller enters them in new spans."""
        if len(set(keys)) < len(keys):  # a key may be used twice, but live in one place only
            keys = list(dict.fromkeys(keys))
        owners: list[Span | None] = list(map(self.span_of.get, keys))
        if None in owners:
            keys = list(compress(keys, owners))
            owners = list(filter(None, owners))
        taken: list[Taken] = []
        start = 0
        for end in _run_ends(owners):
            span, size = owners[start], end - start
            assert span is not None  # filtered above; said for the type checker
            start = end
            span.live -= size
            span.size -= size
            taken.append((span, size, end, span.live > 0))
            if not span.live:
                if span.hangs_on is not None:
                    self.unhang(span)
            elif not span.fresh:
                self._hang(span, keys[end - 1])
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
        if self._drain_run(span, count, evictable, found):
            return
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

    def _drain_run(
        self, span: Span, count: int, evictable: Callable[[Key], bool], found: dict[Key, None]
    ) -> bool:
        """Drain in the usual case, where all wanted keys may go and nothing hangs on them; does
        nothing otherwise. Returns which."""
        first, keys = self._first(span), span.keys
        if span.live != len(keys) - first:
            self._left(span, found)  # forgets the heads that left
            if span.live != len(keys) - first:
                return False
        run = keys[first : first + count - len(found)]
        if not self.hanging.keys().isdisjoint(run):
            return False
        if len(free_among(evictable, run)) < len(run):
            return False
        if found and not found.keys().isdisjoint(run):
            return False
        found.update(dict.fromkeys(run))
        return True

    def _first(self, span: Span) -> int:
        """The place of the span's last member in the prefix; what left before it is skipped."""
        keys, span_of = span.keys, self.span_of
        while span.start < len(keys) and span_of.get(keys[span.start]) is not span:
            span.start += 1
        if span.start > 1024 and 2 * span.start > len(keys):
            del keys[: span.start]
            span.start = 0
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


def _run_ends(owners: Sequence[object]) -> Iterable[int]:
    """Where the next one is another, and the end: at the speed of C, because a request may have
    thousands of keys, mostly of one span."""
    if not owners or owners.count(owners[0]) == len(owners):
        return [len(owners)] if owners else []
    return chain(compress(count(1), map(is_not, owners, owners[1:])), [len(owners)])
