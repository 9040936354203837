"""Offloads and restores KV blocks in one process, without vLLM.

Run: ``python examples/inprocess.py``. It makes a small KV cache and offloads ten blocks to a CPU
tier that holds six, with an LMDB tier below it. Then it forgets the blocks and restores all ten.
"""

from __future__ import annotations

import asyncio
import tempfile

import torch

from offload import OffloadManager, SimpleConfig, SimpleGroup, SimpleSpec
from tiers import LmdbTier

BLOCKS, BLOCK_TOKENS, PAGE_BYTES = 32, 16, 8192


async def main() -> None:
    """Offload, forget and restore blocks."""
    layers = ("layers.0", "layers.1")
    kv_caches = {name: torch.empty((BLOCKS, PAGE_BYTES), dtype=torch.uint8) for name in layers}
    spec = SimpleSpec(BLOCK_TOKENS, PAGE_BYTES)
    kv_cache_config = SimpleConfig(BLOCKS, (SimpleGroup(layers, spec),))
    config = {"cpu": {"capacity": 8 * 2 * PAGE_BYTES, "policy": "lru"}, "staging": 4 * PAGE_BYTES}

    with tempfile.TemporaryDirectory() as folder:
        disk = LmdbTier(folder, 64 << 20, reserve_bytes=0)
        async with await OffloadManager.open(
            kv_cache_config, kv_caches, config, tiers=[disk]
        ) as manager:
            for cache in kv_caches.values():
                cache.random_(0, 255)
            before = {name: cache[:10].clone() for name, cache in kv_caches.items()}
            keys = [f"prefix-{n}".encode() for n in range(10)]
            for start in range(0, 10, 5):
                await manager.offload(keys[start : start + 5], range(start, start + 5))
                await manager.flush()

            for cache in kv_caches.values():
                cache.zero_()
            restored = await manager.restore(keys, range(20, 30))
            equal = all(torch.equal(kv_caches[name][20:30], before[name]) for name in layers)
            print(f"restored {restored} of {len(keys)} blocks, bytes equal: {equal}")
            if restored != len(keys) or not equal:
                raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
