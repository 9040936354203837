"""A tier whose medium goes away and comes back, on a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tiers import reopening
from tiers.base import (
    Buffer,
    ReadOutcome,
    Tier,
    TierClosedError,
    TierError,
    TierIoError,
    WriteOutcome,
)
from tiers.daemon_threads import in_thread
from tiers.direct_io import DiskIo
from tiers.lmdb_tier import LmdbTier
from tiers.reopening import ReopeningTier
from tiers.testing import (
    TierContract,
    all_keys,
    assert_holds,
    assert_misses,
    key_of,
    payload_of,
    put,
)

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
    """A folder that can be unplugged. ``made`` counts the attempts to open a tier again."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "mount"
        self.path = self.mount / "tier"
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
            close_timeout_s=0.05,
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
        """Another disk lies there, with the same keys by other weights, of this epoch."""
        self.unplug()
        await self.fails()
        self.mount.mkdir()
        other = self.lmdb(epoch)
        await other.open()
        await other.write(KEYS, [payload_of(key, SIZE, version=1) for key in KEYS])
        await other.aclose()

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
        def make(_epoch: int = 0) -> Tier:
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


@pytest.mark.parametrize("epoch", [0, 6, 7, 8])
async def test_another_disk_begins_empty_and_says_so(disk: Disk, epoch: int) -> None:
    """Whatever its epoch: a key does not tell by which weights a record was computed."""
    await disk.tier.reset(7)
    await put(disk.tier, KEYS, SIZE)
    await disk.replace(epoch)
    await assert_misses(disk.tier, KEYS, SIZE)
    assert disk.losses == 1
    assert await all_keys(disk.tier) == []
    assert await put(disk.tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(disk.tier, KEYS, SIZE)
    assert disk.kept == disk.tier.stats()["epoch"] >= max(epoch, 7)
    await disk.tier.reset(20)
    assert disk.kept == disk.tier.stats()["epoch"] == 20


async def test_an_older_copy_by_older_weights_begins_empty(disk: Disk) -> None:
    """The same file id: a snapshot that was restored."""
    shutil.copytree(disk.path, disk.mount / "copy")
    await disk.tier.reset(3)
    await put(disk.tier, KEYS[:2], SIZE)
    shutil.rmtree(disk.path)
    await disk.fails()
    (disk.mount / "copy").rename(disk.path)
    await assert_misses(disk.tier, KEYS, SIZE)
    assert disk.losses == 1
    assert disk.kept == disk.tier.stats()["epoch"] == 3


async def test_a_few_records_less_are_misses_and_no_loss(disk: Disk) -> None:
    await disk.tier.reset(7)
    await put(disk.tier, KEYS, SIZE)
    shutil.copytree(disk.path, disk.elsewhere / "tier")  # as of now
    await put(disk.tier, NEW, SIZE)
    shutil.rmtree(disk.mount)
    assert await put(disk.tier, [key_of(200)], SIZE) == [WriteOutcome.FAILED]
    with pytest.raises(TierIoError):
        await disk.tier.touch(KEYS)
    disk.plug()
    await assert_holds(disk.tier, KEYS, SIZE)
    await assert_misses(disk.tier, NEW, SIZE)
    assert disk.losses == 0
    assert disk.kept == disk.tier.stats()["epoch"] == 7


async def test_a_reset_that_failed_means_the_same_epoch_when_it_is_repeated(disk: Disk) -> None:
    """Not one beyond, which the caller does not know of and might begin with other weights."""
    disk.unplug()
    for _ in range(2):
        with pytest.raises(TierIoError):
            await disk.tier.reset(5)
    disk.plug()
    await disk.tier.reset(5)
    await assert_misses(disk.tier, KEYS, SIZE)
    assert disk.kept == disk.tier.stats()["epoch"] == 5
    await put(disk.tier, KEYS, SIZE)
    await disk.tier.reset(5)  # another one
    await assert_misses(disk.tier, KEYS, SIZE)
    assert disk.kept == disk.tier.stats()["epoch"] == 6


async def test_nothing_is_stored_under_an_epoch_that_cannot_be_noted(disk: Disk) -> None:
    disk.notes = False
    with pytest.raises(TierIoError, match="read-only"):
        await disk.tier.reset(5)
    assert disk.tier.stats()["epoch"] == 0
    with pytest.raises(TierIoError, match="read-only"):
        await disk.tier.reset(5)
    disk.notes = True
    await disk.tier.reset(5)
    assert disk.kept == disk.tier.stats()["epoch"] == 5


async def test_a_removed_folder_is_made_anew(disk: Disk) -> None:
    shutil.rmtree(disk.path)
    await disk.fails()
    assert await put(disk.tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    await assert_holds(disk.tier, NEW, SIZE)
    assert disk.losses == 1


async def test_a_tier_whose_thread_hung_is_opened_again_when_that_has_ended(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: the thread may still write to the files."""
    monkeypatch.setattr(reopening, "CLOSE_WAIT_S", 0.01)
    disk.io.gate.clear()
    reading = asyncio.ensure_future(assert_holds(disk.tier, KEYS, SIZE))
    await in_thread(disk.io.held.wait)
    disk.unplug()
    await disk.fails()
    disk.plug()
    for _ in range(10):
        with pytest.raises(TierIoError, match=r"still hangs|in use by process"):
            await disk.tier.touch(KEYS)
    disk.io.gate.set()
    await reading
    while disk.tier.reopenings == 0:
        with contextlib.suppress(TierIoError):
            await assert_holds(disk.tier, KEYS, SIZE)
    await assert_holds(disk.tier, KEYS, SIZE)
    assert disk.losses == 0


async def test_a_late_failure_of_the_old_tier_does_not_close_the_new_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = asyncio.Event()

    async def fail_late(_keys: object, _into: object) -> list[ReadOutcome]:
        await failing.wait()
        raise TierIoError("at last")

    monkeypatch.setattr(disk.tier._tier, "read", fail_late)
    late = asyncio.ensure_future(assert_holds(disk.tier, KEYS, SIZE))
    await asyncio.sleep(0)  # it is on its way
    disk.unplug()
    await disk.fails()
    disk.plug()
    await disk.tier.touch(KEYS)
    failing.set()
    with pytest.raises(TierIoError, match="at last"):
        await late
    await assert_holds(disk.tier, KEYS, SIZE)
    assert disk.made == disk.tier.stats()["reopenings"] == 1


async def test_a_closed_tier_is_not_opened_again(disk: Disk) -> None:
    disk.unplug()
    await disk.fails()
    await disk.tier.aclose()
    disk.plug()
    with pytest.raises(TierClosedError):
        await disk.tier.touch(KEYS)
    assert disk.made == 0


async def test_closing_does_not_wait_for_a_disk_that_hangs_while_it_is_opened(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is opened after all is closed again."""
    monkeypatch.setattr(reopening, "CLOSE_WAIT_S", 0.05)
    hanging, released = threading.Event(), threading.Event()

    def hang(epoch: int) -> Tier:
        hanging.set()
        released.wait()
        return disk.make(epoch)

    monkeypatch.setattr(disk.tier, "_make", hang)
    disk.unplug()
    await disk.fails()
    disk.plug()
    waiting = asyncio.ensure_future(disk.tier.touch(KEYS))
    await in_thread(hanging.wait)
    await disk.tier.aclose()
    assert not waiting.done()
    released.set()
    (result,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(result, TierError)
    await _assert_free(disk)


async def _assert_free(disk: Disk) -> None:
    """Nothing stays open: another tier opens the folder, and holds what was stored."""
    other = disk.lmdb()
    await other.open()
    await assert_holds(other, KEYS, SIZE)
    await other.aclose()


ENDING = """
import asyncio, os, sys, threading
from pathlib import Path
from offload.loop import OffloadLoop
from tiers import lmdb_tier, reopening
from tiers.lmdb_tier import LmdbTier
from tiers.reopening import ReopeningTier
from tiers.testing import key_of, put

reopening.RETRY_S = 0.0
reached = threading.Event()

def hang(*_):
    reached.set()
    threading.Event().wait()

async def main(path, hangs):
    def make(_epoch=0):
        return LmdbTier(path, 8 << 20, record_bytes=4096, reserve_bytes=0)
    tier = ReopeningTier(make(), hang if hangs == "make" else make)
    await tier.open()
    await put(tier, [key_of(1)], 8192)
    path.rename(path.with_name("away"))
    await put(tier, [key_of(2)], 8192)
    lmdb_tier.LmdbStore = hang
    while not reached.is_set():
        await asyncio.wait([asyncio.ensure_future(tier.touch([key_of(1)]))], timeout=0.1)
    print("ends", flush=True)

OffloadLoop().call(main(Path(sys.argv[1]), sys.argv[2]), 30.0)
"""


@pytest.mark.parametrize("hangs", ["make", "open"])
def test_the_process_ends_while_opening_hangs(tmp_path: Path, hangs: str) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "tier"), hangs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ends\n", done.stderr


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
    await _assert_free(disk)


async def test_trouble_with_one_operation_only_is_passed_on(tmp_path: Path) -> None:
    """A tier that was never open is the caller's mistake, not the medium's."""
    made: list[int] = []

    def make(epoch: int) -> Tier:
        made.append(epoch)
        return LmdbTier(tmp_path, CAPACITY)

    tier = ReopeningTier(LmdbTier(tmp_path, CAPACITY), make)
    for _ in range(2):
        with pytest.raises(TierClosedError):
            await tier.touch(KEYS)
    assert not made
    await tier.aclose()
