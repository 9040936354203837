"""Chunks of requests that have ended before all of their stores could be planned. A request that
ends hands over its last chunks at once, and the limit on stores in flight may not allow all of
them. Their blocks keep their content until vLLM gives them to another request, so these chunks wait
here and are stored in later steps. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count

from offload.index.chunk_batch import ChunkBatch
from offload.planner.own_chunks import OwnChunks

LATE_CHUNKS_MAX = 2048
"""Number of chunks that may wait: each step compares their blocks with those that it overwrites."""


class LateStores:
    """Chunks that wait to be stored from blocks that no request holds any more, oldest first.

    Owned by the store planner. The head of a prompt comes first, and the chunks after a lost one
    are dropped, because chunks after a gap can never be hit. ``chunks`` is the number of chunks
    that wait.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self._batches: deque[tuple[ChunkBatch, OwnChunks | None]] = deque()

    def add(self, batch: ChunkBatch, own: OwnChunks | None) -> None:
        """Queue these chunks of an ended request, as many as the limit allows. ``own`` has its
        other chunks, which must not be evicted for these."""
        self._append(batch.part(0, LATE_CHUNKS_MAX - self.chunks), own)

    def take(self) -> tuple[ChunkBatch, OwnChunks | None]:
        """Remove and return the chunks of the request that ended first."""
        batch, own = self._batches.popleft()
        self.chunks -= len(batch)
        return batch, own

    def put_back(self, batch: ChunkBatch, own: OwnChunks | None) -> None:
        """Return what is left of chunks that were taken, to be taken first again."""
        self._append(batch, own)
        self._batches.rotate(1)

    def _append(self, batch: ChunkBatch, own: OwnChunks | None) -> None:
        if batch:
            self._batches.append((batch, own))
            self.chunks += len(batch)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Drop the chunks whose blocks are about to be overwritten, and those after them."""
        lost = frozenset(blocks)
        held = (block for batch, _ in self._batches for block in batch.blocks)
        if not lost or lost.isdisjoint(held):
            return
        batches, self._batches, self.chunks = self._batches, deque(), 0
        for batch, own in batches:
            first = next((at for at, block in zip(count(), batch.blocks) if block in lost), None)
            self._append(batch if first is None else batch.part(0, first // batch.width), own)

    def clear(self) -> None:
        """Drop all chunks: their blocks can no longer be trusted."""
        self._batches.clear()
        self.chunks = 0
