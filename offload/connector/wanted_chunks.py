"""A request's chunks with the GPU blocks of a block table, many at a time.

Part of the scheduler side, on its thread. A long prompt has thousands of chunks, so nothing here
is done chunk by chunk unless it must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.chunks import Run
from offload.coordinator import Coordinator
from offload.layout import FULL, ModelLayout
from offload.tracker import RequestTracker


class WantedChunks:
    """Makes ``Run`` of trackers and block tables of one model."""

    def __init__(self, layout: ModelLayout, coordinator: Coordinator) -> None:
        self._layout = layout
        self._coordinator = coordinator

    def of_range(
        self, tracker: RequestTracker, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> list[Run]:
        """The chunks that hold ``[start, end)``, by group; blocks outside are skipped."""
        wanted: list[Run] = []
        chunk_ranges = self._coordinator.load_ranges(start, end)
        block_ranges = self._coordinator.block_ranges(start, end)
        for index, group in enumerate(self._layout.groups):
            chunks, inside = chunk_ranges[index], block_ranges[index]
            size = group.chunk_blocks
            first, last = chunks.start * size, chunks.stop * size
            table = block_ids[group.group][first:last]
            is_whole = len(table) == last - first and first >= inside.start and last <= inside.stop
            if not is_whole or min(table, default=1) <= 0:
                table = [
                    table[at - first] or -1 if at in inside and at - first < len(table) else -1
                    for at in range(first, last)
                ]
                flags = [max(row) >= 0 for row in zip(*[iter(table)] * size, strict=True)]
                found = self.chunks(tracker, index, chunks, table).chosen(flags)
            else:
                found = self.chunks(tracker, index, chunks, table)
            if found:
                wanted.append(found)
        return wanted

    def chunks(
        self, tracker: RequestTracker, index: int, chunks: range, table: Sequence[int]
    ) -> Run:
        """Chunks of one group that lie in these blocks."""
        group = self._layout.groups[index]
        size = group.chunk_tokens
        return Run(
            tracker.keys[index][chunks.start : chunks.stop],
            group.group,
            table,
            range((chunks.start + 1) * size, (chunks.stop + 1) * size, size),
            tracker.origin,
        )

    def final(
        self, tracker: RequestTracker, index: int, first: int, end: int, table: Sequence[int]
    ) -> Run:
        """Chunks ``[first, end)`` that are still in the table; null blocks (id 0) have gone."""
        group = self._layout.groups[index]
        size = group.chunk_blocks
        last = min(end, len(table) // size)
        part = table[first * size : last * size]
        found = self.chunks(tracker, index, range(first, max(first, last)), part)
        if group.kind == FULL and 0 not in part:
            return found
        reachable = self._coordinator.reachable
        rows = zip(*[iter(part)] * size, strict=True)
        return found.chosen(
            [0 not in row and reachable(group, chunk) for chunk, row in enumerate(rows, first)]
        )
