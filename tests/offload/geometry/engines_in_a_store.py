"""Small engines that share a real Mooncake store, each with a different geometry."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from offload.config.schema import parse_config
from offload.worker.tier_factory import TierSpec, make_tier
from offload.worker.tier_folders import TierFolders
from tests.offload.geometry.engines_on_disk import KEYS, geometry_of, namespace_of, payload
from tests.tiers.mooncake.real_store import Master
from tiers.base import Tier, WriteOutcome


def store_specs(
    master: Master, ranks: int, rank: int = 0, how: str = "own", **about: Any
) -> list[TierSpec]:
    """The lower tiers of one rank, as a server makes them. ``model`` separates the tests that use
    one store."""
    segment = about.pop("segment", "32MiB")
    config = parse_config(
        {"cpu": {"capacity": 1 << 20}, "tiers": [master.tier(segment) | {"geometry": how}]}
    )
    model = about.pop("model", "m")
    records = hashlib.blake2b(f"{model}:{ranks}".encode(), digest_size=16).digest()
    geometry = replace(about.pop("geometry", None) or geometry_of(ranks, rank), records=records)
    namespace = namespace_of(ranks, model={"name": model}, **about)
    return TierFolders(
        config, namespace, geometry.records, rank, 0, 1, engine="test", geometry=geometry
    ).specs()


@asynccontextmanager
async def opened(specs: list[TierSpec], number: int) -> AsyncIterator[Tier]:
    tier = make_tier(specs[number], 4096)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.aclose()


@asynccontextmanager
async def engine(
    master: Master, ranks: int, keys: list[bytes] = KEYS, **about: Any
) -> AsyncIterator[list[Tier]]:
    """An engine that has stored ``keys`` and keeps running: its ranks' tiers."""
    async with AsyncExitStack() as stack:
        tiers = []
        for rank in range(ranks):
            specs = store_specs(master, ranks, rank, **about)
            tiers.append(await stack.enter_async_context(opened(specs, 0)))
            data = [payload(geometry_of(ranks, rank), key) for key in keys]
            assert await tiers[-1].write(keys, data) == [WriteOutcome.OK] * len(keys)
        yield tiers
