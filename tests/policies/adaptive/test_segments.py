"""Spans made of segments, compared with spans that know the owner of every key."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from policies.adaptive import AdaptivePolicy, segments, span_tree
from policies.adaptive.segments import Segment, Segments, SpanT
from policies.adaptive.span_tree import Span, SpanTree
from policies.base import EntryInfo, Key, RemoveCause

LONG = 8192
INFO = EntryInfo()


class _Full(Exception):
    """A drain has reached its end."""


class _Naive:
    """Spans as lists of their members, tail first, and the keys of which they are children."""

    def __init__(self) -> None:
        self.spans: dict[Span, list[int]] = {}
        self.hanging: dict[Span, int] = {}  # the child added last is the last

    def owner(self, key: int) -> Span | None:
        return next((span for span, keys in self.spans.items() if key in keys), None)

    def take(self, keys: Sequence[int]) -> list[tuple[Span, int, int, bool]]:
        """The numbers of keys from each segment, their ends, and whether some are left."""
        taken: list[tuple[Span, list[int]]] = []
        for key in dict.fromkeys(keys):
            span = self.owner(key)
            if span is not None:
                if not taken or taken[-1][0] is not span:
                    taken.append((span, []))
                taken[-1][1].append(key)
        expected, end = [], 0
        for span, mine in taken:
            end += len(mine)
            self.spans[span] = [key for key in self.spans[span] if key not in mine]
            self.hanging.pop(span, None) if not self.spans[span] or not span.fresh else None
            if self.spans[span] and not span.fresh:
                self.hanging[span] = mine[-1]
            expected.append((span, len(mine), end, bool(self.spans[span])))
        return expected

    def remove(self, key: int) -> None:
        span = self.owner(key)
        assert span is not None
        self.spans[span].remove(key)
        self.hanging = {s: k for s, k in self.hanging.items() if k != key}
        if not self.spans[span]:
            self.hanging.pop(span, None)

    def drain(self, span: Span, count: int, pinned: set[int]) -> list[int]:
        found: list[int] = []

        def go(span: Span) -> None:
            for key in self.spans[span]:
                for below, on in self.hanging.items():
                    if on == key and self.spans[below] and self.spans[below][-1] not in found:
                        go(below)
                if key not in found:
                    if len(found) == count or key in pinned:
                        raise _Full
                    found.append(key)

        with suppress(_Full):
            go(span)
        return found


class _TreeAndNaive:
    """Runs the two implementations side by side."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tree, self.naive = SpanTree(), _Naive()
        self.prompts: list[list[int]] = []
        self.made = 0

    def arrive(self) -> None:
        """A prompt that continues another, or begins like it, stored in any way."""
        draw = self.draw
        start = list(draw.choice(self.prompts)) if self.prompts and draw.random() < 0.7 else []
        if draw.random() < 0.4:
            start = start[: draw.randint(0, len(start))]
        new = list(range(self.made, self.made + draw.choice([0, 1, 4, 12])))
        self.made += len(new)
        self.prompts = [*self.prompts[-5:], [*start, *new]]
        fresh = self.fresh()
        while new:
            size = draw.randint(1, len(new))
            part, new = new[:size], new[size:]
            self.add(fresh, part if draw.random() < 0.3 else part[::-1])

    def fresh(self) -> Span:
        found = [span for span in self.naive.spans if span.fresh]
        return self.draw.choice(found) if found and self.draw.random() < 0.5 else self.new(True)

    def new(self, fresh: bool = False) -> Span:
        span = Span(0, fresh=fresh)
        self.naive.spans[span] = []
        return span

    def add(self, span: Span, keys: list[int]) -> None:
        self.naive.spans[span] += keys
        self.tree.add(span, list(keys))

    def touch(self) -> None:
        keys = list(self.draw.choice(self.prompts))
        if self.draw.random() < 0.3:
            keys += self.draw.choices(keys or [-1], k=3)  # twice, or never stored
        if self.draw.random() < 0.1:
            self.draw.shuffle(keys)
        if self.draw.random() < 0.1:
            keys = keys[self.draw.randint(0, len(keys)) :]
        members = [key for key in dict.fromkeys(keys) if self.naive.owner(key)]
        expected = self.naive.take(keys)
        taken = self.tree.take(keys)
        assert [part[:4] for part in taken] == expected
        if not taken:
            return
        parts = self.draw.choice([len(taken), self.draw.randint(1, len(taken))])
        above, below = taken[:parts], taken[parts:]
        head = self.new()
        self.naive.spans[head] = members[: above[-1][2]][::-1]
        self.tree.enter(head, above)
        if below:
            tail = self.new()
            self.naive.spans[tail] = members[above[-1][2] :][::-1]
            self.naive.hanging[tail] = members[above[-1][2] - 1]
            self.tree.enter(tail, below, above[-1])

    def drain(self) -> None:
        span = self.draw.choice(list(self.naive.spans))
        members = [key for keys in self.naive.spans.values() for key in keys]
        pinned = set(self.draw.sample(members, min(len(members), self.draw.choice([0, 0, 2]))))
        count = self.draw.randint(1, 20)
        found: dict[Key, None] = {}
        self.tree.drain(span, count, lambda key: key not in pinned, found)
        assert list(found) == self.naive.drain(span, count, pinned)
        if self.draw.random() < 0.7:
            self.leave(list(found))

    def drop(self) -> None:
        if self.tree.segments.of:
            self.leave([self.draw.choice(list(self.tree.segments.of))])

    def leave(self, keys: list[Key]) -> None:
        for key in keys:
            assert isinstance(key, int)
            self.naive.remove(key)
            segment = self.tree.segments.of.pop(key)
            span = segment.span
            assert span is not None
            self.tree.segments.left(segment, [key])
            span.live -= 1
            if key in self.tree.hanging:
                self.tree.orphan(key)
            if not span.live:
                self.tree.unhang(span)

    def check(self) -> None:
        of = self.tree.segments.of
        for span, keys in self.naive.spans.items():
            mine = [s for s in span.segments if s.live]
            assert all(segment.span is span for segment in mine)
            live = [[k for k in s.keys[s.start :] if of.get(k) is s] for s in mine]
            assert [len(part) for part in live] == [segment.live for segment in mine]
            assert [key for part in live for key in part] == keys
            assert span.live == len(keys)
        hanging = [(s, k) for k, spans in self.tree.hanging.items() for s in spans]
        assert dict(hanging) == self.naive.hanging
        assert len(of) == sum(map(len, self.naive.spans.values()))
        self.naive.spans = {s: keys for s, keys in self.naive.spans.items() if keys or s.fresh}


