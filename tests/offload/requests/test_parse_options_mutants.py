"""Planted faults: with each of them in the product, the check of what it breaks fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.planner.loads import LoadPlanner
from offload.planner.timed_pins import TimedPins, _TierPins
from offload.planner.write_through import WriteThroughQueue
from offload.requests import parse_options as controls
from tests.offload.planner import test_timed_pins as pins
from tests.offload.requests import test_parse_options as served

Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_values_are_swallowed(patch: pytest.MonkeyPatch) -> None:
    parse = controls.parse_controls
    patch.setattr(served, "parse_controls", lambda *about: (parse(*about)[0], []))


def without(field: str, value: Any) -> Patch:
    """One field of the controls is never set."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        parse = controls.parse_controls

        def blind(*about: Any) -> Any:
            found, wrong = parse(*about)
            return replace(found, **{field: value}), wrong

        patch.setattr(served, "parse_controls", blind)

    return plant


def instead(owner: type, name: str, found: Any) -> Patch:
    """The method returns this, whatever its arguments are."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: found)


def pins_without_bound(patch: pytest.MonkeyPatch) -> None:
    begin = _TierPins.__init__

    def endless(self: _TierPins, index: Any, sizes: Any, most: int) -> None:
        begin(self, index, sizes, 1 << 60)

    patch.setattr(_TierPins, "__init__", endless)


def high_is_not_recognized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.planner.stores.HIGH", "another word")


def low_may_have_the_whole_budget(patch: pytest.MonkeyPatch) -> None:
    can_load = LoadPlanner.can_load
    patch.setattr(LoadPlanner, "can_load", lambda self, a, b, _low=False: can_load(self, a, b))


MUTANTS: dict[str, tuple[Patch, Callable[[], None]]] = {
    "wrong values are swallowed": (
        wrong_values_are_swallowed,
        lambda: served.test_a_wrong_control_is_described({"pin_s": -1}, "seconds"),
    ),
    "a wrong list allows all tiers": (
        without("no_store", value=False),
        served.test_a_wrong_list_of_tiers_allows_none,
    ),
    "tiers that may be read are ignored": (
        without("read", None),
        served.test_only_allowed_tiers_are_read,
    ),
    "tiers that may be written are ignored": (
        without("write", None),
        served.test_a_prompt_can_be_kept_off_the_disk,
    ),
    "low priority displaces": (
        instead(WriteThroughQueue, "_may_displace", True),
        served.test_low_priority_does_not_displace_on_the_disk,
    ),
    "low priority has the whole load budget": (
        low_may_have_the_whole_budget,
        served.test_low_priority_may_use_half_of_the_load_budget,
    ),
    "high priority does not pass": (
        high_is_not_recognized,
        served.test_high_priority_passes_admission_but_not_the_write_budget,
    ),
    "pins never end": (
        instead(TimedPins, "tick", None),
        pins.test_kept_chunks_are_not_evicted_until_their_time_is_over,
    ),
    "pins have no bound": (
        pins_without_bound,
        pins.test_pinned_chunks_never_exceed_their_share_of_the_tier,
    ),
    "pins keep nothing": (
        instead(_TierPins, "pin", 2),
        pins.test_kept_chunks_are_not_evicted_until_their_time_is_over,
    ),
    "pins survive a reset": (
        instead(TimedPins, "clear", None),
        pins.test_memory_is_bounded_by_the_kept_chunks,
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = MUTANTS[fault]
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
