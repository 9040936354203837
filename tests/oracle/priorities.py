"""Priorities in a world of the scheduler oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from tests.oracle.features import Feature

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine


class Priorities(Feature):
    """vLLM runs requests by their priority, and preempts those that matter least.

    vLLM 0.32 may preempt a request that it has scheduled in the same step. It leaves the blocks in
    its cache that the step would have computed, and the next request hits them (vllm#57580). Here
    they are removed, because what is computed from them is wrong, with and without a connector.
    """

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self._preempt = world.scheduler._preempt_request
        world.scheduler._preempt_request = self._remove_and_preempt

    def arguments(self, name: str) -> dict[str, Any]:
        return {"priority": self.random.randrange(3), "arrival_time": float(name[1:])}

    def _remove_and_preempt(self, request: Request, *args: Any, **more: Any) -> None:
        cache = self.world.scheduler.kv_cache_manager
        tables = cache.get_block_ids(request.request_id)
        managers = cache.coordinator.single_type_managers
        uncomputed = {
            block
            for table, manager in zip(tables, managers, strict=True)
            for block in table[request.num_computed_tokens // manager.block_size :]
        }
        cache.evict_blocks(uncomputed - {0})
        self._preempt(request, *args, **more)
