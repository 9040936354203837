"""A tier whose medium disappears and returns, on a real disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.tiers.adapters.unplugged import CAPACITY, KEYS, NEW, SIZE, Disk, opened
from tests.unprintable import Unprintable
from tiers.adapters import reopening
from tiers.adapters.reopening import ReopeningTier, SharedReopeningTier
from tiers.base import ReadOutcome, Tier, TierClosedError, TierIoError, WriteOutcome
from tiers.files.shared_folder import SharedFolder
from tiers.files.shared_tier import SharedFileTier
from tiers.lmdb.tier import LmdbTier
from tiers.testing import TierContract, all_keys, assert_holds, assert_misses, key_of, put


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "CLOSE_WAIT_S", PATIENCE_S)


@pytest.fixture
async def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disk]:
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    async with opened(tmp_path) as found:
        yield found


class TestReopeningTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        def make(_epoch: int = 0) -> Tier:
            return LmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)

        return ReopeningTier(make(), make)


async def test_a_disk_that_comes_back_is_reused_as_it_was(disk: Disk) -> None:
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
async def test_another_disk_begins_empty_and_is_reported(disk: Disk, epoch: int) -> None:
    """The epoch of the other disk does not matter: a key does not reveal with which weights a
    record was computed."""
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


async def test_an_older_copy_with_older_weights_begins_empty(disk: Disk) -> None:
    """The copy has the same file id, because it is a snapshot that was restored."""
    shutil.copytree(disk.path, disk.mount / "copy")
    await disk.tier.reset(3)
    await put(disk.tier, KEYS[:2], SIZE)
    shutil.rmtree(disk.path)
    await disk.fails()
    (disk.mount / "copy").rename(disk.path)
    await assert_misses(disk.tier, KEYS, SIZE)
    assert disk.losses == 1
    assert disk.kept == disk.tier.stats()["epoch"] == 3


async def test_a_few_missing_records_are_misses_and_not_a_loss(disk: Disk) -> None:
    await disk.tier.reset(7)
    await put(disk.tier, KEYS, SIZE)
    shutil.copytree(disk.path, disk.elsewhere / "tier")  # the present state
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


async def test_a_repeated_reset_after_a_failure_means_the_same_epoch(disk: Disk) -> None:
    """The repeated reset must not begin a further epoch, which the caller does not know and might
    use for other weights."""
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
    assert disk.kept == disk.tier.stats()["epoch"] == 7


async def test_nothing_is_stored_under_an_epoch_that_cannot_be_recorded(disk: Disk) -> None:
    disk.notes = False
    with pytest.raises(TierIoError, match="read-only"):
        await disk.tier.reset(5)
    assert disk.tier.stats()["epoch"] == 0
    with pytest.raises(TierIoError, match="read-only"):
        await disk.tier.reset(5)
    disk.notes = True
    await disk.tier.reset(5)
    assert disk.kept == disk.tier.stats()["epoch"] == 5


async def test_an_error_without_a_text_is_an_error_of_the_tier(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the epoch is recorded, and when the tier is opened again."""

    def fail(_epoch: int) -> Tier:
        raise Unprintable

    with monkeypatch.context() as patch:
        patch.setattr(disk.tier, "_keep_epoch", fail)
        with pytest.raises(TierIoError, match=r"cannot be recorded: <exception str\(\) failed>"):
            await disk.tier.reset(5)
    monkeypatch.setattr(disk.tier, "_make", fail)
    with pytest.raises(TierIoError, match=r"opened again: <exception str\(\) failed>"):
        await assert_holds(disk.tier, KEYS, SIZE)


