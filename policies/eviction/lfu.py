"""Least frequently used, in constant time.

K. Shah, A. Mitra, D. Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme",
2010: keys with the same count share a bucket, and buckets are linked in order of count. Of keys
with equal counts, the least recently used is evicted first. Requests touch their keys tail to head,
and a head is used at least as often as its tail, so eviction is deepest-first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take


class _Bucket:
    """The keys with one use count, least recently used first, linked to the neighbouring counts."""

    __slots__ = ("above", "below", "keys", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.keys: OrderedDict[Key, None] = OrderedDict()
        self.below: _Bucket | None = None
        self.above: _Bucket | None = None


class LfuPolicy(EvictionPolicy):
    """Counts the uses of members, and forgets the count of a key that is removed. O(1) per key."""

    def __init__(self) -> None:
        self._bucket: dict[Key, _Bucket] = {}
        self._bottom = _Bucket(0)  # 0 uses: inserted, not touched yet; always exists

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._bottom.keys[key] = None
        self._bucket[key] = self._bottom

    def touch(self, keys: Sequence[Key]) -> None:
        buckets = self._bucket
        for key in reversed(keys):
            old = buckets.get(key)
            if old is None:
                continue
            new = old.above
            if new is None or new.uses != old.uses + 1:
                new = self._link(old)
            del old.keys[key]
            new.keys[key] = None
            buckets[key] = new
            if not old.keys:
                self._unlink(old)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        bucket: _Bucket | None = self._bottom
        while bucket is not None and len(found) < count:
            take(bucket.keys, count, evictable, found)
            bucket = bucket.above
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        bucket = self._bucket.pop(key, None)
        if bucket is not None:
            del bucket.keys[key]
            if not bucket.keys:
                self._unlink(bucket)

    def clear(self) -> None:
        self._bucket.clear()
        self._bottom = _Bucket(0)

    def __len__(self) -> int:
        return len(self._bucket)

    def _link(self, old: _Bucket) -> _Bucket:
        """Insert a bucket for one more use than ``old`` has."""
        new = _Bucket(old.uses + 1)
        new.below, new.above = old, old.above
        if old.above is not None:
            old.above.below = new
        old.above = new
        return new

    def _unlink(self, bucket: _Bucket) -> None:
        below, above = bucket.below, bucket.above
        if below is None:
            return  # the bucket for 0 uses remains
        below.above = above
        if above is not None:
            above.below = below
