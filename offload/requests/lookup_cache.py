"""Caches the results of a request's earlier lookups, so that the next one does not repeat them.

A long prompt has thousands of chunks, and each query costs a few CPU cache misses. A lookup is
therefore spread over several steps, and is repeated in each step while its request waits. Pure;
used on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import is_

from offload.layout.prefix_match import MATCH_BATCH, FirstGap, present_in
from offload.planner.step_budget import Allowance
from offload.telemetry.removed_chunks import RemovalLog

FIRST_BATCH = 16
"""Number of chunks that are queried together as long as no chunk has been found."""

Holders = tuple[Container[bytes], ...]


class KnownRange:
    """Chunks ``[first, end)`` of one group that the holders have, and whether the next chunk is
    missing.

    ``mark`` is the position in the log of removals up to which this range has been checked.
    """

    __slots__ = ("chunk_of", "end", "first", "has_gap", "holders", "mark")

    def __init__(self, first: int, holders: Holders, mark: int) -> None:
        self.first = self.end = first
        self.has_gap = False
        self.holders = holders
        self.mark = mark
        self.chunk_of: dict[bytes, int] | None = None  # created on first use

    def is_of(self, first: int, holders: Holders) -> bool:
        """True if this range has chunks from ``first`` on, for the same holders."""
        if not self.first <= first <= self.end or len(holders) != len(self.holders):
            return False
        return all(map(is_, holders, self.holders))

    def cut(self, keys: Sequence[bytes], gone: Iterable[Sequence[bytes]]) -> None:
        """Shorten the range to end before the first of these removed chunks that no holder has any
        more."""
        if self.chunk_of is None:
            found = keys[self.first : self.end]
            self.chunk_of = dict(zip(found, range(self.first, self.end), strict=True))
        present = present_in(*self.holders)
        for batch in gone:
            mine = list(filter(self.chunk_of.__contains__, batch))
            for key, is_there in zip(mine, present(mine), strict=True):
                if not is_there and self.chunk_of[key] < self.end:
                    self.end, self.has_gap = self.chunk_of[key], True

    def extend(self, keys: Sequence[bytes], end: int, keys_max: int) -> int:
        """Query up to ``keys_max`` more chunks before ``end``; returns how many were queried.

        The first query is small if its first chunk is likely to be missing, as for a new prompt. It
        is for one chunk if that was missing before, because it usually still is.
        """
        present, asked = present_in(*self.holders), 0
        batch = FIRST_BATCH if self.end == self.first else MATCH_BATCH
        if self.has_gap:
            batch = 1
        while self.end < end and asked < keys_max:
            size = min(batch, end - self.end, keys_max - asked)
            part = keys[self.end : self.end + size]
            gap = present(part).find(0)
            there = gap if gap >= 0 else size
            if self.chunk_of is not None:
                chunks = range(self.end, self.end + there)
                self.chunk_of.update(zip(part[:there], chunks, strict=True))
            self.end += there
            self.has_gap = gap >= 0
            asked += size
            if self.has_gap:
                break
            batch = MATCH_BATCH
        return asked


class PartialLookup:
    """The known results for one request's chunks.

    ``is_partial`` is set if a lookup ended before it knew everything; the next step's lookup
    continues where this one stopped. Each step queries a bounded number of chunks. If results are
    invalidated repeatedly because chunks keep leaving the tiers, everything is queried at once, so
    no request waits forever.
    """

    __slots__ = ("_partial_lookups", "_ranges", "is_partial")

    def __init__(self) -> None:
        self.is_partial = False
        self._ranges: dict[tuple[int | None, int], KnownRange] = {}
        self._partial_lookups = 0

    def clear(self) -> None:
        """Forget everything."""
        self._ranges.clear()
        self.is_partial, self._partial_lookups = False, 0

    def begin(self) -> None:
        """Begin a lookup."""
        self._partial_lookups += self.is_partial
        self.is_partial = False

    def first_gap_in(
        self, above: int | None, holders: Holders, removals: RemovalLog, allowance: Allowance
    ) -> FirstGap:
        """Return a function that finds the first gap among the chunks that ``holders`` have, for
        `PrefixMatcher.longest_match`.

        If this step's ``allowance`` is used up, the function reports a gap where it has stopped,
        and sets ``is_partial``. ``above`` is the tier number that identifies this set of holders;
        ``removals`` logs the chunks that left them.
        """

        def first_gap(group: int, keys: Sequence[bytes], first: int, end: int) -> int:
            known = self._known((above, group), keys, first, holders, removals)
            if known.end >= end:
                return max(first, end)
            keys_max = max(allowance.left, allowance.chunks_min)
            if self._partial_lookups > 2 * (end - first) // allowance.chunks_min + 1:
                keys_max = end - first
            allowance.take(known.extend(keys, end, keys_max))
            if known.end < end and not known.has_gap:
                self.is_partial = True
            return max(first, min(known.end, end))

        return first_gap

    def _known(
        self,
        name: tuple[int | None, int],
        keys: Sequence[bytes],
        first: int,
        holders: Holders,
        removals: RemovalLog,
    ) -> KnownRange:
        """Return the range that is already known, or an empty one."""
        known = self._ranges.get(name)
        if known is not None and known.is_of(first, holders):
            gone = removals.since(known.mark)
            if gone:
                known.cut(keys, gone)
            if gone is not None and known.end >= first:
                known.mark = removals.count
                return known
        known = self._ranges[name] = KnownRange(first, holders, removals.count)
        return known
