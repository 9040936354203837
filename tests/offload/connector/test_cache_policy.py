"""Our policies in vLLM's own CPU tier: its real manager, under random requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from offload.connector.cache_policy import TierCachePolicy

MODULE = "offload.connector.cache_policy"
CHUNKS = 12


def manager_of(policy: str, module: str | None = MODULE) -> CPUOffloadingManager:
    return CPUOffloadingManager(CHUNKS, policy, module)


def request(manager: Any, name: str, keys: list[bytes], fail: bool = False) -> list[bytes] | None:
    """Run one request: present chunks are loaded, the others stored. Returns the chunks evicted for
    it, or ``None`` if there was no space."""
    context = ReqContext(name)
    for position, key in enumerate(keys):
        context.set_offload_key_position(key, position)
    manager.on_new_request(context)
    found = [key for key in keys if manager.lookup(key, context) is LookupResult.HIT]
    if found:
        manager.prepare_load(found, context)
    stored = manager.prepare_store([key for key in keys if key not in found], context)
    if found:
        manager.complete_load(found, context)
    if stored is not None:
        manager.complete_store(stored.keys_to_store, context, success=not fail)
    manager.on_request_finished(context)
    return None if stored is None else list(stored.evicted_keys)


def prompts(seed: int, count: int = 300) -> list[list[bytes]]:
    draw = random.Random(seed)
    chains = [[make_offload_key(bytes([chain, n]) * 16, 0) for n in range(7)] for chain in range(9)]
    return [draw.choice(chains)[: draw.randint(1, 7)] for _ in range(count)]


@pytest.mark.parametrize("policy", ["adaptive", "kvtiers_arc", "s3fifo", "wtinylfu", "lirs"])
def test_vllms_manager_stays_consistent_with_our_policies(policy: str) -> None:
    manager = manager_of(policy)
    assert isinstance(manager._policy, TierCachePolicy)
    evicted = 0
    for number, keys in enumerate(prompts(1)):
        gone = request(manager, str(number), keys, fail=number % 17 == 0)
        assert gone is not None, "any of these requests fits into twelve chunks"
        evicted += len(gone)
        assert set(gone).isdisjoint(keys)
        assert all(manager._policy.get(key) is None for key in gone)
        assert manager._num_evictable_cache_chunks == len(manager._policy._chunks) <= CHUNKS
    assert evicted > 50
    assert manager._policy._policy.faults == []
    manager.reset_cache()
    assert manager.lookup(prompts(1)[0][0], ReqContext("r")) is LookupResult.MISS


def test_our_lru_evicts_the_same_chunks_as_vllms() -> None:
    ours, theirs = manager_of("kvtiers_lru"), manager_of("lru", None)
    for number, keys in enumerate(prompts(2)):
        gone = [request(manager, str(number), keys) for manager in (ours, theirs)]
        assert set(gone[0] or ()) == set(gone[1] or ()), f"request {number}"


def test_chunks_in_use_are_not_evicted() -> None:
    manager = manager_of("kvtiers_lru")
    first, second = prompts(3)[0][:1], [make_offload_key(bytes([n]) * 32, 0) for n in range(12)]
    request(manager, "a", first)
    loading = ReqContext("b")
    manager.on_new_request(loading)
    manager.prepare_load(first, loading)
    assert request(manager, "c", second) is None, "one of twelve chunks is being read"
    manager.complete_load(first, loading)
    assert request(manager, "d", second) == first


@pytest.mark.parametrize("context", [(), (ReqContext("r"),)], ids=["0.32", "0.33"])
def test_a_chunk_is_inserted_with_the_arguments_of_each_version(context: tuple[Any, ...]) -> None:
    policy: Any = manager_of("kvtiers_lru")._policy
    key, chunk = prompts(3)[0][0], ChunkStatus(0)
    policy.insert(key, chunk, *context)
    assert policy.get(key) is chunk


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(AttributeError, match="no policy 'nonsense'"):
        manager_of("nonsense")


def test_chunks_that_were_offered_again_are_not_evicted_for_the_rest() -> None:
    manager = manager_of("kvtiers_lru")
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(CHUNKS + 1)]
    for key in keys[:-1]:
        assert request(manager, key.hex(), [key]) == []
    context = ReqContext("r")
    manager.on_new_request(context)
    stored = manager.prepare_store([keys[0], keys[-1]], context)
    assert stored is not None
    assert list(stored.evicted_keys) == [keys[1]], "the first is older, but was offered"
