"""Makes kvtiers' eviction policies available to vLLM's own offloading.

The CPU tier of vLLM's ``OffloadingConnector`` finds a policy by name and module:

    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 10737418240,
        "eviction_policy": "adaptive",
        "cache_policy_module_path": "offload.connector.cache_policy"
    }

Every policy name (``policies.registry``, or ``module:Class`` for your own) is an attribute of this
module: the class of that policy. For ``lru`` and ``arc``, vLLM uses its own policies;
``kvtiers_lru`` and ``kvtiers_arc`` name those of kvtiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from policies.base import EntryInfo, RemoveCause
from policies.guarded import GuardedPolicy
from policies.registry import make_policy

PREFIX = "kvtiers_"


class TierCachePolicy(CachePolicy):  # type: ignore[misc]  # vllm is untyped here
    """vLLM's ``CachePolicy`` on top of the policy that ``spec`` names.

    The policy is guarded: if it fails, LRU replaces it. Chunks with a ``ref_cnt`` other than 0 are
    in use and are never victims.
    """

    spec: ClassVar[str] = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._policy = GuardedPolicy(make_policy(self.spec), members=self._chunks, tier="vLLM's")

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Insert a key. vLLM 0.33 and later also pass ``req_context``, which the policies do not
        need."""
        self._chunks[key] = chunk
        self._policy.insert(key, EntryInfo(get_offload_group_idx(key)))

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._policy.remove(key, RemoveCause.DROPPED)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._policy.touch(list(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing: the policies recognize a returning key without this hook."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        for keys in key_groups:
            self._policy.touch(list(keys))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        chunks = self._chunks

        def evictable(key: object) -> bool:
            return chunks[key].ref_cnt == 0 and key not in protected

        victims = self._policy.victims(n, evictable)
        if len(victims) < n:
            return None
        evicted = []
        for key in victims:
            evicted.append((key, chunks.pop(key)))
            self._policy.remove(key, RemoveCause.EVICTED)
        return evicted

    def clear(self) -> None:
        self._chunks.clear()
        self._policy.clear()


def __getattr__(name: str) -> type[TierCachePolicy]:
    """Return the class for a policy. Raises ``AttributeError`` if there is no such policy."""
    spec = name.removeprefix(PREFIX)
    try:
        make_policy(spec)
    except Exception as error:  # a third-party policy's constructor may raise anything
        raise AttributeError(f"module {__name__!r} has no policy {spec!r}: {error}") from error
    return type(name, (TierCachePolicy,), {"spec": spec})