@pytest.mark.parametrize("small", [0, 3])
@pytest.mark.parametrize("seed", range(25))
def test_segments_equal_single_keys(seed: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SMALL", small)
    monkeypatch.setattr(segments, "_LOOSE_MAX", 3)
    monkeypatch.setattr(segments, "_LEFT_MAX", 2)
    world = _TreeAndNaive(seed)
    for _ in range(150):
        world.arrive()
        for act in world.draw.choices([world.touch, world.drain, world.drop], [4, 3, 1], k=3):
            act()
        world.check()


class _Counting(dict[Key, Segment]):
    """Counts lookups and changes of single keys."""

    looks = changes = 0

    def get(self, key, default=None):  # type: ignore[no-untyped-def]  # as in dict
        self.looks += 1
        return super().get(key, default)

    def update(self, pairs):  # type: ignore[no-untyped-def, override]  # as it is used
        pairs = list(pairs)
        self.changes += len(pairs)
        super().update(pairs)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    """The segments by key of the policy that is made next."""
    found = _Counting()

    class Counted(Segments[SpanT]):
        def __init__(self) -> None:
            super().__init__()
            self.of = found

    monkeypatch.setattr(span_tree, "Segments", Counted)
    return found


def test_a_long_request_is_not_touched_key_by_key(counting: _Counting) -> None:
    policy = AdaptivePolicy()
    keys = list(range(LONG))
    for first in range(0, LONG, 128):  # as the index commits them
        part = keys[first : first + 128][::-1]
        policy.insert_all(part, [INFO] * len(part))
    counting.looks = counting.changes = 0
    policy.touch(keys)
    policy.touch(keys)
    more = list(range(LONG, LONG + 40))
    policy.insert_all(more[::-1], [INFO] * len(more))
    changes = counting.changes
    policy.touch(keys + more)
    assert counting.looks < 300
    assert (changes, counting.changes) == (len(more), len(more))


def test_an_evicted_tail_is_cut_off_without_touching_each_key(counting: _Counting) -> None:
    policy = AdaptivePolicy()
    keys = list(range(LONG))
    policy.insert_all(keys[::-1], [INFO] * LONG)
    policy.touch(keys)
    counting.looks = counting.changes = 0
    for end in range(LONG, LONG // 4, -128):
        gone = policy.victims(128, lambda key: True)
        assert gone == keys[end - 128 : end][::-1]
        policy.remove_all(gone, RemoveCause.EVICTED)
    assert counting.looks < 300
    (segment,) = set(counting.values())
    assert len(segment.keys) < LONG, "what has left is not kept forever"


def test_a_recovered_tier_is_not_scanned_because_of_a_hole(counting: _Counting) -> None:
    """All of its keys are from before the restart, so their owners are unknown."""
    policy = AdaptivePolicy()
    keys = list(range(50_000))
    policy.insert_all(dict.fromkeys(keys), [INFO] * len(keys))
    for first in (100, 20_000):
        policy.touch(keys[first : first + 100])
    counting.looks = counting.changes = 0
    for _ in range(50):
        policy.remove_all(policy.victims(1, lambda key: True), RemoveCause.EVICTED)
    assert counting.looks < 50 * 110
    assert max(len(segment.keys) for segment in counting.values()) <= 5000


def test_few_keys_at_a_time_form_one_segment(counting: _Counting) -> None:
    policy = AdaptivePolicy()
    for key in range(1000):
        policy.insert_all([key], [INFO])
    assert len(set(counting.values())) == 1
    policy.touch(list(range(0, 1000, 2)))
    policy.touch(list(range(1, 1000, 2)))
    assert len(set(counting.values())) <= 4
    assert policy.victims(3, lambda key: True) == [998, 996, 994]


@pytest.mark.parametrize("how", ["touched", "evicted"])
def test_departed_keys_are_freed_at_once(how: str, counting: _Counting) -> None:
    """Without the collector of cycles, which a server runs rarely."""
    policy = AdaptivePolicy()
    gc.collect()
    before = _segments_alive()  # of other tests' policies
    gc.disable()
    try:
        for turn in range(300):
            keys = list(range(100 * turn, 100 * turn + 100))
            policy.insert_all(keys[::-1], [INFO] * len(keys))
            policy.touch([*keys[1:], keys[0]] if how == "touched" else keys)
            policy.touch(keys)
            if how == "evicted":
                policy.remove_all(policy.victims(100, lambda key: True), RemoveCause.DROPPED)
            else:
                policy.touch([*keys, *range(100 * turn)])
        assert _segments_alive() - before == len(set(counting.values()))
    finally:
        gc.enable()


def _segments_alive() -> int:
    return sum(isinstance(thing, Segment) for thing in gc.get_objects())
