"""Removes blocks from vLLM's own cache that vLLM has not computed.

Part of the scheduler side, on its thread. By priority, vLLM may preempt a request that it has
scheduled in the same step. The blocks that this step would have completed stay in its cache
(vllm#57580): later requests would hit them, and a tier would keep what is computed from them.

A step that preempts a request begins no other, so nothing hits the blocks before they are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from offload.connector.guard import run_all
from offload.connector.scheduler.live_requests import LiveRequests
from offload.connector.scheduler.waiting_requests import GpuCache
from offload.layout.groups import ModelLayout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request


class UncomputedBlocks:
    """Finds and removes the blocks. A step computes up to ``step_tokens`` tokens."""

    def __init__(
        self, layout: ModelLayout, requests: LiveRequests, gpu_cache: GpuCache, step_tokens: int
    ) -> None:
        self._groups = [group.group for group in layout.groups]
        self._hash_tokens = layout.hash_tokens
        self._requests = requests
        self._gpu_cache = gpu_cache
        self._step_tokens = step_tokens
        self._computed: dict[str, tuple[Request, int]] = {}

    def before_preemption(self) -> None:
        """Record how many tokens of each request are computed, because vLLM sets this number to 0
        in the request that it preempts. Otherwise it does not change while a step is scheduled."""
        if not self._computed:
            requests = [live.request for live in self._requests.by_name.values()]
            self._computed = {one.request_id: (one, one.num_computed_tokens) for one in requests}

    def remove(self, preempted: Iterable[str]) -> None:
        """Remove what the step that was just scheduled does not compute, because it has preempted
        these requests. An error leaves only its own blocks; the first error is raised at the end.
        """
        found, self._computed = self._computed, {}
        run_all(
            partial(self._gpu_cache.remove, block_hash, group)
            for request, computed in filter(None, map(found.get, preempted))
            for block_hash, group in product(self._uncomputed(request, computed), self._groups)
        )

    def _uncomputed(self, request: Request, computed: int) -> Sequence[BlockHash]:
        """The hashes of all blocks that a step can add when this many tokens are computed."""
        first = computed // self._hash_tokens
        end = (computed + self._step_tokens) // self._hash_tokens
        found: Sequence[BlockHash] = request.block_hashes[first:end]
        return found
