"""Removes blocks from vLLM's own cache that vLLM has not computed.

Part of the scheduler side, on its thread. By priority, vLLM may preempt a request that it has
scheduled in the same step. The blocks that this step would have completed stay in its cache
(vllm#57580): later requests would hit them, and a tier would keep what is computed from them.

A step that preempts a request begins no other, so nothing hits the blocks before they are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from offload.connector.guard import run_all
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.live_requests import LiveRequests
from offload.layout.groups import ModelLayout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock


class UncomputedBlocks:
    """Finds and removes the blocks."""

    def __init__(self, layout: ModelLayout, requests: LiveRequests, gpu_cache: GpuCache) -> None:
        self._groups = [(group.group, group.block_tokens) for group in layout.groups]
        self._requests = requests
        self._gpu_cache = gpu_cache
        self._found: dict[str, list[tuple[KVCacheBlock, BlockHashWithGroupId]]] = {}

    def before_preemption(self) -> None:
        """Record the blocks of each running request that have a hash but are not computed, because
        vLLM takes all blocks from the request that it preempts."""
        running = (one for one in self._requests.all() if one.status is RequestStatus.RUNNING)
        self._found |= {one.request_id: found for one in running if (found := self._find(one))}

    def _find(self, request: Request) -> list[tuple[KVCacheBlock, BlockHashWithGroupId]]:
        computed, tables = request.num_computed_tokens, self._gpu_cache.tables(request.request_id)
        return [
            (block, block.block_hash)
            for group, tokens in self._groups
            for block in tables[group][computed // tokens :]
            if (block.block_hash_num_tokens or 0) > computed
        ]

    def remove(self, preempted: Iterable[str]) -> None:
        """Remove what the step that was just scheduled does not compute, because it has preempted
        these requests. An error leaves only its own block; the first error is raised at the end."""
        found, self._found = self._found, {}
        run_all(
            partial(self._gpu_cache.remove, block, block_hash)
            for name in preempted
            for block, block_hash in found.get(name, ())
        )
