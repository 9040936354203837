"""Keeps KV of old weights out of vLLM's own cache after a reset, so that no tier keeps it.

Part of the scheduler side, on its thread. vLLM cannot empty its own cache while requests hold
blocks. It says so, but the tiers are reset all the same, and the requests go on. vLLM then adds
blocks to its cache that are computed, in part, from KV of the old weights. Later requests would hit
them, and a tier would keep what is computed from them under the new weights.

So a reset empties vLLM's cache, and so does each step until all requests have ended or restarted
that hold old KV. A request that hits anything in that cache meanwhile, because it begins in the
step that has added it, counts as one of them. Later requests load from the tiers instead.
"""

from __future__ import annotations

from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.live_requests import LiveRequest, LiveRequests


class OldKv:
    """Knows the requests that may hold KV of old weights. None of them stores anything."""

    def __init__(self, requests: LiveRequests, gpu_cache: GpuCache) -> None:
        self._requests = requests
        self._gpu_cache = gpu_cache
        self._holders: set[str] = set()
        self._began: list[tuple[str, int]] = []

    def reset(self) -> None:
        """Find the requests that hold KV, because the weights may have changed, and empty vLLM's
        own cache."""
        for name, live in self._requests.by_name.items():
            if live.request.num_computed_tokens > 0:
                self._hold(name, live)
        self._gpu_cache.remove_all()

    def begins(self, live: LiveRequest) -> None:
        """Record that a request holds no KV, because vLLM looks it up."""
        self._holders.discard(live.request.request_id)
        live.state.stores.set_stale(stale=False)

    def allocated(self, request_id: str, external_tokens: int) -> None:
        """Record that vLLM has given blocks to a request that held none, also for this many tokens
        that a connector loads."""
        if self._holders:
            self._began.append((request_id, external_tokens))

    def step(self) -> None:
        """Empty vLLM's own cache after it has scheduled a step, and find the requests that have hit
        it. This must precede the stores of the step."""
        began, self._began = self._began, []
        if not self._holders:
            return
        for name, external_tokens in began:
            live = self._requests.by_name.get(name)
            if live is not None and live.request.num_computed_tokens > external_tokens:
                self._hold(name, live)
        self._gpu_cache.remove_all()

    def ended(self, request_id: str) -> None:
        """Empty vLLM's own cache after a request that holds old KV, because vLLM has added its last
        blocks."""
        if request_id in self._holders:
            self._holders.remove(request_id)
            self._gpu_cache.remove_all()

    def _hold(self, name: str, live: LiveRequest) -> None:
        self._holders.add(name)
        live.state.stores.set_stale(stale=True)
