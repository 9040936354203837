"""Single steps of tiers that processes share, with another process acting between two of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.tiers.shared.processes import make_tier
from tiers.base import ReadOutcome, WriteOutcome
from tiers.files.record_files import record_name
from tiers.files.shared_folder import COMMON, SharedFolder
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.lmdb.index import pack_value
from tiers.lmdb.io_jobs import Put
from tiers.lmdb.shared.files import SharedLmdbFiles
from tiers.lmdb.shared.members import Member
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.shared.transaction import WriteTransaction, changing
from tiers.record import Identity, prefix
from tiers.testing import assert_holds, fetch, key_of, payload_of, put

SIZE = 10_000
CAPACITY = 4 << 20
OK = WriteOutcome.OK
KEY = key_of(1)
DATA = payload_of(KEY, SIZE)

# -- a folder of files ---------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[SharedFolder, SharedFolder]]:
    """Two engines' views of one folder."""
    one, two = (SharedFolder(tmp_path / "kv", Identity(), CAPACITY, False) for _ in range(2))
    yield one, two
    one.close()
    two.close()


def meanwhile(patch: pytest.MonkeyPatch, owner: type, name: str, do: Callable[[], Any]) -> None:
    """Make the next call of a method also do this, after its own work."""
    usual, raw = getattr(owner, name), vars(owner)[name]

    def call(*arguments: Any) -> Any:
        patch.undo()
        found = usual(*arguments)
        do()
        return found

    patch.setattr(owner, name, staticmethod(call) if isinstance(raw, staticmethod) else call)


