"""A disk that can be unplugged, replaced and made to hang below a tier that reopens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tiers.adapters.reopening import ReopeningTier
from tiers.base import Buffer, Tier, TierIoError, WriteOutcome
from tiers.io.direct_io import DiskIo
from tiers.lmdb.tier import LmdbTier
from tiers.testing import assert_holds, key_of, payload_of, put

KEYS = [key_of(n) for n in range(8)]
NEW = [key_of(n) for n in range(100, 104)]
SIZE = 8192
CAPACITY = 8 << 20


class GatedIo(DiskIo):
    """Holds reads until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        if not self.gate.is_set():
            self.held.set()
        self.gate.wait()
        return super().preadv(fd, views, offset)


class Disk:
    """A folder that can be unplugged. ``made`` counts the attempts to reopen the tier. Closing
    waits up to ``close_timeout_s`` for a disk that hangs; a working disk must close within that
    time."""

    def __init__(self, folder: Path, close_timeout_s: float = 30.0) -> None:
        self.mount = folder / "mount"
        self.path = self.mount / "tier"
        self.close_timeout_s = close_timeout_s
        self.elsewhere = folder / "elsewhere"
        self.mount.mkdir()
        self.made = self.losses = self.kept = 0
        self.notes = True
        self.io = GatedIo()
        self.tier = ReopeningTier(self.lmdb(), self.make, self.keep_epoch)
        self.tier.on_loss(self.lost)

    def lmdb(self, epoch: int = 0) -> Tier:
        return LmdbTier(
            self.path,
            CAPACITY,
            io=self.io,
            record_bytes=4096,
            reserve_bytes=0,
            epoch=epoch,
            close_timeout_s=self.close_timeout_s,
        )

    def keep_epoch(self, epoch: int) -> None:
        if not self.notes:
            raise OSError("read-only")
        self.kept = max(self.kept, epoch)

    def make(self, epoch: int) -> Tier:
        self.made += 1
        if not self.mount.exists():
            raise FileNotFoundError(self.mount)
        self.keep_epoch(epoch)
        return self.lmdb(epoch)

    def lost(self) -> None:
        self.losses += 1

    def unplug(self) -> None:
        self.mount.rename(self.elsewhere)

    def plug(self) -> None:
        self.elsewhere.rename(self.mount)

    async def replace(self, epoch: int) -> None:
        """Mount another disk, which has the same keys with other weights, in this epoch."""
        self.unplug()
        await self.fails()
        self.mount.mkdir()
        other = self.lmdb(epoch)
        await other.open()
        await other.write(KEYS, [payload_of(key, SIZE, version=1) for key in KEYS])
        await other.aclose()

    async def fails(self) -> None:
        """Make a commit fail because a file is missing; after that the tier cannot be used."""
        assert await put(self.tier, NEW, SIZE) == [WriteOutcome.FAILED] * len(NEW)
        with pytest.raises(TierIoError):
            await self.tier.touch(KEYS)


@asynccontextmanager
async def opened(folder: Path, **options: float) -> AsyncIterator[Disk]:
    """A disk with an open tier that contains ``KEYS``."""
    found = Disk(folder, **options)
    await found.tier.open()
    await put(found.tier, KEYS, SIZE)
    yield found
    await found.tier.aclose()


async def assert_free(disk: Disk) -> None:
    """Assert that no file stayed open: another tier can open the folder, and finds what was
    stored."""
    other = disk.lmdb()
    await other.open()
    await assert_holds(other, KEYS, SIZE)
    await other.aclose()
