"""Evictions while half of a tier is protected: the right victims, for a bounded number of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from offload.index import retention
from offload.index.capacity import SlotCapacity
from offload.index.tier_index import TierIndex
from policies.base import EntryInfo, EvictionPolicy
from policies.registry import make_policy, policy_names

SLOTS, PROMPT, PIECE = 4000, 100, 4
FIRST = [[b"a%d.%d" % (prompt, at) for at in range(PROMPT)] for prompt in range(SLOTS // PROMPT)]
WANTED = Counter(key for prompt in FIRST[: len(FIRST) // 2] for key in prompt)
IN_ORDER_OF_USE = ("adaptive", "arc", "fifo", "leaf-lru", "lru", "slru", "ttl", "yours")
"""Policies that evict no new chunk before an old one here."""


class Yours(EvictionPolicy):
    """A user's policy, which knows nothing of protected keys."""

    def __init__(self) -> None:
        self._order: dict[Hashable, None] = {}

    def insert(self, key: Hashable, info: EntryInfo) -> None:
        self._order[key] = None

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order[key] = self._order.pop(key)

    def victims(self, count: int, evictable: Callable[[Hashable], bool]) -> list[Hashable]:
        found: list[Hashable] = []
        for key in self._order:
            if len(found) == count:
                break
            if evictable(key):
                found.append(key)
        return found

    def remove(self, key: Hashable, cause: object) -> None:
        self._order.pop(key, None)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)


def make(policy: str) -> EvictionPolicy:
    return Yours() if policy == "yours" else make_policy(policy)


def store(index: TierIndex, keys: Sequence[bytes]) -> list[bytes]:
    """A request stores its prompt piece by piece, then touches it. Returns what was evicted."""
    gone: list[bytes] = []
    for at in range(0, len(keys), PIECE):
        piece = keys[at : at + PIECE]
        infos = [EntryInfo(depth_tokens=16 * (at + n + 1)) for n in range(len(piece))]
        gone += index.reserve(piece, infos).evicted
        index.commit(piece, infos)
    index.touch(keys)
    return gone


def full_index(policy: str) -> TierIndex:
    index = TierIndex("cpu", SlotCapacity(SLOTS), make(policy))
    for keys in FIRST:
        store(index, keys)
    return index


@contextmanager
def counted_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the keys that policies test."""
    tested: Counter[str] = Counter()

    class Counting(retention.Evictable):
        def __call__(self, key: Hashable) -> bool:
            tested["keys"] += 1
            return super().__call__(key)

        def among(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
            tested["keys"] += len(keys)
            return super().among(keys)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "Evictable", Counting)
        yield tested


def new_prompts(count: int) -> Iterator[list[bytes]]:
    for prompt in range(count):
        yield [b"b%d.%d" % (prompt, at) for at in range(PROMPT)]


@pytest.mark.parametrize("policy", [*policy_names(), "yours"])
def test_an_eviction_costs_as_much_while_half_of_the_tier_is_wanted(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = full_index(policy)
    index.retention.register_ahead(frozenset(), WANTED)
    with counted_tests(monkeypatch) as tested:
        gone = [key for keys in new_prompts(15) for key in store(index, keys)]
    assert len(gone) == 1500
    assert WANTED.keys().isdisjoint(gone), "a wanted key was evicted"
    assert tested["keys"] < 30 * len(gone) + 4 * SLOTS
    assert getattr(index.policy, "faults", []) == []
    index.check()


@pytest.mark.parametrize("policy", IN_ORDER_OF_USE)
def test_the_victims_are_those_that_the_policy_names_one_by_one(policy: str) -> None:
    found = []
    for is_ahead in (True, False):
        index = full_index(policy)
        index.retention.register_ahead(frozenset(), WANTED)
        gone = []
        for number, keys in enumerate(new_prompts(15)):
            if not is_ahead:
                index._victims.clear()
            gone += store(index, keys)
            index.touch(FIRST[-1 - number % 5])  # uses of chunks that may have been named
        found.append(gone)
    assert found[0] == found[1]


def test_chunks_that_are_used_or_wanted_after_they_were_named_stay() -> None:
    index = full_index("lru")
    wanted = Counter(WANTED)
    index.retention.register_ahead(frozenset(), wanted)
    new = new_prompts(2)
    store(index, next(new))
    used, later = list(index._victims)[:40], list(index._victims)[40:60]  # type: ignore[call-overload]  # keys
    index.touch(used)
    wanted.update(later)
    gone = store(index, next(new))
    assert len(gone) == PROMPT
    assert not {*used, *later} & set(gone)


def test_chunks_that_have_left_the_tier_are_not_named() -> None:
    index = full_index("lru")
    index.retention.register_ahead(frozenset(), WANTED)
    new = new_prompts(3)
    store(index, next(new))
    dropped = list(index._victims)[:40]
    index.drop(dropped)  # type: ignore[arg-type]  # keys
    index.check()
    store(index, next(new))
    store(index, dropped)  # type: ignore[arg-type]  # keys
    index.check()
    assert not set(dropped) & set(store(index, next(new)))
    index.clear()
    index.check()


def test_what_is_wanted_is_evicted_when_nothing_else_is_left() -> None:
    index = full_index("adaptive")
    index.retention.register_ahead(frozenset(), WANTED)
    gone = index.evict(SLOTS // 2)
    assert WANTED.keys().isdisjoint(gone)
    assert set(index.evict(SLOTS // 4)) < WANTED.keys()
    index.check()
