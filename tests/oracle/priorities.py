"""Priorities in a world of the scheduler oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from tests.oracle.features import Feature

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine


class Priorities(Feature):
    """vLLM runs requests by their priority, and preempts those that matter least.

    It may preempt a request that it has scheduled in the same step, and leaves the blocks in its
    cache that the step would have computed (vllm#57580). ``uncomputed`` has these blocks and their
    hashes, in the order of the steps.
    """

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self.uncomputed: list[tuple[int, Any]] = []
        self._preempt = world.scheduler._preempt_request
        world.scheduler._preempt_request = self._note_and_preempt

    def arguments(self, name: str) -> dict[str, Any]:
        return {"priority": self.random.randrange(3), "arrival_time": float(name[1:])}

    def _note_and_preempt(self, request: Request, *args: Any, **more: Any) -> None:
        cache = self.world.scheduler.kv_cache_manager
        tables = cache.get_block_ids(request.request_id)
        managers = cache.coordinator.single_type_managers
        for table, manager in zip(tables, managers, strict=True):
            for block in table[request.num_computed_tokens // manager.block_size :]:
                if block_hash := cache.block_pool.blocks[block].block_hash:
                    self.uncomputed.append((block, block_hash))
                    self.world.seen["uncomputed blocks"] += 1
        self._preempt(request, *args, **more)
