"""Maps a request's chunks to the GPU blocks of its block table, many at a time.

Part of the scheduler side, on its thread. A long prompt has thousands of chunks, so this module
avoids work per chunk where possible.

It also finds the GPU blocks that a scheduler step fills with new content: stores that read those
blocks must be fenced. Blocks taken from vLLM's prefix cache keep their content and need no fence;
all blocks beyond a request's computed tokens have new content, or can have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from offload.index.chunk_batch import ChunkBatch
from offload.layout.groups import FULL, STATE, ModelLayout
from offload.layout.prefix_match import PrefixMatcher
from offload.requests.request_identity import RequestIdentity

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class BlockTables:
    """Reads block tables (one list of block ids per vLLM group) of one model."""

    def __init__(self, layout: ModelLayout) -> None:
        self._block_tokens = {
            group.group: group.block_tokens for group in layout.groups if group.kind != STATE
        }

    def beyond(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> Iterable[int]:
        """Return the blocks that hold tokens from ``computed_tokens`` on.

        In groups whose tables are not ordered by position (states, and groups that are not
        offloaded) every block counts.
        """
        sizes = map(self._block_tokens.get, range(len(tables)))
        return chain.from_iterable(
            table[computed_tokens // tokens :] if tokens else table
            for tokens, table in zip(sizes, tables, strict=True)
        )

    def rewritten(self, output: SchedulerOutput) -> Iterator[int]:
        """Blocks that this step may overwrite, in its forward pass or in the work before it."""
        for new in output.scheduled_new_reqs:
            yield from self.beyond(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for position, request_id in enumerate(cached.req_ids):
            tables = cached.new_block_ids[position]
            if tables is None:
                continue
            if request_id in cached.resumed_req_ids:
                yield from self.beyond(tables, cached.num_computed_tokens[position])
            else:
                for table in tables:
                    yield from table
        yield from output.new_block_ids_to_zero or ()
        for copy in output.kv_cache_block_copies or ():
            yield copy.dst_block_id


class ChunkBatches:
    """Makes a ``ChunkBatch`` of a request's chunks and the blocks that its table has for them."""

    def __init__(self, layout: ModelLayout, matcher: PrefixMatcher) -> None:
        self._layout = layout
        self._matcher = matcher

    def of_load(
        self,
        identity: RequestIdentity,
        block_ids: Sequence[Sequence[int]],
        chunk_ranges: Sequence[range],
        tokens: range,
    ) -> list[ChunkBatch]:
        """The chunks of each group to load for ``tokens``, without chunks outside the table."""
        batches: list[ChunkBatch] = []
        block_ranges = self._matcher.block_ranges(tokens.start, tokens.stop)
        for index, group in enumerate(self._layout.groups):
            chunks, inside = chunk_ranges[index], block_ranges[index]
            size = group.chunk_blocks
            first, last = chunks.start * size, chunks.stop * size
            table = block_ids[group.group][first:last]
            is_whole = len(table) == last - first and first >= inside.start and last <= inside.stop
            if not (is_whole and all(table)):  # some blocks are null (id 0)
                table = [
                    table[at - first] or -1 if at in inside and at - first < len(table) else -1
                    for at in range(first, last)
                ]
                flags = [max(row) >= 0 for row in zip(*[iter(table)] * size, strict=True)]
                found = self.of_chunks(identity, index, chunks, table).chosen(flags)
            else:
                found = self.of_chunks(identity, index, chunks, table)
            if found:
                batches.append(found)
        return batches

    def of_chunks(
        self, identity: RequestIdentity, index: int, chunks: range, table: Sequence[int]
    ) -> ChunkBatch:
        """Chunks of one group that lie in these blocks."""
        group = self._layout.groups[index]
        size = group.chunk_tokens
        return ChunkBatch(
            identity.keys[index][chunks.start : chunks.stop],
            group.group,
            table,
            range((chunks.start + 1) * size, (chunks.stop + 1) * size, size),
            identity.origin,
        )

    def of_final(
        self, identity: RequestIdentity, index: int, first: int, end: int, table: Sequence[int]
    ) -> ChunkBatch:
        """Chunks ``[first, end)`` that are still in the table; null blocks (id 0) have been
        freed."""
        group = self._layout.groups[index]
        size = group.chunk_blocks
        last = min(end, len(table) // size)
        part = table[first * size : last * size]
        found = self.of_chunks(identity, index, range(first, max(first, last)), part)
        if group.kind == FULL and 0 not in part:
            return found
        reachable = self._matcher.reachable
        rows = zip(*[iter(part)] * size, strict=True)
        return found.chosen(
            [0 not in row and reachable(group, chunk) for chunk, row in enumerate(rows, first)]
        )
