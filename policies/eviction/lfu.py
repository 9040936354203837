"""Least frequently used, in constant time.

K. Shah, A. Mitra, D. Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme",
2010: keys of one count share a bucket, buckets are linked in order of count. Ties are broken in
favour of evicting the key used longest ago; as requests are touched tail to head and a head is used
at least as often as its tail, eviction is deepest-first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take


class _Bucket:
    """The keys of one use count, oldest use first, and the neighbouring counts."""

    __slots__ = ("above", "below", "keys", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.keys: OrderedDict[Key, None] = OrderedDict()
        self.below: _Bucket | None = None
        self.above: _Bucket | None = None


class LfuPolicy(EvictionPolicy):
    """Counts uses while a key is a member; forgets them when it leaves. O(1) per key."""

    def __init__(self) -> None:
        self._bucket: dict[Key, _Bucket] = {}
        self._bottom = _Bucket(0)  # uses 0: inserted, not touched yet; always there

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
        """A new bucket for one use more than ``old``."""
        new = _Bucket(old.uses + 1)
        new.below, new.above = old, old.above
        if old.above is not None:
            old.above.below = new
        old.above = new
        return new

    def _unlink(self, bucket: _Bucket) -> None:
        below, above = bucket.below, bucket.above
        if below is None:
            return  # the bottom remains
        below.above = above
        if above is not None:
            above.below = below
