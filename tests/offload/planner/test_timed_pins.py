"""Chunks that clients have asked to keep stay for the requested time, and never take more than
their share."""

from __future__ import annotations

import random

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.planner.step_budget import EXPIRED_MAX
from offload.planner.timed_pins import TimedPins
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(4)


class Bed:
    def __init__(self, slots: int = 8, disk: int = 40, share: float = 0.5) -> None:
        self.cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        self.disk = TierIndex("disk", ByteCapacity(disk * 10), LruPolicy())
        groups = {0: GroupInfo("full", 16, (10,))}
        self.pins = TimedPins(self.cpu, [self.disk], groups, share)

    def put(self, index: TierIndex, *numbers: int) -> None:
        size = 1 if index is self.cpu else 10
        for number in numbers:
            keys, infos = [key(number)], [_info(size)]
            if index.reserve(keys, infos).locations:
                index.commit(keys, infos)


def _info(size: int) -> EntryInfo:
    return EntryInfo(size_bytes=size)


def test_kept_chunks_are_not_evicted_until_their_time_is_over() -> None:
    bed = Bed()
    bed.put(bed.cpu, *range(8))
    assert bed.pins.pin([key(0), key(1)], 60.0, now=100.0) == 2
    bed.put(bed.cpu, *range(10, 20))
    assert key(0) in bed.cpu
    assert key(1) in bed.cpu
    bed.pins.tick(159.0, EXPIRED_MAX)
    bed.put(bed.cpu, *range(20, 30))
    assert key(0) in bed.cpu
    bed.pins.tick(161.5, EXPIRED_MAX)
    bed.put(bed.cpu, *range(30, 40))
    assert key(0) not in bed.cpu
    assert bed.pins.used() == {"cpu": 0, "disk": 0}


def test_kept_chunks_are_dropped_like_other_chunks() -> None:
    bed = Bed()
    bed.put(bed.cpu, 0)
    bed.pins.pin([key(0)], 60.0, now=0.0)
    assert bed.cpu.drop([key(0)]) == [key(0)]
    assert bed.cpu.space.used == 0
    bed.cpu.check()


def test_pinned_chunks_never_exceed_their_share_of_the_tier() -> None:
    bed = Bed(slots=8, disk=4, share=0.5)
    bed.put(bed.cpu, *range(8))
    assert bed.pins.pin([key(n) for n in range(3)], 60.0, now=0.0) == 3
    assert bed.pins.pin([key(n) for n in range(3, 8)], 60.0, now=0.0) == 1
    assert bed.pins.refused == 4
    assert bed.pins.used() == {"cpu": 4, "disk": 20}
    bed.put(bed.cpu, *range(10, 20))
    assert len(bed.cpu) == 8
    assert bed.cpu.evictions == 10, "the other half is used as before"


def test_absent_chunks_are_not_kept() -> None:
    bed = Bed()
    assert bed.pins.pin([key(1), key(2)], 60.0, now=0.0) == 0
    assert bed.pins.used() == {"cpu": 0, "disk": 0}
    assert bed.pins.refused == 0


def test_chunks_after_a_hole_are_kept_but_not_reported() -> None:
    """The end of a prefix without its beginning cannot be loaded; that of a window can."""
    bed = Bed()
    bed.put(bed.cpu, 0, 2, 3)
    assert bed.pins.pin([key(n) for n in range(4)], 60.0, now=0.0) == 1
    assert bed.pins.used()["cpu"] == 3


def test_a_longer_time_replaces_a_shorter_one_and_not_the_reverse() -> None:
    bed = Bed()
    bed.put(bed.cpu, 0)
    for seconds in (10.0, 60.0, 20.0):
        bed.pins.pin([key(0)], seconds, now=0.0)
    bed.pins.tick(30.0, EXPIRED_MAX)
    assert bed.pins.used()["cpu"] == 1
    bed.pins.tick(62.0, EXPIRED_MAX)
    assert bed.pins.used()["cpu"] == 0


def test_pins_that_expire_together_are_released_in_portions() -> None:
    bed = Bed(slots=3 * EXPIRED_MAX, share=1.0)
    bed.put(bed.cpu, *range(2 * EXPIRED_MAX))
    bed.pins.pin([key(n) for n in range(2 * EXPIRED_MAX)], 1.0, now=0.0)
    bed.pins.tick(10.0, EXPIRED_MAX)
    assert bed.pins.used()["cpu"] == EXPIRED_MAX
    bed.pins.tick(10.0, EXPIRED_MAX)
    assert bed.pins.used()["cpu"] == 0


def test_memory_is_bounded_by_the_kept_chunks() -> None:
    """A client that requests other times again and again leaves one entry per chunk."""
    seed = 7
    rng = random.Random(seed)
    bed = Bed(slots=8, disk=8)
    bed.put(bed.cpu, *range(8))
    for now in range(2000):
        number = rng.randrange(8)
        bed.pins.pin([key(number)], rng.random() * 50, now=float(now))
        bed.pins.tick(float(now), EXPIRED_MAX)
        for tier in bed.pins._tiers:
            assert sum(map(len, tier._due.values())) == len(tier.until) <= 4, f"seed {seed}"
            assert len(tier._seconds) == len(tier._due) <= 52
    bed.pins.clear()
    assert bed.pins.used() == {"cpu": 0, "disk": 0}


def test_kept_chunks_are_not_skipped_again_at_each_eviction() -> None:
    """LRU must not meet all of the kept chunks before each victim."""
    bed = Bed(slots=1000, share=0.5)
    bed.put(bed.cpu, *range(1000))
    bed.pins.pin([key(n) for n in range(500)], 600.0, now=0.0)

    looked = 0
    victims = bed.cpu.policy.victims

    def counting(count: int, evictable: object) -> list[object]:
        def seen(name: object) -> bool:
            nonlocal looked
            looked += 1
            return bool(evictable(name))  # type: ignore[operator]  # a function

        return victims(count, seen)  # type: ignore[return-value]  # keys

    bed.cpu.policy.victims = counting  # type: ignore[method-assign, assignment]  # on purpose
    bed.put(bed.cpu, *range(2000, 2100))
    assert bed.cpu.evictions == 100
    assert looked < 20 * 100
