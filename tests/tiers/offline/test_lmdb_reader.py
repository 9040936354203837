"""Another process reads an LMDB tier: what this costs the owner, even if the reader is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.base import ReadOutcome, WriteOutcome
from tiers.files.tier import FileTier
from tiers.lmdb import index as lmdb_index
from tiers.lmdb.index import IndexUnusableError
from tiers.lmdb.tier import LmdbTier
from tiers.offline.file_reader import FileReader
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import FolderChangedError
from tiers.record import UseClock
from tiers.testing import aligned, all_keys, assert_holds, key_of, put

ROOT = Path(__file__).resolve().parents[3]
SIZE = 4096
CAPACITY = 8 << 20
ROUNDS = 700
"""Number of commits, each of which uses up some of the index's 512 pages if they are not reused."""

HELD = """
import sys
from pathlib import Path
from tiers.offline.lmdb_reader import LmdbReader
reader = LmdbReader(Path(sys.argv[1]), is_owned=True)
with reader._begin(reader._records) as txn:
    print("inside", flush=True)
    sys.stdin.read()
"""


def tier_in(folder: Path) -> LmdbTier:
    return LmdbTier(folder, CAPACITY, record_bytes=SIZE * 4, reserve_bytes=0, grow_bytes=1 << 20)


async def churn(tier: LmdbTier, rounds: int) -> list[int]:
    """Write and delete; every write must succeed. Returns the numbers of the records that are
    left."""
    live: list[int] = []
    for number in range(rounds):
        assert await put(tier, [key_of(number)], SIZE) == [WriteOutcome.OK], number
        live.append(number)
        if len(live) > 20:
            await tier.delete([key_of(live.pop(0))])
    return live


async def with_killed_reader(folder: Path) -> None:
    tier = tier_in(folder)
    await tier.open()
    try:
        await churn(tier, 30)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HELD, str(folder)),
            cwd=ROOT,
            env=os.environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"inside\n"
        process.kill()
        await process.communicate()
        live = await churn(tier, ROUNDS)
        await assert_holds(tier, [key_of(number) for number in live], SIZE)
    finally:
        await tier.aclose()


async def test_a_killed_reader_does_not_fill_the_index(tmp_path: Path) -> None:
    await with_killed_reader(tmp_path / "tier")


async def test_without_the_check_for_killed_readers_the_index_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the test above can fail."""
    monkeypatch.setattr(lmdb_index, "READER_CHECK_EVERY", 10**9)
    with pytest.raises((AssertionError, Exception)) as failure:
        await with_killed_reader(tmp_path / "tier")
    assert "FULL" in str(failure.value) or "MapFull" in repr(failure.value)


LOOK = """
import sys
from pathlib import Path
from tiers.offline.lmdb_reader import LmdbReader
reader = LmdbReader(Path(sys.argv[1]), is_owned=True)
print(sum(len(batch) for batch in reader.batches()), reader.epoch, reader.capacity_bytes)
"""


def look(folder: Path) -> list[int]:
    command = [sys.executable, "-c", LOOK, str(folder)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [int(word) for word in out.split()]


async def test_a_reader_sees_what_was_committed(tmp_path: Path) -> None:
    tier = tier_in(tmp_path / "tier")
    await tier.open()
    try:
        await put(tier, [key_of(number) for number in range(9)], SIZE)
        seen = await asyncio.to_thread(look, tmp_path / "tier")
        assert seen == [9, 0, CAPACITY]
        await tier.reset(4)
        await put(tier, [key_of(1)], SIZE)
        assert await asyncio.to_thread(look, tmp_path / "tier") == [1, 4, CAPACITY]
    finally:
        await tier.aclose()


async def fill(folder: Path) -> None:
    tier = tier_in(folder)
    await tier.open()
    await put(tier, [key_of(number) for number in range(3)], SIZE)
    await tier.aclose()


async def test_files_that_are_moved_away_are_detected(tmp_path: Path) -> None:
    await fill(tmp_path / "tier")
    reader = LmdbReader(tmp_path / "tier", is_owned=False)
    assert reader.count() == 3
    batches = reader.batches()
    for name in lmdb_index.FILES:
        (tmp_path / "tier" / name).rename(tmp_path / name)
    with pytest.raises(FolderChangedError):
        next(batches)
    await fill(tmp_path / "tier")
    with pytest.raises(FolderChangedError):
        reader.find(key_of(1))
    reader.close()
    reader.close()


async def test_a_file_shorter_than_its_index_is_refused(tmp_path: Path) -> None:
    """The file is refused even if a live owner seems to have just checked it: LMDB would kill this
    process."""
    await fill(tmp_path / "tier")
    data = tmp_path / "tier" / "data.mdb"
    os.truncate(data, 3 * 4096)
    for is_owned in (False, True):
        with pytest.raises(IndexUnusableError):
            LmdbReader(tmp_path / "tier", is_owned=is_owned)


CUT = """
import os, sys
from pathlib import Path
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import FolderChangedError
from tiers.testing import key_of
folder = Path(sys.argv[1])
reader = LmdbReader(folder, is_owned=True)
assert reader.find(key_of(1)) is not None
os.truncate(folder / "data.mdb", 2 * 4096)
try:
    reader.find(key_of(1))
except FolderChangedError as error:
    print(error)
"""


def test_a_file_that_is_truncated_later_is_detected(tmp_path: Path) -> None:
    """Servers read the folders of other servers in this way."""
    asyncio.run(fill(tmp_path / "tier"))
    command = [sys.executable, "-c", CUT, str(tmp_path / "tier")]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, f"{child.returncode} {child.stderr}"
    assert "was truncated" in child.stdout


async def test_a_new_epoch_of_a_file_tier_is_detected(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "tier", CAPACITY)
    await tier.open()
    try:
        await put(tier, [key_of(number) for number in range(3)], SIZE)
        reader = FileReader(tmp_path / "tier")
        assert reader.count() == 3
        assert reader.find(key_of(9)) is None
        await tier.reset(1)
        with pytest.raises(FolderChangedError):
            reader.find(key_of(1))
        with pytest.raises(FolderChangedError):
            list(reader.batches())
    finally:
        await tier.aclose()


async def test_order_of_use_survives_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path / "tier")
    monkeypatch.setattr(UseClock.__init__, "__defaults__", (lambda: 5,))
    tier = tier_in(tmp_path / "tier")
    await tier.open()
    await put(tier, [key_of(7)], SIZE)
    await tier.touch([key_of(0)])
    await tier.aclose()
    monkeypatch.undo()
    tier = tier_in(tmp_path / "tier")
    await tier.open()
    order = [stored.key for stored in await all_keys(tier)]
    assert order == [key_of(number) for number in (1, 2, 7, 0)]
    [outcome] = await tier.read([key_of(7)], [aligned(SIZE)])
    assert outcome is ReadOutcome.OK
    await tier.aclose()
