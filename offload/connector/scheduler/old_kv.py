"""Keeps KV of old weights out of vLLM's own cache after a reset, so that no tier keeps it.

Part of the scheduler side, on its thread. vLLM cannot empty its own cache while requests hold
blocks. It says so, but the tiers are reset all the same, and the requests go on. vLLM then adds
blocks to its cache that are computed, in part, from KV of the old weights. Later requests would hit
them, and a tier would keep what is computed from them under the new weights.

So a reset empties vLLM's cache, and so does each step until all requests have ended or restarted
that hold old KV. A request that hits anything in that cache meanwhile, because it begins in the
step that has added it, counts as one of them, unless a request without old KV uses the same blocks.
Later requests load from the tiers instead.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.live_requests import LiveRequests
from offload.layout.groups import ModelLayout

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OldKv:
    """Knows the requests that may hold KV of old weights. None of them stores anything."""

    def __init__(self, layout: ModelLayout, requests: LiveRequests, gpu_cache: GpuCache) -> None:
        self._block_tokens = {group.group: group.block_tokens for group in layout.groups}
        self._requests = requests
        self._gpu_cache = gpu_cache
        self._holders: set[str] = set()
        self._has_old = False  # from the first holder until a step without one has ended
        self._began: list[tuple[Request, int]] = []

    def reset(self) -> None:
        """Find the requests that hold KV, because the weights may have changed, and empty vLLM's
        own cache."""
        for request in self._requests.all():
            if request.num_computed_tokens > 0:
                self._hold(request)
        self._gpu_cache.remove_all()

    def begins(self, request: Request) -> None:
        """Record that a request holds no KV, because vLLM looks it up."""
        self._holders.discard(request.request_id)
        self._set_stale(request, stale=False)

    def allocated(self, request: Request, external_tokens: int) -> None:
        """Record that vLLM has given blocks to a request, also for this many tokens that a
        connector loads. vLLM calls again when the load has ended, but this adds no hit."""
        if self._has_old and request.num_computed_tokens == 0:
            self._began.append((request, external_tokens))
        elif request.request_id in self._holders:  # perhaps kvtiers did not know it until now
            self._began.append((request, 0))

    def step(self) -> None:
        """Empty vLLM's own cache after it has scheduled a step, and find the requests that have hit
        it. This must precede the stores of the step."""
        began, self._began = self._began, []
        if not self._has_old:
            return
        hits = {
            request.request_id: (request, request.num_computed_tokens - external_tokens)
            for request, external_tokens in began
            if request.num_computed_tokens > external_tokens
        }
        for name, (request, tokens) in list(hits.items()):
            if self._are_new(request, tokens, hits):
                del hits[name]
            else:
                self._hold(request)
        self._gpu_cache.remove_all()
        self._has_old = bool(self._holders)

    def ended(self, request_id: str) -> None:
        """Empty vLLM's own cache after a request that holds old KV, because vLLM has added its last
        blocks."""
        if request_id in self._holders:
            self._holders.remove(request_id)
            self._gpu_cache.remove_all()
            self._has_old = bool(self._holders)

    def _are_new(self, request: Request, tokens: int, hits: Container[str]) -> bool:
        """True if requests without old KV use all blocks of these first tokens. Requests that have
        hits themselves count only when these are known to be new."""
        tables = self._gpu_cache.tables(request.request_id)
        if len(tables) != len(self._block_tokens):
            return False
        left = {
            block.block_id
            for group, block_tokens in self._block_tokens.items()
            for block in tables[group][: -(-tokens // block_tokens)]
            if not block.is_null
        }
        for other in self._requests.all():
            name = other.request_id
            if not left:
                break
            if name not in self._holders and name not in hits:
                for table in self._gpu_cache.tables(name):
                    left.difference_update(block.block_id for block in table)
        return not left

    def _hold(self, request: Request) -> None:
        self._holders.add(request.request_id)
        self._has_old = True
        self._set_stale(request, stale=True)

    def _set_stale(self, request: Request, *, stale: bool) -> None:
        live = self._requests.by_name.get(request.request_id)
        if live is not None:
            live.state.stores.set_stale(stale=stale)
