"""What ``OffloadManager`` makes of its arguments: settings, geometry, and its tiers' indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.chunks import GroupInfo
from offload.config import OffloadConfig, parse_config
from offload.errors import ConfigError, Problem, TierUnavailableError
from offload.index import TierIndex
from offload.kv_config import KvCacheConfig, page_bytes
from offload.load_task import io_bytes
from offload.recovery import recover
from offload.registry import GroupCaches, LayerTensors, Registration
from offload.shared import KNOWN_MOST
from offload.space import ByteSpace
from policies.base import EntryInfo
from policies.registry import make_policy
from tiers.base import Tier, TierError


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
            tuple(tier.footprint_bytes(io_bytes(group)) for tier in tiers),
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
    """Open a tier and enter what it holds, unless it is shared, which is said beside."""
    try:
        info = await tier.open()
    except TierError as error:
        raise TierUnavailableError(f"kvtiers: tier {number}: {error}") from error
    capacity = info.capacity_bytes
    if info.shared:  # what is known of it; it keeps its capacity itself
        capacity = KNOWN_MOST * max(group.footprints[number] for group in groups.values())
    index = TierIndex(info.name, ByteSpace(capacity), make_policy("lru"), low_watermark=0.95)
    if info.shared:
        return index, True
    infos = {
        group: EntryInfo(group, size_bytes=info.footprints[number])
        for group, info in groups.items()
    }
    batches = tier.keys()
    columns = [batch.column async for batch in batches]
    await tier.delete(recover(index, columns, infos))
    return index, False
