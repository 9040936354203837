"""Reads vLLM's own cache, and removes blocks from it.

Part of the scheduler side, on its thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class GpuCache:
    """The functions of vLLM's own cache. ``cached_tokens`` returns how many tokens of a request it
    holds, or ``None`` if nothing may be read ahead for this request. ``free_blocks`` counts the
    free blocks of the GPU. ``tables`` returns the blocks of a request by group. ``remove`` removes
    a block if it has this hash, and ``remove_all`` all blocks; requests that use them keep them."""

    cached_tokens: Callable[[Request], int | None] = lambda _: 0
    free_blocks: Callable[[], int] = lambda: sys.maxsize
    tables: Callable[[str], Sequence[Sequence[KVCacheBlock]]] = lambda _: ()
    remove: Callable[[KVCacheBlock, BlockHashWithGroupId], None] = lambda _block, _block_hash: None
    remove_all: Callable[[], None] = lambda: None

    def with_manager(self, manager: KVCacheManager) -> GpuCache:
        """A copy that reads from vLLM's manager."""
        pool: BlockPool = manager.block_pool
        return replace(
            self,
            cached_tokens=partial(_cached_tokens, manager),
            free_blocks=pool.get_num_free_blocks,
            tables=partial(_tables, manager),
        )

    def with_pool(self, pool: BlockPool) -> GpuCache:
        """A copy that removes blocks from vLLM's pool."""
        return replace(self, remove=partial(_remove, pool), remove_all=partial(_remove_all, pool))


def _cached_tokens(manager: KVCacheManager, request: Request) -> int | None:
    """Count the tokens of a waiting request that vLLM's own cache holds now. ``None`` for requests
    that load nothing, or whose lookups vLLM reports as KV events."""
    if request.num_computed_tokens or request.skip_reading_prefix_cache:
        return None
    if getattr(request, "kv_cache_report_mode", "incremental") == "full":
        return None
    found: int = manager.get_computed_blocks(request)[1]
    return found


def _tables(manager: KVCacheManager, request_id: str) -> Sequence[Sequence[KVCacheBlock]]:
    found: Sequence[Sequence[KVCacheBlock]] = manager.get_blocks(request_id).blocks
    return found


def _remove(pool: BlockPool, block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
    """Remove a block, unless vLLM has used it for something else by now."""
    if block.block_hash == block_hash:
        pool.evict_blocks({block.block_id})


def _remove_all(pool: BlockPool) -> None:
    if len(pool.cached_block_hash_to_block) == 0:
        return
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
