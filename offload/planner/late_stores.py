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

LATE_MAX = 2048
"""Number of chunks that may wait: each step compares their blocks with those that it overwrites."""


class LateStores:
    """Chunks that wait to be stored from blocks that no request holds any more, oldest first.

    Owned by the store planner. The head of a prompt comes first, and the chunks after a lost one
    are dropped, because chunks after a gap can never be hit. ``chunks`` is the number of chunks
    that wait.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self._runs: deque[tuple[ChunkBatch, OwnChunks | None]] = deque()

    def add(self, run: ChunkBatch, own: OwnChunks | None) -> None:
        """Queue these chunks of an ended request, as many as the limit allows. ``own`` has its
        other chunks, which must not be evicted for these."""
        self._append(run.part(0, LATE_MAX - self.chunks), own)

    def take(self) -> tuple[ChunkBatch, OwnChunks | None]:
        """Remove and return the chunks of the request that ended first."""
        run, own = self._runs.popleft()
        self.chunks -= len(run)
        return run, own

    def put_back(self, run: ChunkBatch, own: OwnChunks | None) -> None:
        """Return what is left of chunks that were taken, to be taken first again."""
        self._append(run, own)
        self._runs.rotate(1)

    def _append(self, run: ChunkBatch, own: OwnChunks | None) -> None:
        if run:
            self._runs.append((run, own))
            self.chunks += len(run)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Drop the chunks whose blocks are about to be overwritten, and those after them."""
        lost = frozenset(blocks)
        if lost.isdisjoint(block for run, _ in self._runs for block in run.blocks):
            return
        runs, self._runs, self.chunks = self._runs, deque(), 0
        for run, own in runs:
            first = next((at for at, block in zip(count(), run.blocks) if block in lost), None)
            self._append(run if first is None else run.part(0, first // run.width), own)

    def clear(self) -> None:
        """Drop all chunks: their blocks can no longer be trusted."""
        self._runs.clear()
        self.chunks = 0
