"""What ``OffloadManager`` makes of its arguments: settings, geometry, and its tiers' indexes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.config.schema import OffloadConfig, parse_config
from offload.errors import ConfigError, Problem, TierUnavailableError
from offload.index.capacity import ByteCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.recovery import recover
from offload.index.tier_index import TierIndex
from offload.layout.keys import GROUP_BYTES, group_suffix
from offload.layout.kv_cache_config import KvCacheConfig, page_bytes
from offload.layout.registration import GroupCaches, LayerTensors, Registration
from offload.planner.planner import Planner
from offload.planner.presence import KNOWN_MAX, SharedLimits
from offload.planner.tier_health import HealthLimits, TierHealths
from policies.base import EntryInfo
from policies.registry import make_admission, make_policy
from tiers.base import SharedTier, Tier
from tiers.copy.base import CopyEngine
from tiers.copy.host_engine import HostCopyEngine
from tiers.record import KEY_BYTES_MAX
from tiers.slab.slab import HostSlab

KEY_MAX = KEY_BYTES_MAX - GROUP_BYTES
SHOWN_MAX = 5
"""Keys or block ids that one message names."""


def group_caches(
    kv_cache_config: KvCacheConfig,
    kv_caches: Mapping[str, LayerTensors],
    config: OffloadConfig,
) -> list[GroupCaches]:
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        missing = [name for name in group.layer_names if name not in kv_caches]
        if missing:
            raise ValueError(f"group {number}: no KV cache was given for layers {missing}")
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        pages = {
            name: page_bytes(specs.get(name, group.kv_cache_spec)) for name in group.layer_names
        }
        layers = {name: kv_caches[name] for name in group.layer_names}
        groups.append(GroupCaches(number, config.chunk_blocks, layers, pages))
    return groups


def group_infos(
    kv_cache_config: KvCacheConfig,
    registration: Registration,
    config: OffloadConfig,
    tiers: Sequence[Tier],
) -> dict[int, GroupInfo]:
    return {
        group.group: GroupInfo(
            "full",
            kv_cache_config.kv_cache_groups[group.group].kv_cache_spec.block_size
            * config.chunk_blocks,
            tuple(tier.footprint_bytes(group.record_bytes) for tier in tiers),
        )
        for group in registration.groups
    }


def in_process_settings(config: Mapping[str, Any] | OffloadConfig | None) -> OffloadConfig:
    settings = config if isinstance(config, OffloadConfig) else parse_config(config)
    if settings.tiers:
        what = "an in-process manager makes no tiers itself"
        fix = "Pass tier objects: OffloadManager.open(..., tiers=[LmdbTier(...)])."
        raise ConfigError([Problem("$.tiers", what, fix)])
    return settings


async def open_tier(
    tier: Tier, number: int, groups: Mapping[int, GroupInfo]
) -> tuple[TierIndex, bool]:
    """Open a tier and enter what it holds, unless it is shared, which is said beside. Raises
    ``TierUnavailableError``, whatever the tier raises: it may be somebody else's code."""
    try:
        return await _opened(tier, number, groups)
    except Exception as error:  # of a tier that may be somebody else's
        raise TierUnavailableError(f"kvtiers: tier {number}: {error}") from error


async def _opened(
    tier: Tier, number: int, groups: Mapping[int, GroupInfo]
) -> tuple[TierIndex, bool]:
    info = await tier.open()
    capacity = info.capacity_bytes
    if isinstance(tier, SharedTier):  # what is known of it; it keeps its capacity itself
        capacity = KNOWN_MAX * max(group.footprints[number] for group in groups.values())
    index = TierIndex(info.name, ByteCapacity(capacity), make_policy("lru"), low_watermark=0.95)
    if isinstance(tier, SharedTier):
        return index, True
    infos = {
        group: EntryInfo(group, size_bytes=info.footprints[number])
        for group, info in groups.items()
    }
    batches = tier.keys()
    columns = [batch.column async for batch in batches]
    await tier.delete(recover(index, columns, infos))
    return index, False


