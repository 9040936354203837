"""Chunks are read with another geometry while the engines that wrote them are killed at random
moments, one after the other: each chunk that is read is right, byte for byte, or missing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.offload.geometry.engines_on_disk import (
    KEYS,
    geometry_of,
    opened,
    payload,
    places,
    read,
    release,
    write,
)
from tests.patience import PATIENCE_S
from tests.tiers.shared.kills import killed
from tiers.base import Buffer, ReadOutcome
from tiers.offline.offline_folder import Checker, ListedRecord, RecordHealth

KILLS = 12
SMALL = {False: "4700KiB", True: "2850KiB"}
"""Capacities that are small enough for extents to be reused soon; the key says whether engines
share the folder."""


def live(turn: int, begun: Callable[[], object], folder: str, shared: str) -> None:
    """An engine of two ranks that stores and evicts without end, rank by rank."""
    asyncio.run(_live(random.Random(turn), begun, Path(folder), shared == "True"))


async def _live(
    rng: random.Random, begun: Callable[[], object], folder: Path, shared: bool
) -> None:
    async with AsyncExitStack() as stack:
        ranks = []
        for rank in range(2):
            specs = places(folder, 2, rank, shared=shared, capacity=SMALL[shared]).specs()
            ranks.append(await stack.enter_async_context(opened(specs, 0)))
        begun()
        while True:
            keys = rng.sample(KEYS, 4)
            for rank, tier in enumerate(ranks):
                await tier.delete(keys)
                await tier.write(keys, [payload(geometry_of(2, rank), key) for key in keys])


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.thorough)])
async def test_translated_chunks_are_right_while_their_owners_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    real = Checker.check

    def late(checker: Checker, found: ListedRecord) -> tuple[RecordHealth, Buffer]:
        """The owner is faster than a reader that has looked a record up."""
        time.sleep(0.02)
        return real(checker, found)

    monkeypatch.setattr(Checker, "check", late)
    folder = tmp_path / "kv"
    await write(folder, 2, shared=shared, capacity=SMALL[shared])
    seen = {ReadOutcome.OK: 0, ReadOutcome.MISS: 0}
    large = {"capacity": "640MiB", "shared": shared}
    deadline = time.monotonic() + PATIENCE_S
    while not seen[ReadOutcome.OK]:  # on a slow machine, the owners may always be faster
        assert time.monotonic() < deadline, "nothing was read"
        with killed(f"{__name__}:live", KILLS, 3, folder, shared) as helper:
            while helper.poll() is None:
                specs = places(folder, 1, how="translate", **large).specs()
                async with opened(specs, 1) as tier:
                    for key in KEYS:
                        seen[await read(tier, key, 1)] += 1  # and compares
                release(specs)
    await write(folder, 2, shared=shared, capacity=SMALL[shared])
    specs = places(folder, 1, how="translate", **large).specs()
    async with opened(specs, 1) as tier:
        assert [await read(tier, key, 1) for key in KEYS] == [ReadOutcome.OK] * len(KEYS)
    release(specs)
