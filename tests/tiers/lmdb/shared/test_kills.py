"""Processes that share an LMDB folder are killed at random moments: while they open it, inside
transactions, while LMDB commits, between the steps of a record. The others continue, never read
wrong bytes, and reclaim what the killed processes had reserved.

    KVTIERS_LMDB_KILLS=1000 python -m pytest tests/tiers/lmdb/shared/test_kills.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.tiers.lmdb.shared.inside import index_of
from tests.tiers.shared.kills import killed
from tests.tiers.shared.processes import bytes_of, make_tier
from tiers.base import Key, ReadOutcome, Tier, WriteOutcome
from tiers.lmdb.shared import transaction as shared_changes
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import assert_holds, fetch, key_of, payload_of, put

KILLS = int(os.environ.get("KVTIERS_LMDB_KILLS", "25"))
CAPACITY = 3 << 20
SIZE = 12_000
RANGE = [key_of(n) for n in range(60)]
OK = WriteOutcome.OK


def live(turn: int, begun: Callable[[], object], folder: str) -> None:
    """Use every operation of a tier, one after the other, without end."""
    asyncio.run(_live(random.Random(turn), begun, folder))


async def _live(rng: random.Random, begun: Callable[[], object], folder: str) -> None:
    shared_changes.READER_CHECK_EVERY = 4
    tier = make_tier("lmdb", folder, CAPACITY)
    await tier.open()
    await put(tier, rng.sample(RANGE, 4), SIZE)
    begun()
    while True:
        await one_thing(rng, tier)


async def one_thing(rng: random.Random, tier: Tier) -> None:
    keys, what = rng.sample(RANGE, 4), rng.random()
    if what < 0.5:
        await put(tier, keys, SIZE)
    elif what < 0.7:
        await look(tier, keys)
    elif what < 0.8:
        await tier.delete(keys)
    elif what < 0.9:
        await tier.touch(keys)
    else:
        await tier.reset(1)


async def look(tier: Tier, keys: list[Key]) -> None:
    for key in keys:
        outcome, data = await fetch(tier, key, SIZE)
        assert outcome is not ReadOutcome.CORRUPT
        assert outcome is not ReadOutcome.OK or (data == payload_of(key, SIZE)).all(), "wrong bytes"


async def survive(folder: Path, kills: int, seed: int) -> None:
    tier = make_tier("lmdb", folder, CAPACITY)
    assert isinstance(tier, SharedLmdbTier)
    await tier.open()
    rng = random.Random(seed)
    with killed(f"{__name__}:live", kills, seed, folder) as helper:
        while helper.poll() is None:
            await put(tier, rng.sample(RANGE, 4), SIZE)
            await look(tier, rng.sample(RANGE, 4))
    many = [key_of(n) for n in range(1000, 1360)]  # more than fits
    for start in range(0, len(many), 60):
        assert await put(tier, many[start : start + 60], SIZE) == [OK] * 60
    await assert_holds(tier, many[-30:], SIZE)
    tier.check()
    index = index_of(tier)
    assert index.state().reserved == 0, "extents of killed processes are not free again"
    index.env.reader_check()
    rows = len(index.env.readers().splitlines()) - 1
    assert rows <= 8, "readers of dead processes"
    await tier.aclose()
    assert bytes_of(folder) <= CAPACITY
    again = make_tier("lmdb", folder, CAPACITY)
    await again.open()
    await assert_holds(again, many[-30:], SIZE)
    await again.aclose()


async def test_killed_at_any_moment(tmp_path: Path) -> None:
    await survive(tmp_path / "tier", KILLS, seed=1)
