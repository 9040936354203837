"""Eviction skips retained chunks without changing their order."""

from __future__ import annotations

import pytest

from offload.index.capacity import SlotCapacity
from offload.index.tier_index import TierIndex
from policies.base import EntryInfo
from policies.registry import make_policy

CHUNKS = 200
RETAIN = {
    "kept": lambda index, keys: index.retention.register_client_pins(keys),
    "held": lambda index, keys: index.retention.register_load_holds(keys),
}
PREFIX = [b"a%03d" % number for number in range(CHUNKS)]
OTHERS = [b"b%03d" % number for number in range(CHUNKS)]


def full_index(policy: str) -> TierIndex:
    """Two prompts, the older one ``PREFIX``, fill the tier."""
    index = TierIndex("cpu", SlotCapacity(2 * CHUNKS), make_policy(policy))
    for keys in (PREFIX, OTHERS):
        infos = [EntryInfo()] * CHUNKS
        index.reserve(keys, infos)
        index.commit(keys, infos)
        index.touch(keys)
    return index


@pytest.mark.parametrize("policy", ["lru", "adaptive", "leaf-lru", "lfu"])
@pytest.mark.parametrize("why", ["kept", "held", "pinned"])
def test_the_head_of_a_retained_prefix_is_still_evicted_last(policy: str, why: str) -> None:
    index = full_index(policy)
    if why == "pinned":
        index.pin(PREFIX)
    else:
        RETAIN[why](index, frozenset(PREFIX))
    gone = index.evict(CHUNKS // 2)
    assert len(gone) == CHUNKS // 2
    assert not set(gone) & set(PREFIX)
    if why == "pinned":
        index.unpin(PREFIX)
    else:
        RETAIN[why](index, frozenset())
    order = [key for key in index.policy.victims(2 * CHUNKS, lambda key: True) if key in PREFIX]
    assert order == PREFIX[::-1]
