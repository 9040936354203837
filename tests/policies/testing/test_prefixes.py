"""Bisection finds what a scan finds, with few probes, and the debug check finds holes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.eviction.fifo import FifoPolicy
from policies.eviction.leaf_lru import LeafLruPolicy
from policies.eviction.lru import LruPolicy
from policies.registry import make_policy, policy_names
from policies.simulation.simulator import SimTier
from policies.testing import INFO, synthetic_trace
from policies.testing.prefixes import PrefixHoleError, find_hole, longest_prefix


@given(st.integers(0, 300), st.integers(0, 300))
def test_bisection_equals_a_scan(length: int, held: int) -> None:
    probes = []

    def present(key: int) -> bool:
        probes.append(key)
        return key < held

    assert longest_prefix(range(length), present, closed=True) == min(length, held)
    assert len(probes) <= 2 + math.ceil(math.log2(max(1, length)))
    assert longest_prefix(range(length), present, closed=False) == min(length, held)


def test_an_open_tier_is_scanned() -> None:
    held = {0, 1, 3, 4}
    assert longest_prefix(range(6), held.__contains__, closed=False) == 2


def test_debug_names_the_hole() -> None:
    held = {0, 1, 3, 4}
    with pytest.raises(PrefixHoleError, match="key 3 of 6 is present and key 2 before it is not"):
        longest_prefix(range(6), held.__contains__, closed=True, debug=True)
    assert longest_prefix(range(2), held.__contains__, closed=True, debug=True) == 2
    assert find_hole([0, 1, 5], held.__contains__) is None


@pytest.mark.parametrize(
    "name", [n for n in policy_names() if make_policy(n).keeps_prefixes_closed]
)
def test_no_wrong_answer_where_the_promise_is_made(name: str) -> None:
    tier = SimTier(make_policy(name), 120)
    saved = scanned = 0
    for request in synthetic_trace(21, requests=800).requests:
        blocks = request.blocks()
        probes = []

        def present(key, probes=probes):
            probes.append(key)
            return key in tier.resident

        found = longest_prefix(blocks, present, closed=True)
        saved += len(probes)
        assert found == tier.leading(blocks)
        scanned += min(found + 1, len(blocks))
        fresh = [block for block in blocks if block not in tier.resident]
        tier.store(fresh, [INFO] * len(fresh), blocks)
        tier.touch(blocks)
    assert saved < scanned


def test_fifo_breaks_prefixes_and_says_so() -> None:
    assert not FifoPolicy.keeps_prefixes_closed
    tier = SimTier(FifoPolicy(), 120)
    holes = 0
    for request in synthetic_trace(21, requests=800).requests:
        blocks = request.blocks()
        holes += find_hole(blocks, tier.resident.__contains__) is not None
        fresh = [block for block in blocks if block not in tier.resident]
        tier.store(fresh, [INFO] * len(fresh), blocks)
        tier.touch(blocks)
    assert holes > 0


def _after_pinned_eviction(policy) -> set[str]:
    for key in "dcba":
        policy.insert(key, INFO)
    policy.touch("abcd")
    policy.insert("z", INFO)
    policy.touch("z")
    return set("abcdz") - set(policy.victims(1, lambda key: key != "d"))


def test_a_pinned_tail_keeps_its_prefix() -> None:
    """Plain LRU takes what is before a pinned tail; the leaf-first one and ours do not."""
    assert _after_pinned_eviction(LruPolicy()) == set("abdz")
    assert _after_pinned_eviction(LeafLruPolicy()) == set("abcd")
    assert _after_pinned_eviction(make_policy("adaptive")) == set("abcd")
