"""Eviction skips retained chunks: only once, and without reversing the order of a prefix."""

from __future__ import annotations

import pytest

from offload.index.capacity import SlotCapacity
from offload.index.retention import Evictable, OwnChunks
from offload.index.tier_index import TierIndex
from policies.base import EntryInfo
from policies.registry import make_policy

CHUNKS = 200
RETAIN = {
    "kept": lambda index, keys: index.retention.keep(keys),
    "held": lambda index, keys: index.retention.hold(keys),
}
PREFIX = [b"a%03d" % number for number in range(CHUNKS)]
OTHERS = [b"b%03d" % number for number in range(CHUNKS)]


def full_index(policy: str) -> TierIndex:
    """Two prompts, the older one ``PREFIX``, fill the tier."""
    index = TierIndex("cpu", SlotCapacity(2 * CHUNKS), make_policy(policy))
    for keys in (PREFIX, OTHERS):
        index.reserve(keys, [EntryInfo()] * CHUNKS)
        index.commit(keys)
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


@pytest.mark.parametrize("why", ["kept", "held", "pinned"])
def test_lru_skips_retained_chunks_once(why: str) -> None:
    index = full_index("lru")
    if why == "pinned":
        index.pin(PREFIX)
    else:
        RETAIN[why](index, frozenset(PREFIX))
    index.evict(1)
    asked: list[object] = []
    index.policy.victims(1, lambda key: asked.append(key) is None)
    assert len(asked) < CHUNKS // 2
    assert not set(asked) & set(PREFIX)


def test_own_chunks_may_be_evicted_once_a_lower_tier_holds_them() -> None:
    own = OwnChunks([{b"saved": 1}])
    own.add([b"saved", b"only here"])
    test = Evictable(own)
    assert list(test.among([b"saved", b"only here", b"other"])) == [b"saved", b"other"]
    assert list(test.among([b"saved", b"other"])) == [b"saved", b"other"]
    assert [test(b"saved"), test(b"only here")] == [True, False]
    own.discard([b"only here"])
    assert Evictable(own)(b"only here")


def test_own_chunks_can_be_added_and_discarded_between_evictions() -> None:
    own = OwnChunks(())
    assert not own
    own.add([b"a", b"b"])
    assert own
    assert list(Evictable(own).among([b"a", b"b", b"c"])) == [b"c"]
    own.add([b"c"])
    own.add([b"d"])
    own.discard([b"b", b"d"])  # d was not tested before
    assert list(Evictable(own).among([b"a", b"b", b"c", b"d"])) == [b"b", b"d"]
    own.add([b"b"])
    own.clear()
    assert not own
    assert list(Evictable(own).among([b"a", b"b", b"c"])) == [b"a", b"b", b"c"]
