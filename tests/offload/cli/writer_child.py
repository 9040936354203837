"""Behaves towards the disk like a server: claims its rank's folder, writes, evicts, touches and
reads back through the tier until its input ends, and then checks everything that the tier holds.

Not a test itself: ``writer_child.py <root> <kind> <records>``. It prints ``ready`` once it is full
and churning; at the end of its input it stops and prints ``<commits> <reads> <wrong>``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from offload.namespaces.folders import claim_rank_folder
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import CAPACITY, FIELDS, RECORD_NAMESPACE, SIZE
from tiers.base import ReadOutcome, Tier
from tiers.files.tier import FileTier
from tiers.lmdb.tier import LmdbTier
from tiers.testing import fetch, key_of, payload_of, put

BATCH = 4


class Counts:
    """The counts so far."""

    rounds = reads = wrong = 0


def make_tier(kind: str, folder: Path, epoch: int) -> Tier:
    if kind == "file":
        return FileTier(folder, CAPACITY, namespace=RECORD_NAMESPACE, epoch=epoch)
    options = {"namespace": RECORD_NAMESPACE, "epoch": epoch, "reserve_bytes": 0}
    return LmdbTier(folder, CAPACITY, grow_bytes=1 << 20, record_bytes=SIZE, **options)


async def check(tier: Tier, number: int, counts: Counts) -> None:
    key = key_of(number)
    outcome, data = await fetch(tier, key, SIZE)
    counts.reads += 1
    if outcome is not ReadOutcome.OK or not np.array_equal(data, payload_of(key, SIZE)):
        counts.wrong += 1


async def churn(tier: Tier, records: int, stop: asyncio.Event, counts: Counts) -> list[int]:
    live: list[int] = []
    number = 1000
    while not stop.is_set():
        fresh = list(range(number, number + BATCH))
        number += BATCH
        if len(live) + BATCH > records:
            gone, live = live[:BATCH], live[BATCH:]
            await tier.delete([key_of(one) for one in gone])
            if counts.rounds == 0:
                print("ready", flush=True)
            counts.rounds += 1
        outcomes = await put(tier, [key_of(one) for one in fresh], SIZE)
        counts.wrong += sum(outcome.value != "ok" for outcome in outcomes)
        live += fresh
        await tier.touch([key_of(one) for one in live[::2]])
        await check(tier, live[number % len(live)], counts)
    return live


async def main(root: str, kind: str, records: int) -> None:
    claimed = claim_rank_folder(root, Namespace.of(FIELDS), replica=0, rank=0, engine="child")
    tier = make_tier(kind, claimed.folder, claimed.epoch)
    await tier.open()
    stop, counts = asyncio.Event(), Counts()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), stop.set)
    live = await churn(tier, records, stop, counts)
    for number in live:
        await check(tier, number, counts)
    stats = {name: tier.stats().get(name, 0) for name in ("read_corrupt", "write_failed")}
    await tier.aclose()
    claimed.close()
    print(json.dumps([counts.rounds, counts.reads, counts.wrong, sum(stats.values())]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
