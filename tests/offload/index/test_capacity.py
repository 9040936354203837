"""Slots of the CPU tier are given out as soon as the ranks can use them."""

from __future__ import annotations

from offload.index.capacity import SlotCapacity, UsableSlots
from offload.index.tier_index import TierIndex
from offload.messages.report import StepReport
from offload.planner.planner import Planner
from policies.eviction.lru import LruPolicy


def taken(space: SlotCapacity) -> list[int]:
    """The available slots, in the order in which they are given out."""
    found = []
    while (slot := space.take(1)) is not None:
        found.append(slot)
    return found


def test_slots_that_are_not_usable_yet_are_not_given_out() -> None:
    space = SlotCapacity(6, first=10, usable=2)
    assert space.take_all([1] * 3) is None
    assert space.missing_all([1] * 3) == 1
    assert taken(space) == [10, 11]
    assert space.missing(1) == 1
    space.grow(4)
    assert taken(space) == [12, 13]
    space.grow(3)
    assert taken(space) == [], "the number of usable slots only grows"
    space.grow(99)
    assert taken(space) == [14, 15]
    assert (space.used, space.capacity) == (6, 6)


def test_a_freed_slot_comes_before_new_ones() -> None:
    space = SlotCapacity(4, usable=1)
    assert space.take(1) == 0
    space.give(0)
    space.grow(4)
    assert taken(space) == [0, 1, 2, 3]


def test_the_slowest_rank_decides() -> None:
    space = SlotCapacity(8, usable=2)
    slots = UsableSlots(space, {0: 2, 1: 4})
    slots.take_in({0: 8})
    assert taken(space) == [0, 1, 2, 3]
    slots.take_in({})
    assert taken(space) == []
    slots.take_in({1: 6})
    assert taken(space) == [4, 5]


def test_reports_of_ranks_reach_the_slots() -> None:
    space = SlotCapacity(8, usable=0)
    slots = UsableSlots(space, {0: 0, 1: 0})
    planner = Planner({}, TierIndex("cpu", space, LruPolicy()), slots=slots)
    one, other = StepReport(usable={0: 5}), StepReport(usable={1: 3})
    assert not one.empty
    planner.complete(one.merge(other))
    assert taken(space) == [0, 1, 2]
