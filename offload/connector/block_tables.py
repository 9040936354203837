"""Which GPU blocks a scheduler step gives to new content: the stores that read them are fenced.

Blocks taken from vLLM's prefix cache keep their content and need no fence; whatever lies beyond
a request's computed tokens is, or may be, new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from offload.layout import STATE, ModelLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class BlockTables:
    """Reads block tables (one list of block ids per vLLM group) of one model."""

    def __init__(self, layout: ModelLayout) -> None:
        self._block_tokens = {
            group.group: group.block_tokens for group in layout.groups if group.kind != STATE
        }

    def beyond(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> Iterable[int]:
        """Blocks that hold tokens from ``computed_tokens`` on. Of groups whose tables do not run
        by position (states, and groups that are not offloaded) every block counts."""
        sizes = map(self._block_tokens.get, range(len(tables)))
        return chain.from_iterable(
            table[computed_tokens // tokens :] if tokens else table
            for tokens, table in zip(sizes, tables, strict=True)
        )

    def rewritten(self, output: SchedulerOutput) -> Iterator[int]:
        """Blocks that this step's forward pass (or what precedes it) may write anew."""
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
