"""A server's worker whose disk is replaced while it runs, and which is killed before a reset of the
weights reaches it. Arguments: the tier's path, and what is there when it comes back: ``nothing``, a
``different`` disk, or the ``same`` one; with ``late``, the same disk after the reset was begun.

Prints the epoch that the reset began, and then waits for the end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from offload.config.schema import parse_config
from offload.namespaces.epoch_file import bump_epoch
from offload.namespaces.folders import replica_folder
from offload.namespaces.manifest import Namespace
from offload.worker.tier_factory import make_tier
from offload.worker.tier_folders import TierFolders
from tiers.adapters import reopening
from tiers.base import Tier, TierIoError, WriteOutcome
from tiers.testing import key_of, put

NAMESPACE = Namespace.of({"model": "a"})
KEYS = [key_of(n) for n in range(4)]
NEW = [key_of(n) for n in range(10, 14)]
SIZE = 8192


def places(path: str | Path, **options: object) -> TierFolders:
    """The folder in which a server with one tier at ``path`` keeps its records."""
    table = {"type": "lmdb", "path": str(path), "capacity": 64 << 20, "reserve": 0} | options
    config = parse_config({"cpu": {"capacity": 1 << 20}, "tiers": [table]})
    return TierFolders(config, NAMESPACE, b"i" * 16, rank=0, replica=0, shares=1, engine="test")


def tier_at(path: str | Path, **options: object) -> Tier:
    """That tier, as a worker creates it at its start."""
    [spec] = places(path, **options).specs()
    return make_tier(spec, 4096)


async def fail(tier: Tier) -> None:
    """Make the tier notice that its folder is gone."""
    try:
        await put(tier, [key_of(99)], SIZE)
        await tier.touch(KEYS)
    except TierIoError:
        return
    raise AssertionError("the tier has not failed")


async def main(path: Path, comes_back: str) -> None:
    reopening.RETRY_S = 0.0
    tier = tier_at(path)
    await tier.open()
    await put(tier, KEYS, SIZE)
    os.rename(path, path.with_name("away"))
    await fail(tier)
    if comes_back == "different":
        shutil.copytree(path.with_name("other"), path)
    elif comes_back == "nothing":
        os.mkdir(path, 0o700)
    else:
        os.rename(path.with_name("away"), path)
    home = replica_folder(path, NAMESPACE)
    epoch = bump_epoch(home) if comes_back == "late" else 0
    await tier.touch(KEYS)  # opened again
    # Still with the old weights: writes that were planned before the reset come before it.
    assert await put(tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    print(epoch or bump_epoch(home), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
