"""A request's stores may evict its own chunks only once a lower tier holds them."""

from __future__ import annotations

from offload.index.retention import Evictable
from offload.planner.own_chunks import OwnChunks


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
