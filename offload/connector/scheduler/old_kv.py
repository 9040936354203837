"""Keeps KV of old weights out of vLLM's own cache after a reset, so that no tier keeps it.

Part of the scheduler side, on its thread. vLLM cannot empty its own cache while requests hold
blocks. It says so, but the tiers are reset all the same, and the requests go on. vLLM then adds
blocks to its cache that are computed, in part, from KV of the old weights. Later requests would hit
them, and a tier would keep what is computed from them under the new weights.

So a reset removes all blocks from vLLM's cache, and each later step those that vLLM has added for
requests that hold old KV. A request that begins in the same step may have hit them; then it holds
old KV, too. A request holds old KV until it ends or restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from offload.connector.guard import run_all
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.live_requests import LiveRequest, LiveRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock


class OldKv:
    """Follows the requests that hold KV of old weights. None of them stores anything."""

    def __init__(self, requests: LiveRequests, gpu_cache: GpuCache) -> None:
        self._requests = requests
        self._gpu_cache = gpu_cache
        self._followed: dict[str, dict[int, int]] = {}  # by group, the blocks already removed
        self._began: list[str] = []

    def reset(self) -> None:
        """Follow the requests that hold KV, because the weights may have changed, and empty vLLM's
        own cache."""
        for name, live in self._requests.by_name.items():
            if live.request.num_computed_tokens > 0:
                self._follow(name, live)
        self._gpu_cache.remove_all()

    def begins(self, live: LiveRequest) -> None:
        """Record that a request holds no KV, because vLLM looks it up."""
        self._followed.pop(live.request.request_id, None)
        live.state.stores.set_stale(stale=False)

    def allocated(self, request_id: str) -> None:
        """Record that vLLM has given blocks to a request that held none."""
        if self._followed:
            self._began.append(request_id)

    def step(self) -> None:
        """Remove what vLLM has added to its cache while it scheduled a step, and since the step
        before, and follow the requests that have hit it. This must precede the stores of the step.
        An error leaves only its own block; the first error is raised at the end."""
        began, self._began = self._began, []
        if not self._followed:
            return
        found: list[tuple[KVCacheBlock, BlockHashWithGroupId]] = []
        for name in list(self._followed):
            found += self._added(name)
        wrong = {block.block_id for block, _ in found}
        for name in began:  # in the order in which vLLM has scheduled them
            live = self._requests.by_name.get(name)
            if live is None or name in self._followed or wrong.isdisjoint(self._blocks(name)):
                continue
            self._follow(name, live)
            added = list(self._added(name))
            wrong.update(block.block_id for block, _ in added)
            found += added
        run_all(partial(self._gpu_cache.remove, *one) for one in found)

    def ended(self, request_id: str) -> None:
        """Remove what vLLM has added for a request that ends and still has its blocks."""
        if request_id in self._followed:
            found = list(self._added(request_id))
            del self._followed[request_id]
            run_all(partial(self._gpu_cache.remove, *one) for one in found)

    def _follow(self, name: str, live: LiveRequest) -> None:
        self._followed[name] = {}
        live.state.stores.set_stale(stale=True)

    def _blocks(self, name: str) -> set[int]:
        return {block.block_id for table in self._gpu_cache.tables(name) for block in table}

    def _added(self, name: str) -> Iterator[tuple[KVCacheBlock, BlockHashWithGroupId]]:
        """The blocks of a request that are in vLLM's cache. vLLM adds the blocks of a group in
        their order."""
        removed = self._followed[name]
        for group, table in enumerate(self._gpu_cache.tables(name)):
            first = removed.get(group, 0)
            for at, block in enumerate(table[first:], first):
                if block.block_hash is not None:
                    removed[group] = at + 1
                    yield block, block.block_hash
