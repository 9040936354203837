"""The kit finds holes in prefixes, and policies leave holes only if they promise nothing."""

from __future__ import annotations

from policies.eviction.fifo import FifoPolicy
from policies.eviction.leaf_lru import LeafLruPolicy
from policies.eviction.lru import LruPolicy
from policies.registry import make_policy
from policies.simulation.simulator import SimTier
from policies.testing import INFO, find_hole, synthetic_trace


def test_a_hole_is_an_absent_key_before_a_present_one() -> None:
    held = {0, 1, 3, 4}
    assert find_hole(range(6), held.__contains__) == (2, 3)
    assert find_hole([0, 1, 5], held.__contains__) is None
    assert find_hole([5, 7], held.__contains__) is None
    assert find_hole([], held.__contains__) is None


def test_fifo_breaks_prefixes_and_does_not_promise_otherwise() -> None:
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
    """Plain LRU evicts keys before a pinned tail; the leaf-first policy and ours do not."""
    assert _after_pinned_eviction(LruPolicy()) == set("abdz")
    assert _after_pinned_eviction(LeafLruPolicy()) == set("abcd")
    assert _after_pinned_eviction(make_policy("adaptive")) == set("abcd")
