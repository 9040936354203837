"""Finds the longest restorable prefix, and the chunks that it needs. This module is pure and
changes nothing.

A boundary is a hit if every group can resume there: its chunks from ``tail_start`` to the boundary
are present, or end before ``start_tokens`` (the GPU's own cache has all blocks up to there). A
draft group needs one more chunk as proof, which is not loaded. The result equals that of vLLM's
``find_longest_cache_hit``, with which tests compare it. The algorithm is the same, too: each group
lowers the bound until none lowers it further. A group that needs all chunks does so only once.

Presence is queried in batches and kept as bytes, one per chunk (0 or 1), so that ``bytes.find``
does the search in C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from functools import partial

from offload.layout.groups import FULL, STATE, GroupLayout, ModelLayout

MATCH_BATCH = 512
"""Chunks per query: large enough for C speed, small enough to stop early at a miss."""

PresentBatch = Callable[[Sequence[bytes]], bytes]
"""Presence of a batch of keys: one byte per key, 0 or 1."""

FirstGap = Callable[[int, Sequence[bytes], int, int], int]
"""Given a group (its index in the layout) and its keys, returns the first chunk of ``[first, end)``
that is not present, or ``end``."""


def present_in(*containers: Container[bytes]) -> PresentBatch:
    """Presence in any of the containers (tiers, nearest first)."""
    return partial(_present_in_any, containers)


def _present_in_any(containers: Sequence[Container[bytes]], keys: Sequence[bytes]) -> bytes:
    """Query one container after another, until all keys are found; empty ones need no query.

    Whole batches, combined as numbers, run at C speed; querying each missing key separately would
    not.
    """
    everything = int.from_bytes(b"\1" * len(keys))
    found = 0
    for container in filter(None, containers):
        found |= int.from_bytes(bytes(map(container.__contains__, keys)))
        if found == everything:
            break
    return found.to_bytes(len(keys))


def find_gap(present: PresentBatch, keys: Sequence[bytes], queries_max: int) -> int | None:
    """The first of these keys that is not present, or ``None``.

    Of more than ``queries_max`` keys, only every nth is queried, and then those around the first
    missing one: small gaps may be overlooked.
    """
    nth = max(1, -(-len(keys) // queries_max))
    gap = present(keys[::nth]).find(0)
    if gap < 0:
        return None
    first = max(0, (gap - 1) * nth + 1)
    return first + present(keys[first : gap * nth + 1]).find(0)


class PrefixMatcher:
    """Finds the longest hit and the ranges to load, over the groups of one layout."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self._alignment = layout.alignment_tokens
        self._alone = len(layout.groups) + len(layout.skipped) == 1
        indexes = range(len(layout.groups))
        self._full = [at for at in indexes if layout.groups[at].kind == FULL]
        self._tails = [at for at in indexes if layout.groups[at].kind != FULL]

    def longest_match(
        self,
        keys: Sequence[Sequence[bytes]],
        present: Container[bytes] | PresentBatch,
        start_tokens: int,
        limit_tokens: int,
        first_gap: FirstGap | None = None,
    ) -> int:
        """The longest restorable prefix in tokens, at most ``limit_tokens``.

        ``keys[g][i]`` is the key of chunk ``i`` of ``layout.groups[g]``; the proof chunk of a draft
        group may lie beyond the limit, except in a model with only one group (as in vLLM). Returns
        ``start_tokens`` if nothing longer can be restored. ``first_gap`` is used instead of
        ``present`` for groups that need every chunk.
        """
        batch = present if callable(present) else present_in(present)
        find_gap = first_gap or partial(_scan, batch)
        groups, alignment = self.layout.groups, self._alignment
        counts = list(map(len, keys))
        if self._alone:
            counts[0] = min(counts[0], limit_tokens // groups[0].chunk_tokens)
        bound = limit_tokens // alignment * alignment
        for at in self._full:
            size, proof = groups[at].chunk_tokens, 1 if groups[at].draft else 0
            bound = min(bound, (counts[at] - proof) * size) // alignment * alignment
            if bound <= start_tokens:
                return start_tokens
            gap = find_gap(at, keys[at], start_tokens // size, bound // size + proof)
            bound = min(bound, (gap - proof) * size // alignment * alignment)
        if not self._tails:
            return max(bound, start_tokens)
        tails = [
            _Tail(groups[at], keys[at], counts[at], batch, start_tokens, alignment)
            for at in self._tails
        ]
        before = start_tokens
        while start_tokens < bound != before:
            before = bound
            for tail in tails:
                bound = tail.lower(bound)
        return max(bound, start_tokens)

    def next_boundary(self, hit_tokens: int) -> int:
        """The first boundary that is longer than this prefix."""
        return (hit_tokens // self._alignment + 1) * self._alignment

    def first_missing(
        self,
        keys: Sequence[Sequence[bytes]],
        present: PresentBatch,
        start_tokens: int,
        hit_tokens: int,
    ) -> tuple[int, int] | None:
        """The first missing chunk at the boundary after a longest hit: a group's index in the
        layout, and the chunk. ``None`` if this chunk has no key yet (a draft group's proof)."""
        boundary = self.next_boundary(hit_tokens)
        for at in (*self._full, *self._tails):
            group = self.layout.groups[at]
            known = hit_tokens if group.kind == FULL else start_tokens
            needed = _needed(group, known, boundary, group.chunk_tokens)
            proof = needed.stop + (1 if group.draft else 0)
            gap = present(keys[at][needed.start : proof]).find(0)
            if gap >= 0:
                return at, needed.start + gap
        return None

    def load_ranges(self, start_tokens: int, hit_tokens: int) -> tuple[range, ...]:
        """The chunks of each group that must be loaded to restore the tokens up to ``hit_tokens``.

        They do not include a draft group's proof chunk. The first chunk may be needed only in part:
        see ``block_ranges``.
        """
        return tuple(
            _needed(group, start_tokens, hit_tokens, group.chunk_tokens)
            for group in self.layout.groups
        )

    def block_ranges(self, start_tokens: int, hit_tokens: int) -> tuple[range, ...]:
        """Blocks of each group to fill, by position in the block table.

        These are the blocks of ``load_ranges`` without those that are before the window or already
        in the GPU's cache.
        """
        return tuple(
            _needed(group, start_tokens, hit_tokens, group.block_tokens)
            for group in self.layout.groups
        )

    def wanted(
        self, keys: Sequence[Sequence[bytes]], start_tokens: int, limit_tokens: int
    ) -> list[bytes]:
        """The keys of every chunk that a hit of at most ``limit_tokens`` could need, group by group
        in prefix order."""
        found: list[bytes] = []
        for group, mine in zip(self.layout.groups, keys, strict=True):
            first = start_tokens // group.chunk_tokens
            end = -(-limit_tokens // group.chunk_tokens) + (1 if group.draft else 0)
            part = enumerate(mine[first:end], first)
            found += [key for chunk, key in part if self.reachable(group, chunk)]
        return found

    def reachable(self, group: GroupLayout, chunk: int) -> bool:
        """True if this chunk can ever serve a hit.

        Chunks far from any aligned boundary cannot: states between boundaries, and chunks before
        the window of the next boundary.
        """
        if group.kind == FULL:
            return True
        first, last = chunk * group.chunk_tokens, (chunk + 1) * group.chunk_tokens
        boundary = -(-last // self._alignment) * self._alignment
        if group.kind == STATE:
            return last == boundary
        is_proof = group.draft and first > 0 and first % self._alignment == 0
        return is_proof or group.tail_start(boundary) < last


def _needed(group: GroupLayout, start: int, boundary: int, unit: int) -> range:
    """Units of ``unit`` tokens that contain ``[max(start, tail_start), boundary)``."""
    if boundary <= start:
        return range(0)
    return range(max(start, group.tail_start(boundary)) // unit, -(-boundary // unit))


def _scan(present: PresentBatch, _group: int, keys: Sequence[bytes], first: int, end: int) -> int:
    """A ``FirstGap`` that queries everything."""
    for low in range(first, end, MATCH_BATCH):
        flags = present(keys[low : min(end, low + MATCH_BATCH)])
        gap = flags.find(0)
        if gap >= 0:
            return low + gap
    return end


class _Tail:
    """Lowers a bound to the longest prefix that one group can restore, for a group that needs only
    the last chunks of a prefix.

    Bounds only fall, so the presence of each chunk is queried at most once.
    """

    def __init__(
        self,
        layout: GroupLayout,
        keys: Sequence[bytes],
        count: int,
        batch: PresentBatch,
        start: int,
        alignment: int,
    ) -> None:
        self._layout = layout
        self._keys = keys
        self._batch = batch
        self._start = start
        self._alignment = alignment
        self._proof = 1 if layout.draft else 0
        self._end = (count - self._proof) * layout.chunk_tokens
        self._first = start // layout.chunk_tokens
        self._flags = b""
        self._flags_from = -1

    def _align_down(self, tokens: int) -> int:
        return tokens // self._alignment * self._alignment

    def lower(self, bound: int) -> int:
        """The largest aligned boundary up to ``bound`` that this group can restore; at most
        ``start`` if there is none.

        Goes from right to left: a missing chunk rules out every boundary whose tail contains it.
        """
        size = self._layout.chunk_tokens
        bound = self._align_down(min(bound, self._end))
        while bound > self._start:
            end = bound // size + self._proof
            low = max(self._start, self._layout.tail_start(bound)) // size
            gap = self._last_gap(low, end)
            if gap < low:
                return bound
            last_present = self._last_present(gap)
            bound = self._align_down((last_present + 1 - self._proof) * size)
            if self._layout.span_tokens:  # the start of a span needs nothing before it
                unit = math.lcm(self._layout.span_tokens, self._alignment)
                bound = max(bound, (gap - self._proof) * size // unit * unit)
        return bound

    def _last_gap(self, low: int, end: int) -> int:
        """The last chunk of ``[low, end)`` that is not present; below ``low`` if there is none."""
        if low >= end:
            return -1
        self._ask_down_to(low, end)
        known = self._flags_from
        found = self._flags.rfind(0, low - known, end - known)
        return known + found if found >= 0 else -1

    def _last_present(self, end: int) -> int:
        """The last present chunk before ``end``; ``first - 1`` if there is none."""
        while True:
            found = self._flags.rfind(1, 0, max(0, end - self._flags_from))
            if found >= 0:
                return found + self._flags_from
            if self._flags_from <= self._first:
                return self._first - 1
            self._ask_down_to(self._flags_from - 1, end)

    def _ask_down_to(self, low: int, end: int) -> None:
        """Extend ``flags`` to ``[low, end)``, querying whole batches below the known range."""
        if self._flags_from < 0:
            self._flags_from = end
        if low >= self._flags_from:
            return
        low = max(self._first, min(low, self._flags_from - MATCH_BATCH))
        self._flags = self._batch(self._keys[low : self._flags_from]) + self._flags
        self._flags_from = low
