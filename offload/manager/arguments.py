"""Checks the arguments of ``OffloadManager`` and turns them into settings, layouts and chunks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from offload.config.schema import OffloadConfig, TierConfig, parse_config
from offload.errors import ConfigError, Problem
from offload.index.chunk_batch import ChunkBatch
from offload.layout.groups import FULL, GroupLayout
from offload.layout.keys import GROUP_BYTES, group_suffix
from offload.layout.kv_cache_config import KvCacheConfig, page_bytes
from offload.layout.registration import GroupCaches, LayerTensors
from tiers.record import KEY_BYTES_MAX

KEY_MAX = KEY_BYTES_MAX - GROUP_BYTES
SHOWN_KEYS_MAX = 5
"""Maximum number of keys or block ids that one message names."""


def group_caches(
    kv_cache_config: KvCacheConfig,
    kv_caches: Mapping[str, LayerTensors],
    config: OffloadConfig,
) -> list[GroupCaches]:
    """The tensors of each group. Raises a ``ValueError`` that names the layers without a KV
    cache."""
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


def group_layouts(kv_cache_config: KvCacheConfig, config: OffloadConfig) -> tuple[GroupLayout, ...]:
    """The layouts of the groups. Callers restore prefixes of keys, so every group needs all of its
    chunks."""
    return tuple(
        GroupLayout(
            number,
            FULL,
            group.kv_cache_spec.block_size,
            config.chunk_blocks,
            tuple(group.layer_names),
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def in_process_settings(
    config: Mapping[str, Any] | OffloadConfig | None, tiers: int
) -> OffloadConfig:
    """The configuration for this many tier objects, each with the default options of a tier.

    Callers decide what to restore, so the speed of loading is not compared with that of
    computing."""
    settings = config if isinstance(config, OffloadConfig) else parse_config(config)
    if settings.tiers:
        what = "an in-process manager does not create tiers"
        fix = "Pass tier objects: OffloadManager.open(..., tiers=[LmdbTier(...)])."
        raise ConfigError([Problem("$.tiers", what, fix)])
    given = (TierConfig(type="object", path="", capacity=0),) * tiers
    return msgspec.structs.replace(settings, tiers=given, break_even=False)


def checked_batch(
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    group: int,
    chunk_blocks: Mapping[int, int],
    num_blocks: int,
) -> ChunkBatch:
    """The chunks of a call; ``chunk_blocks`` are the blocks of a chunk by group.

    Raises a ``ValueError`` that names every problem with the call.
    """
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
        problems.append(f"keys must be bytes, got {others[:SHOWN_KEYS_MAX]}")
        return problems
    sizes = [len(key) for key in keys if not 0 < len(key) <= KEY_MAX]
    if sizes:
        problems.append(f"a key has 1 to {KEY_MAX} bytes, got some of {sizes[:SHOWN_KEYS_MAX]}")
    if twice := _repeated(keys):
        named = [key.hex()[:16] for key in twice]
        problems.append(f"keys must differ within a call; these occur twice: {named}")
    return problems


def _blocks(block_ids: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], list[str]]:
    """The block ids as Python integers, from any integer type, and the problems with them."""
    found: list[int] = []
    others = []
    for block in block_ids:
        try:
            found.append(operator.index(block))
        except TypeError:
            others.append(block)
    problems = []
    if others:
        problems.append(f"block ids must be integers, got {others[:SHOWN_KEYS_MAX]}")
    if outside := [b for b in found if not 0 <= b < num_blocks]:
        problems.append(f"block ids {outside[:SHOWN_KEYS_MAX]} are not in 0..{num_blocks - 1}")
    if twice := _repeated(found):
        problems.append(f"block ids must differ within a call; these occur twice: {twice}")
    return tuple(found), problems


def _repeated(values: Sequence[Any]) -> list[Any]:
    if len(set(values)) == len(values):
        return []
    return [value for value, count in Counter(values).items() if count > 1][:SHOWN_KEYS_MAX]
