"""Every built-in policy passes the public conformance kit, and the kit detects planted faults.

With ``KVTIERS_BIG_TESTS=1`` speeds are compared between 10^4 and 10^6 keys too.
"""

from __future__ import annotations

import pytest

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction.lru import LruPolicy
from policies.registry import make_policy, policy_names
from policies.testing import PolicyContract


def _contract(name: str) -> type[PolicyContract]:
    def make(self: PolicyContract) -> EvictionPolicy:
        return make_policy(name)

    members = {"make_policy": make, "examples": 15}
    return type(f"Test_{name.replace('-', '_')}", (PolicyContract,), members)


for _name in policy_names():
    globals()[f"Test_{_name.replace('-', '_')}"] = _contract(_name)


class _ForgetsOne(LruPolicy):
    """Planted fault: names one victim too few."""

    def victims(self, count, evictable):
        return super().victims(count - 1 if count > 1 else count, evictable)


class _IgnoresPins(LruPolicy):
    def victims(self, count, evictable):
        return super().victims(count, lambda key: True)


class _KeepsRemoved(LruPolicy):
    def remove(self, key: Key, cause: RemoveCause) -> None:
        if cause is RemoveCause.EVICTED:
            super().remove(key, cause)


class _EvictsWhenAsked(LruPolicy):
    def victims(self, count, evictable):
        named = super().victims(count, evictable)
        for key in named:
            super().remove(key, RemoveCause.EVICTED)
        return named


class _HeadFirst(LruPolicy):
    """Breaks its promise: touches head to tail."""

    def touch(self, keys):
        super().touch(list(reversed(keys)))


class _NeverForgets(LruPolicy):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def insert(self, key, info):
        super().insert(key, info)
        self.seen.add(key)


class _ClearsHalf(LruPolicy):
    def __init__(self):
        super().__init__()
        self.count = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        super().insert(key, info)
        self.count += 1

    def victims(self, count, evictable):
        named = super().victims(len(self), evictable)
        return (named[::-1] if self.count > 500 else named)[:count]


class _Scans(LruPolicy):
    def touch(self, keys):
        self._part_of = {key: self._part_of[key] for key in self._part_of}
        super().touch(keys)


class _StartsAgain(LruPolicy):
    def victims(self, count, evictable):
        named = []
        for _ in range(count):
            named += super().victims(1, lambda key: evictable(key) and key not in named)  # noqa: B023  # called at once
        return named


class _Contract(PolicyContract):
    examples = 120
    shrink = False

    def __init__(self, made: type[EvictionPolicy]) -> None:
        self.made = made

    def make_policy(self) -> EvictionPolicy:
        return self.made()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (_ForgetsOne, lambda c: c.test_membership_follows_a_naive_model()),
        (_IgnoresPins, lambda c: c.test_membership_follows_a_naive_model()),
        (_IgnoresPins, lambda c: c.test_nothing_is_named_when_all_is_pinned()),
        (_KeepsRemoved, lambda c: c.test_membership_follows_a_naive_model()),
        (_EvictsWhenAsked, lambda c: c.test_membership_follows_a_naive_model()),
        (_EvictsWhenAsked, lambda c: c.test_nothing_is_named_when_all_is_pinned()),
        (_HeadFirst, lambda c: c.test_prefixes_stay_closed_if_promised(5)),
        (_NeverForgets, lambda c: c.test_memory_is_bounded_by_members()),
        (_ClearsHalf, lambda c: c.test_clear_forgets_history()),
        (_StartsAgain, lambda c: c.test_keys_that_must_stay_are_tested_a_few_times()),
        (_IgnoresPins, lambda c: c.test_keys_that_must_stay_are_tested_a_few_times()),
        (_Scans, lambda c: c.test_steps_hardly_grow()),
    ],
)
def test_the_kit_detects_planted_faults(fault, test) -> None:
    contract = _Contract(fault)
    with pytest.raises(AssertionError):
        test(contract)
