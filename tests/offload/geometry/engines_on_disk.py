"""Small engines that keep records of one model in different geometries on real disks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from offload.config.schema import parse_config
from offload.layout.keys import group_suffix
from offload.namespaces.geometry import HEADS, Geometry, GroupGeometry, LayerGeometry
from offload.namespaces.manifest import Namespace
from offload.worker.tier_factory import TierSpec, make_tier
from offload.worker.tier_folders import TierFolders
from tiers.base import Buffer, ReadOutcome, Tier, WriteOutcome
from tiers.testing import aligned

HEADS_ALL, BLOCK_TOKENS, UNIT = 4, 32, 64
KEYS = [bytes([number]) * 32 + group_suffix(0) for number in range(6)]


def namespace_of(ranks: int, **changes: Any) -> Namespace:
    """A subset of the fields that ``offload.connector.model.identity`` makes."""
    groups = [{"kind": "FullAttentionSpec", "num_kv_heads": HEADS_ALL // ranks, "head_size": 32}]
    return Namespace.of(
        {
            "model": {"name": "m"},
            "hash": {"algorithm": "sha256_cbor", "seed": "0"},
            "parallel": {"tensor": ranks, "pipeline": 1},
            "geometry": {"chunk_blocks": 1, "hash_block_size": 32, "groups": groups},
        }
        | changes
    )


def geometry_of(ranks: int, rank: int, split: str = HEADS) -> Geometry:
    heads = HEADS_ALL // ranks
    layers = tuple(
        LayerGeometry(
            f"layer.{n}", split, "CPU_ATTN", 1, BLOCK_TOKENS, heads, 1, UNIT * BLOCK_TOKENS
        )
        for n in range(2)
    )
    group = GroupGeometry(0, "full", "full_attention", BLOCK_TOKENS, 1, layers)
    return Geometry(bytes([ranks]) * 16, rank, ranks, "LBHNC", (group,))


def places(path: Path, ranks: int, rank: int = 0, how: str = "own", **options: Any) -> TierFolders:
    about = {key: options.pop(key) for key in ("namespace", "geometry") if key in options}
    table = {"type": "lmdb", "path": str(path), "capacity": "64MiB", "reserve": 0}
    tiers = [table | {"geometry": how} | options]
    config = parse_config({"cpu": {"capacity": 1 << 20}, "tiers": tiers})
    geometry = about.get("geometry") or geometry_of(ranks, rank)
    namespace = about.get("namespace") or namespace_of(ranks)
    return TierFolders(
        config, namespace, geometry.records, rank, 0, ranks, engine="test", geometry=geometry
    )


def payload(geometry: Geometry, key: bytes) -> Buffer:
    """A rank's record of a key: every head of every layer has different bytes."""
    found = aligned(-(-geometry.groups[0].chunk_bytes // 4096) * 4096)
    found[:] = 0
    heads = geometry.groups[0].layers[0].heads
    size = UNIT * BLOCK_TOKENS
    for layer in range(2):
        for head in range(heads):
            at = (layer * heads + head) * size
            number = key[0] * 16 + layer * 8 + geometry.rank * heads + head
            found[at : at + size] = np.frombuffer(
                np.full(size // 4, number, "<u4").tobytes(), np.uint8
            )
    return found


def release(specs: list[TierSpec]) -> None:
    claim = specs[0].claim
    assert claim is not None
    claim.close()


@asynccontextmanager
async def opened(specs: list[TierSpec], number: int) -> AsyncIterator[Tier]:
    tier = make_tier(specs[number], 4096)
    try:
        await tier.open()
        yield tier
    finally:
        await tier.aclose()


async def write(path: Path, ranks: int, keys: list[bytes] = KEYS, **options: Any) -> None:
    """An engine that has stored ``keys`` and ended."""
    for rank in range(ranks):
        specs = places(path, ranks, rank, **options).specs()
        async with opened(specs, 0) as tier:
            geometry = geometry_of(ranks, rank)
            written = await tier.write(keys, [payload(geometry, key) for key in keys])
            assert written == [WriteOutcome.OK] * len(keys)
        release(specs)


async def read(tier: Tier, key: bytes, ranks: int, rank: int = 0) -> ReadOutcome:
    """Read a key; the result must be what this rank would have written itself."""
    right = payload(geometry_of(ranks, rank), key)
    into = aligned(right.nbytes)
    into[:] = 0xEE
    [outcome] = await tier.read([key], [into])
    assert outcome is not ReadOutcome.OK or (into == right).all()
    return outcome


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file except LMDB's reader table: length and modification time."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.mdb"
    }
