"""Tests when uses are reported to policies: a long request is reported in parts, with the same
result as if it were reported at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from offload.index.capacity import ByteCapacity
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.planner import recency as uses
from offload.planner.recency import RequestUses
from policies.base import EntryInfo, EvictionPolicy, Key
from policies.eviction.lru import LruPolicy

KEYS = [number.to_bytes(4) for number in range(40)]


class WholeRequests(LruPolicy):
    takes_parts = False


class RecordingLru(LruPolicy):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def touch(self, keys):  # type: ignore[no-untyped-def]  # as in the base
        self.calls.append(f"touch {len(keys)}")
        super().touch(keys)

    def advise(self, keys, hints):  # type: ignore[no-untyped-def]  # as in the base
        self.calls.append(f"advise {len(keys)}")


def index_of(policy: EvictionPolicy) -> TierIndex:
    index = TierIndex("cpu", ByteCapacity(1000), policy)
    index.recover(KEYS, [EntryInfo()] * len(KEYS))
    return index


def order(index: TierIndex) -> list[Key]:
    return index.policy.victims(len(index), lambda key: True)


def into(cpu: TierIndex, *lower: TierIndex) -> Callable[[int, Sequence[Key]], None]:
    """Reports uses in these tiers."""
    tiers = dict(enumerate((cpu, *lower), CPU))
    return lambda tier, keys: tiers[tier].touch(keys)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "USE_KEYS_MAX", 3)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7, 20])
def test_a_use_reported_in_parts_equals_one_reported_at_once(count: int) -> None:
    at_once, by_parts = index_of(LruPolicy()), index_of(LruPolicy())
    at_once.touch(KEYS[:count])
    noted = RequestUses(by_parts, (), into(by_parts))
    noted.ended(KEYS[:count], {})
    steps = 0
    while order(by_parts) != order(at_once):
        noted.step()
        steps += 1
        assert steps < 10
    assert steps == max(0, count - 1) // 3


def test_a_step_reports_one_part_and_hints_come_last() -> None:
    policy = RecordingLru()
    index = index_of(policy)
    noted = RequestUses(index, (), into(index))
    noted.ended(KEYS[:7], {"session_end": True})
    assert policy.calls == ["touch 3"]
    noted.step()
    assert policy.calls == ["touch 3", "touch 3"]
    noted.step()
    assert policy.calls == ["touch 3", "touch 3", "touch 1", "advise 7"]
    noted.step()
    assert len(policy.calls) == 4


@pytest.mark.parametrize("make", [WholeRequests])
def test_a_policy_that_examines_requests_gets_complete_ones(make: Callable[[], LruPolicy]) -> None:
    at_once, index = index_of(LruPolicy()), index_of(make())
    noted = RequestUses(index, (), into(index))
    noted.ended(KEYS[:20], {})
    assert noted.is_long
    assert order(index) == KEYS, "the hook must not wait for it"
    assert noted.step() == 20
    at_once.touch(KEYS[:20])
    assert order(index) == order(at_once)


def test_each_tier_gets_uses_as_its_policy_accepts_them() -> None:
    class Whole(RecordingLru):
        takes_parts = False

    policies = Whole(), RecordingLru()
    cpu, disk = map(index_of, policies)
    noted = RequestUses(cpu, [disk], into(cpu, disk))
    noted.ended(KEYS[:7], {"session_end": True})
    assert not policies[0].calls
    while noted.step():
        pass
    assert policies[0].calls == ["touch 7", "advise 7"]
    assert policies[1].calls == ["touch 3", "touch 3", "touch 1", "advise 7"]
    noted.ended(KEYS[:3], {})
    assert policies[0].calls[2:] == policies[1].calls[4:] == ["touch 3"], (
        "short requests must be reported at once"
    )


def test_deferred_uses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "BEHIND_MAX", 4)
    policy = RecordingLru()
    index = index_of(policy)
    noted = RequestUses(index, (), into(index))
    for _ in range(10):
        noted.ended(KEYS, {})
    parts = 14 * 10
    assert len(policy.calls) == parts - 4


def test_a_reset_forgets_deferred_uses() -> None:
    policy = RecordingLru()
    index = index_of(policy)
    noted = RequestUses(index, (), into(index))
    noted.ended(KEYS, {})
    noted.clear()
    noted.step()
    assert policy.calls == ["touch 3"]