def wanted_run(
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    group: int,
    chunk_blocks: Mapping[int, int],
    num_blocks: int,
) -> ChunkBatch:
    """The chunks that a call is about; ``chunk_blocks`` are the blocks of a chunk by group. Raises
    ``ValueError`` that names everything wrong with the call."""
    if group not in chunk_blocks:
        raise ValueError(f"there is no group {group!r}: groups are {sorted(chunk_blocks)}")
    problems = _key_problems(keys)
    wanted = len(keys) * chunk_blocks[group]
    if len(block_ids) != wanted:
        each = chunk_blocks[group]
        problems.append(
            f"{len(keys)} keys need {wanted} block ids ({each} each), got {len(block_ids)}"
        )
    blocks, of_blocks = _blocks(block_ids, num_blocks)
    problems += of_blocks
    if problems:
        raise ValueError("; ".join(problems))
    suffix = group_suffix(group)
    return ChunkBatch([key + suffix for key in keys], group, blocks, range(1, len(keys) + 1))


def _key_problems(keys: Sequence[bytes]) -> list[str]:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        return [f"keys must be a sequence of bytes objects, one per chunk, got {type(keys)}"]
    problems = []
    others = [key for key in keys if not isinstance(key, bytes)]
    if others:
        problems.append(f"keys must be bytes, got {others[:SHOWN_MAX]}")
        return problems
    sizes = [len(key) for key in keys if not 0 < len(key) <= KEY_MAX]
    if sizes:
        problems.append(f"a key has 1 to {KEY_MAX} bytes, got some of {sizes[:SHOWN_MAX]}")
    if twice := _repeated(keys):
        named = [key.hex()[:16] for key in twice]
        problems.append(f"keys must differ within a call, these are there twice: {named}")
    return problems


def _blocks(block_ids: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], list[str]]:
    """Block ids as integers, whatever kind of integers they are; and what is wrong with them."""
    found: list[int] = []
    others = []
    for block in block_ids:
        try:
            found.append(operator.index(block))
        except TypeError:
            others.append(block)
    problems = []
    if others:
        problems.append(f"block ids must be integers, got {others[:SHOWN_MAX]}")
    if outside := [b for b in found if not 0 <= b < num_blocks]:
        problems.append(f"block ids {outside[:SHOWN_MAX]} are not in 0..{num_blocks - 1}")
    if twice := _repeated(found):
        problems.append(f"block ids must differ within a call, these are there twice: {twice}")
    return tuple(found), problems


def _repeated(values: Sequence[Any]) -> list[Any]:
    if len(set(values)) == len(values):
        return []
    return [value for value, count in Counter(values).items() if count > 1][:SHOWN_MAX]


def make_planner(
    settings: OffloadConfig,
    groups: Mapping[int, GroupInfo],
    cpu: TierIndex,
    opened: Sequence[tuple[TierIndex, bool]],
    slots: int,
) -> Planner:
    """``opened`` is what ``open_tier`` has returned for each lower tier."""
    admission = settings.cpu.admission
    lower = [index for index, _ in opened]
    return Planner(
        groups,
        cpu,
        lower,
        max_store_chunks=slots,  # callers wait, which is bound enough, here and below
        step_chunks=1 << 30,
        gates=TierHealths(
            [index.name for index in lower],
            HealthLimits(settings.breaker_failures, break_even=False),  # callers decide
        ),
        admission=None if admission.name == "all" else make_admission(admission.spec),
        shared=[number for number, (_, is_shared) in enumerate(opened) if is_shared],
        shared_limits=SharedLimits(settings.lookup_timeout_s, settings.remember_s),
    )


def make_slab(slot_bytes: int, slots: int, device: torch.device, pin: str) -> HostSlab:
    if device.type != "cuda" or pin == "off":
        return HostSlab(slot_bytes, slots)
    from tiers.copy.cuda_engine import gpu_node

    node = gpu_node(device.index)
    return HostSlab(slot_bytes, slots, pin=True, pin_fallback=pin == "prefer", numa_node=node)


def make_engine(registration: Registration, slab: HostSlab, device: torch.device) -> CopyEngine:
    if device.type == "cuda":
        from tiers.copy.cuda_engine import CudaCopyEngine

        return CudaCopyEngine(
            registration.groups, slab, device=device.index, num_blocks=registration.num_blocks
        )
    return HostCopyEngine(registration.groups, slab, num_blocks=registration.num_blocks)
