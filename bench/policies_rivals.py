"""Runs vLLM's own eviction policies and libcachesim's caches as rivals, if they are installed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.simulation.trace import Trace


class VllmPolicy(EvictionPolicy):
    """One of vLLM's CPU offloading policies ("lru", "arc") behind our interface.

    vLLM's policies evict, but ours only name victims: a key that vLLM's policy has evicted counts
    as a member until it is removed, so every victim must be evicted. Requests are reported as by
    vLLM's manager: once, at their end, with inserted and reused keys distinguished. Raises
    ``ImportError`` without vLLM.
    """

    def __init__(self, name: str, capacity: int) -> None:
        module = importlib.import_module(f"vllm.v1.kv_offload.cpu.policies.{name}")
        base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
        self._policy: Any = getattr(module, f"{name.upper()}CachePolicy")(capacity)
        self._chunk: Any = base.ChunkStatus
        self._fresh: set[Key] = set()
        self._named: set[Key] = set()
        self._members = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        chunk = self._chunk(0)
        chunk.ref_cnt = 0
        self._policy.on_store_miss([key], _Context)
        self._policy.insert(key, chunk)
        self._policy.mark_evictable(key)
        self._fresh.add(key)
        self._members += 1

    def touch(self, keys: Sequence[Key]) -> None:
        fresh = self._fresh.intersection(keys)
        reused = {key for key in keys if key not in fresh and self._policy.get(key) is not None}
        known = [key for key in keys if key in fresh or key in reused]
        self._policy.on_request_finished((known,), fresh, reused, _Context)
        self._fresh -= fresh

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        evicted = self._policy.evict(count, _Refused(evictable))
        named = [key for key, _ in evicted or ()]
        self._named.update(named)
        return named

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if key in self._named:
            self._named.discard(key)
        elif self._policy.get(key) is None:
            return
        else:
            self._policy.mark_non_evictable(key)
            self._policy.remove(key)
        self._members -= 1

    def clear(self) -> None:
        self._policy.clear()
        self._fresh.clear()
        self._named.clear()
        self._members = 0

    def __len__(self) -> int:
        return self._members


class _Context:
    """The context of a request for vLLM's policies. Keys come in prefix order here."""

    @staticmethod
    def get_offload_key_position(key: Key) -> None:
        return None


class _Refused:
    """The complement of ``evictable`` as a container."""

    def __init__(self, evictable: Callable[[Key], bool]) -> None:
        self._evictable = evictable

    def __contains__(self, key: Key) -> bool:
        return not self._evictable(key)


def libcachesim_run(trace: Trace, name: str, capacity: int) -> tuple[float, float]:
    """Return the token hit ratio and the time per access, in ns, of one of libcachesim's caches for
    the same blocks.

    For each request, this counts the leading resident blocks, and then accesses every block once,
    tail first. Raises ``ImportError`` without libcachesim.
    """
    library = importlib.import_module("libcachesim")
    cache = getattr(library, name)(cache_size=capacity)
    access = library.Request()
    access.obj_size = 1
    hit_tokens = prompt_tokens = spent_ns = accesses = 0
    for request in trace.requests:
        blocks = request.blocks()
        hits = 0
        for block in blocks:
            access.obj_id = block
            if cache.find(access, False) is None:
                break
            hits += 1
        hit_tokens += min(hits * trace.block_tokens, request.prompt_tokens)
        prompt_tokens += request.prompt_tokens
        start = time.perf_counter_ns()
        for block in reversed(blocks):
            access.obj_id = block
            cache.get(access)
        spent_ns += time.perf_counter_ns() - start
        accesses += len(blocks)
    return hit_tokens / prompt_tokens, spent_ns / accesses
