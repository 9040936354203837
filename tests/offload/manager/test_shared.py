"""The in-process API over a tier that several managers share."""

from __future__ import annotations

from tests.offload.small_model import compute, keys, kv_caches, open_manager, wrong_blocks
from tiers.testing.faults import HoldingSharedTier
from tiers.testing.memory_tier import SharedMemory, SharedMemoryTier

NAMES = keys(6)
PATIENT = {"lookup_timeout_s": 10}
"""Time limit for replies that must arrive, even on a busy machine."""


async def test_managers_restore_each_others_chunks() -> None:
    memory = SharedMemory(1 << 22)
    one, other = kv_caches(), kv_caches()
    async with await open_manager(one, [SharedMemoryTier(memory)], **PATIENT) as first:
        compute(one, NAMES, range(6))
        assert await first.offload(NAMES, range(6)) == 6
        await first.flush()
        async with await open_manager(other, [SharedMemoryTier(memory)], **PATIENT) as second:
            assert second.lookup(NAMES) == 0, "there was no query yet"
            assert await second.restore(NAMES, range(10, 16)) == 6
            assert wrong_blocks(other, NAMES, range(10, 16)) == []
            await second.reset()
            assert await second.restore(NAMES, range(10, 16)) == 0
            assert len(memory.records) == 6, (
                "resets and evictions must not delete records of others"
            )
        await first.reset()
        assert await first.restore(NAMES, range(10, 16)) == 0


async def test_a_tier_that_does_not_reply_is_not_waited_for() -> None:
    memory = SharedMemory(1 << 22)
    held = HoldingSharedTier(SharedMemoryTier(memory), methods={"present"})
    async with await open_manager(kv_caches(), [held]) as manager:
        assert await manager.restore(NAMES, range(6)) == 0
        assert held.met == 1
        held.release()
