"""A request's chunks with the GPU blocks of a block table, many at a time.

Part of the scheduler side, on its thread. A long prompt has thousands of chunks, so nothing here
is done chunk by chunk unless it must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.chunks import Wanted, wanted_chunks
from offload.coordinator import Coordinator
from offload.layout import FULL, ModelLayout
from offload.tracker import RequestTracker


class WantedChunks:
    """Makes ``Wanted`` of trackers and block tables of one model."""

    def __init__(self, layout: ModelLayout, coordinator: Coordinator) -> None:
        self._layout = layout
        self._coordinator = coordinator

    def of_range(
        self, tracker: RequestTracker, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> list[Wanted]:
        """The chunks that hold ``[start, end)`` for every group; blocks outside are skipped."""
        wanted: list[Wanted] = []
        chunk_ranges = self._coordinator.load_ranges(start, end)
        block_ranges = self._coordinator.block_ranges(start, end)
        for index, group in enumerate(self._layout.groups):
            chunks, inside = chunk_ranges[index], block_ranges[index]
            first, last = chunks.start * group.chunk_blocks, chunks.stop * group.chunk_blocks
            table = block_ids[group.group][first:last]
            if (
                len(table) < last - first
                or 0 in table
                or first < inside.start
                or last > inside.stop
            ):
                table = [
                    table[at - first] or -1 if at in inside and at - first < len(table) else -1
                    for at in range(first, last)
                ]
            found = self.chunks(tracker, index, chunks, table)
            wanted += found if -1 not in table else [c for c in found if max(c.blocks) >= 0]
        return wanted

    def chunks(
        self, tracker: RequestTracker, index: int, chunks: range, table: Sequence[int]
    ) -> list[Wanted]:
        """Chunks of one group that lie in these blocks."""
        group = self._layout.groups[index]
        size = group.chunk_tokens
        return wanted_chunks(
            tracker.keys[index][chunks.start : chunks.stop],
            group.group,
            zip(*[iter(table)] * group.chunk_blocks, strict=True),
            range((chunks.start + 1) * size, (chunks.stop + 1) * size, size),
            tracker.origin,
        )

    def final(
        self, tracker: RequestTracker, index: int, end: int, table: Sequence[int]
    ) -> list[Wanted]:
        """Chunks up to ``end`` that are still in the table; null blocks (id 0) have gone."""
        group = self._layout.groups[index]
        size = group.chunk_blocks
        first, last = tracker.next_chunk[index], min(end, len(table) // size)
        if first >= last:
            return []
        found = self.chunks(tracker, index, range(first, last), table[first * size : last * size])
        if group.kind == FULL and 0 not in table:
            return found
        reachable = self._coordinator.reachable
        return [
            wanted
            for chunk, wanted in enumerate(found, first)
            if 0 not in wanted.blocks and reachable(group, chunk)
        ]
