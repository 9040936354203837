"""LRU's parts, made small so that they are constantly joined and swept, compared with the simplest
LRU."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest

from policies.base import EntryInfo, Key, RemoveCause
from policies.eviction import lru
from policies.eviction.lru import LruPolicy

INFO = EntryInfo()


class _Naive:
    """Keys, oldest first."""

    def __init__(self) -> None:
        self.order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, keys: list[int]) -> None:
        self.order.update(dict.fromkeys(keys))

    def touch(self, keys: list[int]) -> None:
        for key in reversed(keys):
            if key in self.order:
                self.order.move_to_end(key)

    def victims(self, count: int, pinned: set[int]) -> list[Key]:
        return [key for key in self.order if key not in pinned][:count]


class _Pins:
    """Says which keys are not pinned, for one key or for many at once, as the index does."""

    def __init__(self, pinned: set[int]) -> None:
        self.pinned = pinned

    def __call__(self, key: Key) -> bool:
        return key not in self.pinned

    def among(self, keys: list[Key]) -> list[Key]:
        return list(filter(self, keys))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"PART_MAX": 5, "PART_MIN": 3, "STALE_PER_MEMBER": 1, "STALE_MIN": 4}
    for name, value in {**small, "PART_ENTRIES": 1, "PASSED_MAX": 3}.items():
        monkeypatch.setattr(lru, name, value)


def _live(seed: int) -> None:
    """Compare random operations. With seeds 160 and 173, parts are joined of which one has an old
    entry of a key of the other."""
    draw = random.Random(seed)
    policy, naive = LruPolicy(), _Naive()
    if draw.random() < 0.5:
        found = draw.sample(range(60), 20)
        policy.insert_all(dict.fromkeys(found, 4096), [INFO] * 20)
        naive.insert(found)
    for step in range(300):
        what = draw.randrange(5)
        some = draw.sample(range(60), draw.choice((1, 2, 4, 13)))
        if what == 0:
            new = [key for key in some if key not in naive.order]
            policy.insert_all(new, [INFO] * len(new))
            naive.insert(new)
        elif what == 1:
            some = some + some[: draw.randrange(3)]
            policy.touch(some)
            naive.touch(some)
        elif what == 2:
            policy.remove_all(some, RemoveCause.DROPPED)
            for key in some:
                naive.order.pop(key, None)
        elif what == 3 and some[0] not in naive.order:
            policy.insert(some[0], INFO)
            naive.insert(some[:1])
        else:
            pins = _Pins(set(draw.sample(range(60), draw.choice((0, 30)))))
            names = policy.victims(len(some), pins)
            assert names == naive.victims(len(some), pins.pinned), f"seed {seed}, step {step}"
            for key in names if draw.random() < 0.7 else ():
                policy.remove(key, RemoveCause.EVICTED)
                del naive.order[key]
        assert len(policy) == len(naive.order)
        assert policy._entries == sum(map(len, policy._parts))
    everything = policy.victims(99, lambda key: True)
    assert everything == list(naive.order), f"seed {seed}"


def _touched_often(seed: int) -> None:
    draw = random.Random(seed)
    policy = LruPolicy()
    policy.insert_all(list(range(20)), [INFO] * 20)
    for _ in range(300):
        policy.touch(draw.sample(range(20), draw.choice((1, 4))))
        assert policy._entries <= 2 * 20 + 4 + 4, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_stale_entries_are_bounded(seed: int) -> None:
    _touched_often(seed)


@pytest.mark.parametrize("seed", [*range(60), 160, 173])
def test_parts_are_in_the_order_of_use(seed: int) -> None:
    _live(seed)


def _one_stays(after_restart: bool) -> None:
    """The oldest key is pinned permanently, and all others come and go behind it."""
    policy = LruPolicy()
    keys = list(range(600))
    policy.insert_all(dict.fromkeys(keys, 4096) if after_restart else keys, [INFO] * 600)
    for new in range(600, 1800, 4):
        names = policy.victims(4, _Pins({0}))
        assert names == list(range(new - 599, new - 595))
        assert policy._looked <= 2 * 6 + 3 * 5 + 3, "what was evicted is passed again"
        policy.remove_all(names, RemoveCause.EVICTED)
        policy.insert_all(list(range(new, new + 4)), [INFO] * 4)


@pytest.mark.parametrize("after_restart", [False, True])
def test_victims_behind_a_pinned_key_are_not_skipped_forever(after_restart: bool) -> None:
    _one_stays(after_restart)


def test_a_key_that_is_touched_repeatedly_makes_few_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lru, "PART_ENTRIES", 8)
    policy = LruPolicy()
    policy.insert_all(list(range(4000)), [INFO] * 4000)
    for _ in range(6000):
        policy.touch([7])
    assert len(policy._parts) <= 2000


def _all_worlds() -> None:
    _one_stays(after_restart=False)
    _one_stays(after_restart=True)
    for seed in range(60):
        _live(seed)
        _touched_often(seed)


def _double_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruPolicy, "_keep_members", lambda self, part: None)


def _open_for_all(patch: pytest.MonkeyPatch) -> None:
    class Always(set):  # type: ignore[type-arg]  # of keys
        def isdisjoint(self, other: object) -> bool:
            return True

    start = LruPolicy.__init__

    def init(self: LruPolicy) -> None:
        start(self)
        self._open = Always()

    patch.setattr(LruPolicy, "__init__", init)


def _never_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruPolicy, "_sweep", lambda self, most: None)


def _never_tidied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruPolicy, "_tidy_oldest", lambda self, most: None)


@pytest.mark.parametrize("fault", [_double_places, _open_for_all, _never_swept, _never_tidied])
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        _all_worlds()