async def test_a_removed_folder_is_created_again(disk: Disk) -> None:
    shutil.rmtree(disk.path)
    await disk.fails()
    assert await put(disk.tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    await assert_holds(disk.tier, NEW, SIZE)
    assert disk.losses == 1


async def test_a_late_failure_of_the_old_tier_does_not_close_the_new_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = asyncio.Event()

    async def fail_late(*_arguments: object) -> list[ReadOutcome]:
        await failing.wait()
        raise TierIoError("at last")

    with monkeypatch.context() as patched:
        patched.setattr(LmdbTier, "read", fail_late)
        late = asyncio.ensure_future(assert_holds(disk.tier, KEYS, SIZE))
        await asyncio.sleep(0)  # it has started
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


async def test_concurrent_operations_share_one_attempt(disk: Disk) -> None:
    disk.unplug()
    await disk.fails()
    disk.plug()
    await asyncio.gather(*(assert_holds(disk.tier, KEYS, SIZE) for _ in range(5)))
    assert disk.made == 1


async def test_attempts_to_reopen_are_limited_by_time(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening, "RETRY_S", 3600.0)
    disk.unplug()
    await disk.fails()
    for _ in range(5):
        with pytest.raises(TierIoError):
            await disk.tier.touch(KEYS)
    assert disk.made == 1


async def test_an_error_of_a_single_operation_is_passed_on(tmp_path: Path) -> None:
    """Using a tier that was never open is the caller's mistake, not the medium's."""
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


@pytest.fixture
async def shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SharedReopeningTier, Tier]]:
    """A tier that is reopened when it fails, and another engine's tier over the same folder."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)

    def make(epoch: int = 0) -> SharedFileTier:
        return SharedFileTier(tmp_path / "tier", CAPACITY, epoch=epoch)

    tier, other = SharedReopeningTier(make(), make), make()
    await tier.open()
    await other.open()
    yield tier, other
    await tier.aclose()
    await other.aclose()


async def fail_to_reset(tier: Tier, epoch: int, times: int) -> None:
    """The medium fails completely each time, so that the next attempt reopens the tier."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError("planted")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SharedFolder, "_retire", fail)
        for _ in range(times):
            with pytest.raises(TierIoError):
                await tier.reset(epoch)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_repeated_reset_removes_the_old_records_for_all_sharers(
    shared: tuple[SharedReopeningTier, Tier], times: int
) -> None:
    tier, other = shared
    await put(tier, KEYS, SIZE)
    await fail_to_reset(tier, 5, times)
    await tier.reset(5)
    assert tier.reopenings >= 1
    for each in shared:
        await assert_misses(each, KEYS, SIZE)
        assert await each.present(KEYS) == [False] * len(KEYS)
    assert await put(other, KEYS[:1], SIZE) == [WriteOutcome.OK]
    await assert_misses(tier, KEYS, SIZE)
    assert await put(tier, KEYS[1:], SIZE) == [WriteOutcome.OK] * len(KEYS[1:])
    await assert_holds(tier, KEYS[1:], SIZE)
    await assert_misses(other, KEYS[1:], SIZE)


async def test_a_repeated_reset_of_a_tier_that_was_reset_before_keeps_others_records(
    shared: tuple[SharedReopeningTier, Tier],
) -> None:
    tier, other = shared
    await tier.reset(5)
    await put(other, KEYS, SIZE)
    await fail_to_reset(tier, 7, times=1)
    await tier.reset(7)
    await assert_misses(tier, KEYS, SIZE)
    await assert_holds(other, KEYS, SIZE)


async def test_a_tier_that_was_reset_does_not_return_to_the_records_of_the_files(
    shared: tuple[SharedReopeningTier, Tier], tmp_path: Path
) -> None:
    """The second of two resets may have the lower number: the clock was set back."""
    tier, other = shared
    await tier.reset(9)
    await tier.reset(7)
    await put(other, KEYS, SIZE)
    (tmp_path / "tier").rename(tmp_path / "away")
    with pytest.raises(TierIoError):
        await put(tier, NEW, SIZE)
    (tmp_path / "away").rename(tmp_path / "tier")
    await assert_misses(tier, KEYS, SIZE)
    assert tier.reopenings == 1
    assert await put(tier, NEW, SIZE) == [WriteOutcome.OK] * len(NEW)
    await assert_misses(other, NEW, SIZE)