def test_a_record_that_was_stored_again_survives_the_removal_of_the_damaged_one(
    folders: tuple[SharedFolder, SharedFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine reads damage; before it removes the file, another has stored an intact one."""
    one, two = folders
    assert one.store(KEY, COMMON, DATA, 1, 1) is OK
    path = tmp_path / "kv" / f"epoch-0/{record_name(KEY)}"
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def store_anew() -> None:
        two.remove([KEY], COMMON)
        assert two.store(KEY, COMMON, DATA, 2, 2) is OK

    into = np.zeros_like(DATA)
    meanwhile(monkeypatch, SharedFolder, "_read_whole", store_anew)
    assert one.fetch(KEY, COMMON, into) is ReadOutcome.CORRUPT
    assert one.fetch(KEY, COMMON, into) is ReadOutcome.OK


def test_a_record_of_old_weights_is_not_published_in_a_recreated_folder(
    folders: tuple[SharedFolder, SharedFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = folders
    other = key_of(2)

    def reset() -> None:
        one.begin_own()
        assert two.store(other, COMMON, payload_of(other, SIZE), 1, 1) is OK

    assert one.store(other, COMMON, payload_of(other, SIZE), 1, 1) is OK
    meanwhile(monkeypatch, SharedFolder, "_take_grant", reset)
    assert one.store(KEY, COMMON, DATA, 2, 2) is WriteOutcome.FAILED
    assert two.are_there([KEY, other], COMMON) == [False, True]


async def test_a_read_overtaken_by_a_reset_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that it has read belong to the old weights."""
    tier = SharedFileTier(tmp_path / "kv", CAPACITY)
    await tier.open()
    assert await put(tier, [KEY], SIZE) == [OK]
    was_read, gate = threading.Event(), threading.Event()
    read = SharedFolder.fetch

    def slow(*arguments: Any) -> ReadOutcome:
        outcome = read(*arguments)
        was_read.set()
        assert gate.wait(PATIENCE_S)
        return outcome

    monkeypatch.setattr(SharedFolder, "fetch", slow)
    reading = asyncio.create_task(fetch(tier, KEY, SIZE))
    assert await asyncio.to_thread(was_read.wait, PATIENCE_S)
    await tier.reset(1)
    gate.set()
    assert (await reading)[0] is ReadOutcome.MISS
    await tier.aclose()


def test_engines_that_write_at_the_same_time_stay_below_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has scanned the folder before the others use their grants."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # there are no power failures in this test
    engines = [SharedFolder(tmp_path / "kv", Identity(), CAPACITY, False) for _ in range(5)]
    page = payload_of(KEY, 4096)
    most = number = 0
    for _ in range(120):
        for engine in engines:
            number += 1
            engine.store(key_of(number), COMMON, page, number, number)
        stored = (tmp_path / "kv" / "epoch-0").iterdir()
        most = max(most, sum(file.stat().st_size for file in stored))
    for engine in engines:
        engine.close()
    assert 0.8 * CAPACITY < most <= CAPACITY


Step = tuple[str, int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Record flushes and renames, each with the inode concerned."""
    done: list[Step] = []
    fsync = os.fsync

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("flush", os.fstat(fd).st_ino))

    def noted(usual: Callable[..., None]) -> Callable[..., None]:
        def rename(old: Any, new: Any, **folders: Any) -> None:
            usual(old, new, **folders)
            found = os.stat(new, dir_fd=folders.get("dst_dir_fd"))
            done.append(("rename", found.st_ino))

        return rename

    monkeypatch.setattr(os, "fsync", noted_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    return done


def test_a_reset_is_durable(
    folders: tuple[SharedFolder, SharedFolder], tmp_path: Path, steps: list[Step]
) -> None:
    """The old name is durably gone, so that no power cut restores the old records."""
    one, _ = folders
    assert one.store(KEY, COMMON, DATA, 1, 1) is OK
    old, root = (tmp_path / "kv" / name for name in ("epoch-0", "."))
    renamed, flushed = ("rename", old.stat().st_ino), ("flush", root.stat().st_ino)
    steps.clear()
    one.begin_own()
    assert renamed in steps
    assert flushed in steps[steps.index(renamed) :], steps


async def test_a_file_is_flushed_before_its_rename_and_its_folder_after(
    tmp_path: Path, steps: list[Step]
) -> None:
    tier = FileTier(tmp_path / "kv", CAPACITY)
    await tier.open()
    steps.clear()
    assert await put(tier, [KEY], SIZE) == [OK]
    (path,) = (tmp_path / "kv").glob(f"epoch-*/{record_name(KEY)}")
    file, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert steps == [("flush", file), ("rename", file), ("flush", folder)]
    await tier.aclose()


# -- an index --------------------------------------------------------------------------------------


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[SharedLmdbTier]:
    made: Any = make_tier("lmdb", tmp_path / "kv", CAPACITY)
    await made.open()
    yield made
    made.check()
    await made.aclose()


def store_of(tier: SharedLmdbTier) -> SharedLmdbFiles:
    return tier._open_files()


def put_of(changes: WriteTransaction, files: SharedLmdbFiles, own_epoch: int | None = None) -> Put:
    """Return a record with extents, as if its payload had been written."""
    reserved = changes.reserve([(KEY, 3)], own_epoch, 100, files.grow)
    (extents,), (use,) = reserved.allocations, reserved.uses
    assert extents is not None
    header = prefix(Identity(), KEY, reserved.epoch, SIZE) + bytes(16)
    value = pack_value(use, header, extents)
    return Put(KEY, reserved.epoch, SIZE, extents, value, stored_pages=3)


async def test_an_extent_reused_by_another_process_is_not_published(tier: SharedLmdbTier) -> None:
    """Other processes have taken this process for dead and reused its extents."""
    files = store_of(tier)
    number = files.member.number
    with changing(files.index, number) as changes:
        one = put_of(changes, files)
        changes.roll_back_one(number)
        changes.publish([one], None)
    assert one.outcome is WriteOutcome.FAILED
    assert files.index.find([KEY], None)[1] == [None]


async def test_records_written_under_old_weights_are_not_published(tier: SharedLmdbTier) -> None:
    files = store_of(tier)
    with changing(files.index, files.member.number) as changes:
        one = put_of(changes, files)
        changes.begin_epoch(None)  # by another engine: the common epoch is a different one now
        changes.publish([one], None)
    assert one.outcome is WriteOutcome.FAILED
    assert files.index.find([KEY], None)[1] == [None]


async def test_damage_detected_earlier_removes_no_record_stored_since(
    tier: SharedLmdbTier,
) -> None:
    files = store_of(tier)
    assert await put(tier, [KEY], SIZE) == [OK]
    (seen,) = files.index.find([KEY], None)[1]
    assert seen is not None
    await tier.delete([KEY])
    assert await put(tier, [key_of(2), KEY], SIZE) == [OK, OK]
    with changing(files.index, files.member.number) as changes:
        changes.remove_damaged([(KEY, seen)])
    await assert_holds(tier, [KEY], SIZE)
    (seen,) = files.index.find([KEY], None)[1]
    assert seen is not None
    with changing(files.index, files.member.number) as changes:
        changes.remove_damaged([(KEY, seen)])
    assert files.index.find([KEY], None)[1] == [None]


def test_a_sharer_counts_as_alive_until_it_releases_the_folder(tmp_path: Path) -> None:
    one = Member(tmp_path)
    one.join()
    two = Member(tmp_path)
    assert one.number != two.number
    assert one.is_alive(one.number)
    assert one.is_alive(two.number)
    two.release()
    assert not one.is_alive(two.number)
    assert not one.is_alive(two.number + 1)
    one.release()
