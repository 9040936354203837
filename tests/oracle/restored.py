"""Follows which tokens the connector restores for a request."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from offload.connector.connector import OffloadConnector


class RestoredTokens:
    """Follows vLLM's calls of a connector until the requests run."""

    def __init__(self, connector: OffloadConnector) -> None:
        self._look_up = connector.get_num_new_matched_tokens
        self._allocated = connector.update_state_after_alloc
        self._computed: dict[str, int] = {}
        self._restored: dict[str, range] = {}
        hooks: Any = connector
        hooks.get_num_new_matched_tokens = self._note_lookup
        hooks.update_state_after_alloc = self._note_allocated

    def take(self, name: str) -> range:
        """The tokens restored for a request that runs now."""
        return self._restored.pop(name, range(0))

    def _note_lookup(self, request: Request, computed: int) -> tuple[int | None, bool]:
        self._computed[request.request_id] = computed
        return self._look_up(request, computed)

    def _note_allocated(self, request: Request, blocks: Any, tokens: int) -> None:
        start = self._computed.pop(request.request_id, None)
        if start is not None:  # vLLM calls this again, without a lookup, when the load has ended
            self._restored[request.request_id] = range(start, start + tokens)
        self._allocated(request, blocks, tokens)
