"""Chunks that clients have asked kvtiers to keep for a time (``pin_s``).

Used on the scheduler's thread. Such a chunk is not evicted until its time is over; like
any other chunk it is dropped if it is damaged or the weights change. At most a share of each tier
can be pinned, so no client can fill the tier. Chunks beyond this share are not pinned, and the
client gets a report. The share also bounds the memory used here: one entry per pinned chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_of


class _TierPins:
    """The pinned chunks of one tier: when each expires, and how much of ``size_max`` they take.
    ``sizes`` are by group, in units of the tier's space."""

    def __init__(self, index: TierIndex, sizes: Mapping[int, int], size_max: int) -> None:
        self.until: dict[bytes, int] = {}
        self.used = 0
        self._index = index
        self._sizes = sizes
        self._size_max = size_max
        self._due: dict[int, set[bytes]] = {}
        self._seconds: list[int] = []  # the keys of ``_due``, as a heap
        index.retention.register_client_pins(self.until)

    def pin(self, keys: Sequence[bytes], until: int) -> int:
        """Pin a prefix of these keys, as far as there is space; returns its length."""
        for position, key in enumerate(keys):
            before = self.until.get(key)
            if before is None:
                size = self._sizes[group_of(key)]
                if self.used + size > self._size_max:
                    return position
                self.used += size
            elif before >= until:
                continue
            else:
                self._due[before].discard(key)
            self.until[key] = until
            if until not in self._due:
                self._due[until] = set()
                heapq.heappush(self._seconds, until)
            self._due[until].add(key)
        return len(keys)

    def tick(self, now: float, keys_max: int) -> None:
        """Release expired chunks."""
        left = keys_max
        while self._seconds and self._seconds[0] <= now and left:
            due = self._due[self._seconds[0]]
            while due and left:
                key = due.pop()
                del self.until[key]
                self.used -= self._sizes[group_of(key)]
                left -= 1
            if not due:
                del self._due[heapq.heappop(self._seconds)]

    def clear(self) -> None:
        """Release all chunks."""
        self.until.clear()
        self._due.clear()
        self._seconds.clear()
        self.used = 0


class TimedPins:
    """The pinned chunks of every tier, at most ``share`` of each tier's capacity."""

    def __init__(
        self,
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        groups: Mapping[int, GroupInfo],
        share: float,
    ) -> None:
        self.refused = 0
        self._cpu = cpu
        self._lower = tuple(lower)
        sizes = [dict.fromkeys(groups, 1)]
        sizes += [{g: info.footprints[t] for g, info in groups.items()} for t in range(len(lower))]
        self._tiers = [
            _TierPins(index, size, int(index.space.capacity * share))
            for index, size in zip((cpu, *lower), sizes, strict=True)
        ]

    def pin(self, keys: Sequence[bytes], seconds: float, now: float) -> int:
        """Pin these chunks of one group (in prefix order) for this many seconds in every tier that
        holds or gets them. Returns how many, counted from the first, are pinned in at least one
        tier."""
        until = int(now + seconds) + 1
        held = [key for key in keys if self._is_held(key)]
        pinned = max(tier.pin(held, until) for tier in self._tiers)
        self.refused += len(held) - pinned
        for position, key in enumerate(held[:pinned]):
            if key != keys[position]:
                # `keys[position]` is gone, so the chunks after it cannot belong to a prefix
                return position
        return pinned

    def _is_held(self, key: bytes) -> bool:
        return not self._cpu.is_absent(key) or any(key in index for index in self._lower)

    def tick(self, now: float, keys_max: int) -> None:
        """Set the time (monotonic seconds)."""
        for tier in self._tiers:
            tier.tick(now, keys_max)

    def clear(self) -> None:
        """Forget all chunks."""
        for tier in self._tiers:
            tier.clear()

    def used(self) -> dict[str, int]:
        """The space taken by pinned chunks in each tier, in the tier's units."""
        indexes = (self._cpu, *self._lower)
        return {i.name: tier.used for i, tier in zip(indexes, self._tiers, strict=True)}
