"""A tier whose medium goes away and comes back, on a real disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tiers import reopening
from tiers.base import Tier, TierClosedError, TierError, TierIoError, WriteOutcome
from tiers.lmdb_tier import LmdbTier
from tiers.reopening import ReopeningTier
from tiers.testing import TierContract, all_keys, assert_holds, key_of, put

KEYS = [key_of(n) for n in range(8)]
NEW = [key_of(n) for n in range(100, 104)]
SIZE = 8192
CAPACITY = 8 << 20


class Disk:
    """A folder that can be unplugged. ``made`` counts the attempts to open a tier again."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "mount"
        self.path = self.mount / "tier"
        self.elsewhere = folder / "elsewhere"
        self.mount.mkdir()
        self.made = self.losses = 0
        self.tier = ReopeningTier(self.lmdb(), self.make)
        self.tier.on_loss(self.lost)

    def lmdb(self) -> Tier:
        return LmdbTier(self.path, CAPACITY, record_bytes=4096, reserve_bytes=0)

    def make(self) -> Tier:
        self.made += 1
        if not self.mount.exists():
            raise FileNotFoundError(self.mount)
        return self.lmdb()

    def lost(self) -> None:
        self.losses += 1

    def unplug(self) -> None:
        self.mount.rename(self.elsewhere)

    def plug(self) -> None:
        self.elsewhere.rename(self.mount)

    async def fails(self) -> None:
        """A commit finds no file; from then on the tier is of no use."""
        assert await put(self.tier, NEW, SIZE) == [WriteOutcome.FAILED] * len(NEW)
        with pytest.raises(TierIoError):
            await self.tier.touch(KEYS)


@pytest.fixture
async def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disk]:
    """Open, with ``KEYS`` in it; every operation on a failed tier tries to open it again."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    found = Disk(tmp_path)
    await found.tier.open()
    await put(found.tier, KEYS, SIZE)
    yield found
    await found.tier.aclose()


class TestReopeningTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        def make() -> Tier:
            return LmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)

        return ReopeningTier(make(), make)


async def test_a_disk_that_comes_back_is_used_as_it_was(disk: Disk) -> None:
    disk.unplug()
    await disk.fails()
    for attempt in range(3):
        with pytest.raises(TierIoError, match="cannot be opened again"):
            await assert_holds(disk.tier, KEYS, SIZE)
        assert disk.made == attempt + 1
    disk.plug()
    await assert_holds(disk.tier, KEYS, SIZE)
    assert await put(disk.tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    await assert_holds(disk.tier, NEW, SIZE)
    assert disk.losses == 0
    assert disk.tier.stats()["reopenings"] == 1


async def test_a_disk_that_comes_back_with_less_begins_empty_and_says_so(disk: Disk) -> None:
    await disk.tier.reset(7)
    await put(disk.tier, KEYS, SIZE)
    shutil.copytree(disk.path, disk.elsewhere / "tier")  # as of now
    await put(disk.tier, NEW, SIZE)
    shutil.rmtree(disk.mount)
    assert await put(disk.tier, [key_of(200)], SIZE) == [WriteOutcome.FAILED]
    with pytest.raises(TierIoError):
        await disk.tier.touch(KEYS)
    disk.plug()
    await disk.tier.touch(KEYS)  # any operation will do
    assert disk.losses == 1
    assert await all_keys(disk.tier) == []
    assert await put(disk.tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(disk.tier, KEYS, SIZE)


async def test_a_removed_folder_is_made_anew(disk: Disk) -> None:
    shutil.rmtree(disk.path)
    await disk.fails()
    assert await put(disk.tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    await assert_holds(disk.tier, NEW, SIZE)
    assert disk.losses == 1


async def test_operations_that_come_meanwhile_share_one_attempt(disk: Disk) -> None:
    disk.unplug()
    await disk.fails()
    disk.plug()
    await asyncio.gather(*(assert_holds(disk.tier, KEYS, SIZE) for _ in range(5)))
    assert disk.made == 1


async def test_attempts_are_rare(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "RETRY_S", 3600.0)
    disk.unplug()
    await disk.fails()
    for _ in range(5):
        with pytest.raises(TierIoError):
            await disk.tier.touch(KEYS)
    assert disk.made == 1


@pytest.mark.parametrize("is_back", [False, True])
async def test_closing_while_it_is_being_opened(disk: Disk, is_back: bool) -> None:
    """Nothing stays open: the folder can be opened by another tier at once."""
    disk.unplug()
    await disk.fails()
    if is_back:
        disk.plug()
    waiting = asyncio.ensure_future(assert_holds(disk.tier, KEYS, SIZE))
    await asyncio.sleep(0)  # it has begun to open
    await disk.tier.aclose()
    (result,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(result, TierError) or (is_back and result is None)
    if not is_back:
        disk.plug()
    other = disk.lmdb()
    await other.open()
    await assert_holds(other, KEYS, SIZE)
    await other.aclose()


async def test_trouble_with_one_operation_only_is_passed_on(tmp_path: Path) -> None:
    """A tier that was never open is the caller's mistake, not the medium's."""
    made: list[Callable[[], Tier]] = []

    def make() -> Tier:
        made.append(make)
        return LmdbTier(tmp_path, CAPACITY)

    tier = ReopeningTier(LmdbTier(tmp_path, CAPACITY), make)
    for _ in range(2):
        with pytest.raises(TierClosedError):
            await tier.touch(KEYS)
    assert not made
    await tier.aclose()
