"""The file tier that engines share fulfils the contract of shared tiers."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.tiers.shared.contract import SharedTierContract
from tiers.base import ReadOutcome, Tier, TierIoError, WriteOutcome
from tiers.files import record_files
from tiers.files.engines import FolderEngines, engine_name, seen_alive
from tiers.files.record_files import record_name
from tiers.files.shared_folder import SharedFolder
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.testing import assert_holds, assert_misses, fetch, key_of, put


class TestSharedFileTier(SharedTierContract):
    capacity_bytes = 4 << 20
    usable = 0.95
    kept = 0.7

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SharedFileTier(folder, capacity_bytes)


ROOT = Path(__file__).parents[3]
SIZE = 10_000
OK = WriteOutcome.OK


@asynccontextmanager
async def engines(folder: Path, count: int = 2) -> AsyncIterator[list[SharedFileTier]]:
    tiers = [SharedFileTier(folder, 4 << 20) for _ in range(count)]
    try:
        for tier in tiers:
            await tier.open()
        yield tiers
    finally:
        for tier in tiers:
            await tier.aclose()


async def test_engines_read_each_others_records(tmp_path: Path) -> None:
    keys = [key_of(n) for n in range(6)]
    async with engines(tmp_path / "tier") as (one, two):
        assert await put(one, keys[:4], SIZE) == [OK] * 4
        assert await two.present(keys) == [True] * 4 + [False] * 2
        await assert_holds(two, keys[:4], SIZE)
        await two.delete(keys[:1])
        await assert_misses(one, keys[:1], SIZE)


async def test_many_engines_leave_space_for_records(tmp_path: Path) -> None:
    """With a hundred engines of another machine, each may write less between two scans."""
    folder = tmp_path / "tier"
    async with engines(folder, 1) as (one,):
        for number in range(100):
            (folder / "engines" / f"{'a' * 12}-1-1-{number:08x}").write_text("0\n")
        keys = [key_of(n) for n in range(150)]
        assert await put(one, keys, 100) == [OK] * 150
        await assert_holds(one, keys, 100)


async def test_a_reset_by_one_engine_forgets_for_all_and_separates_them(tmp_path: Path) -> None:
    old, new = [key_of(1), key_of(2)], [key_of(3)]
    async with engines(tmp_path / "tier", 3) as (one, two, three):
        await put(two, old, SIZE)
        await one.reset(1)
        await put(one, new, SIZE)
        await assert_holds(one, new, SIZE)
        for other in (two, three):
            await assert_misses(other, [*old, *new], SIZE)
        assert await put(two, old, SIZE) == [OK] * 2
        await assert_holds(three, old, SIZE)
        assert await one.present(old) == [False] * 2


async def test_a_folder_whose_content_was_removed_is_opened_again(tmp_path: Path) -> None:
    """An operator removes everything in the folder, but not the folder."""
    async with engines(tmp_path / "tier", 1) as [tier]:
        await put(tier, [key_of(1)], SIZE)
        for path in (tmp_path / "tier").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(TierIoError, match="was removed or replaced"):
            await put(tier, [key_of(2)], SIZE)
        await tier.aclose()
        await tier.open()
        assert await put(tier, [key_of(n) for n in range(100)], SIZE) == [OK] * 100
        assert (tmp_path / "tier" / "shared").exists()


async def test_a_damaged_file_is_removed_for_all(tmp_path: Path) -> None:
    async with engines(tmp_path / "tier") as (one, two):
        await put(one, [key_of(1)], SIZE)
        [path] = (tmp_path / "tier").glob("epoch-0/*")
        raw = bytearray(path.read_bytes())
        raw[7777] ^= 4
        path.write_bytes(raw)
        assert (await fetch(two, key_of(1), SIZE))[0] is ReadOutcome.CORRUPT
        assert await one.present([key_of(1)]) == [False]
        assert await put(one, [key_of(1)], SIZE) == [OK]
        await assert_holds(two, [key_of(1)], SIZE)


async def test_files_left_by_engines_of_other_machines_are_removed_when_old(tmp_path: Path) -> None:
    """Only the clock of the file server counts for them: their pids have no meaning here."""
    folder = tmp_path / "tier"
    silent, busy = f"{'0' * 12}-1-1-{'a' * 8}", f"{'1' * 12}-1-1-{'b' * 8}"
    async with engines(folder, 1):
        pass
    records, present = folder / "epoch-0", {}
    records.mkdir()
    for engine, age_s in ((silent, 7200), (busy, 7200), (silent, 60)):
        path = records / f"{'c' * 64}.{engine}.{age_s}.tmp"
        path.write_bytes(b"x" * 5000)
        os.utime(path, (time.time() - age_s,) * 2)
        present[engine, age_s] = path
    (folder / "engines" / busy).write_text("0\n")
    (folder / "engines" / silent).write_text("7\n")
    os.utime(folder / "engines" / silent, (time.time() - 3600,) * 2)
    (folder / "epoch-7").mkdir()
    async with engines(folder, 1):
        assert not (folder / "engines" / silent).exists()
        assert not (folder / "epoch-7").exists(), "only this engine has used the folder"
        assert not present[silent, 7200].exists()
        assert present[silent, 60].exists(), "too young to be removed"
        assert present[busy, 7200].exists(), "its engine is alive"


async def test_a_query_that_hangs_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    hangs = record_name(key_of(40))
    tier = SharedFileTier(tmp_path / "tier", 4 << 20)
    await tier.open()
    keys = [key_of(n) for n in range(80)]
    await put(tier, keys, 100)
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(hangs):
            assert gate.wait(PATIENCE_S)
        return real(path, **options)

    monkeypatch.setattr(record_files.os, "stat", stat)
    asking = asyncio.create_task(tier.present(keys))
    assert await tier.present(keys[:40]) == [True] * 40
    await assert_holds(tier, keys[:40], 100)
    assert not asking.done()
    gate.set()
    assert await asking == [True] * 80
    await tier.aclose()


async def test_reads_do_not_wait_for_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a million files on a slow server a scan takes minutes, and all writers wait for it."""
    gate, reached = threading.Event(), threading.Event()
    tier = SharedFileTier(tmp_path / "tier", 4 << 20, depth=2)
    await tier.open()
    await put(tier, [key_of(0)], SIZE)
    real = SharedFolder.scan

    def scan(folder: SharedFolder) -> Any:
        reached.set()
        assert gate.wait(PATIENCE_S)
        return real(folder)

    monkeypatch.setattr(SharedFolder, "scan", scan)
    storing = asyncio.create_task(put(tier, [key_of(n) for n in range(1, 9)], SIZE))
    assert await asyncio.to_thread(reached.wait, 60), "no engine scans the folder"
    reading = asyncio.create_task(fetch(tier, key_of(0), SIZE))
    await asyncio.wait({reading}, timeout=PATIENCE_S)
    is_read, is_stored = reading.done(), storing.done()
    gate.set()
    assert (is_read, is_stored) == (True, False)
    assert (await reading)[0] is ReadOutcome.OK
    assert await storing == [OK] * 8
    await tier.aclose()


async def test_a_reset_that_failed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SharedFileTier(tmp_path / "tier", 4 << 20)
    await tier.open()
    await put(tier, [key_of(0)], SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(SharedFolder, "_retire", _fails)
        with pytest.raises(TierIoError):
            await tier.reset(1)
    await assert_misses(tier, [key_of(0)], SIZE)
    assert await put(tier, [key_of(0)], SIZE) == [WriteOutcome.FAILED]
    await tier.reset(1)
    assert await put(tier, [key_of(0)], SIZE) == [OK]
    await assert_holds(tier, [key_of(0)], SIZE)
    await tier.aclose()


@pytest.mark.parametrize("at", ["announce", "rename", "fsync"])
async def test_a_repeated_reset_removes_the_old_records_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    async with engines(tmp_path / "tier") as (one, two):
        await put(one, [key_of(0)], SIZE)
        with monkeypatch.context() as patched:
            if at == "announce":
                patched.setattr(FolderEngines, "announce", _fails)
            else:
                patched.setattr(f"tiers.files.shared_folder.os.{at}", _fails)
            for _ in range(2):
                with pytest.raises(TierIoError):
                    await one.reset(1)
        await one.reset(1)
        await assert_misses(two, [key_of(0)], SIZE)
        assert await two.present([key_of(0)]) == [False]
        assert await put(two, [key_of(1)], SIZE) == [OK]
        await one.reset(2)
        await assert_holds(two, [key_of(1)], SIZE)


class WatchedLock:
    """Counts the threads that have come to the lock, whether or not they hold it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_two_concurrent_resets_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reached, real = threading.Event(), threading.Event(), SharedFolder._retire

    def held(folder: SharedFolder, *arguments: Any, **options: Any) -> None:
        reached.set()
        assert gate.wait(PATIENCE_S)
        real(folder, *arguments, **options)

    async with engines(tmp_path / "tier") as (one, two):
        await put(one, [key_of(0)], SIZE)
        monkeypatch.setattr(SharedFolder, "_retire", held)
        lock = WatchedLock()
        with one._working() as folder:
            folder._resetting = lock
        first = asyncio.create_task(one.reset(1))
        assert await asyncio.to_thread(reached.wait, PATIENCE_S)
        second = asyncio.create_task(one.reset(3))
        for _ in range(2):
            assert await asyncio.to_thread(lock.came.acquire, timeout=PATIENCE_S)
        assert not second.done()
        gate.set()
        await asyncio.gather(first, second)
        await assert_misses(two, [key_of(0)], SIZE)
        assert await put(one, [key_of(0)], SIZE) == [OK]
        await assert_holds(one, [key_of(0)], SIZE)


async def test_writes_under_way_at_a_reset_are_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait for a thread, some have just been written, and other engines store meanwhile."""
    gate, reached = threading.Event(), threading.Event()
    real = record_files._write_all

    def held(fd: int, data: Any) -> None:
        if threading.current_thread().name.startswith("tier-file-store"):
            reached.set()
            assert gate.wait(PATIENCE_S)
        real(fd, data)

    keys = [key_of(n) for n in range(60)]
    async with engines(tmp_path / "tier") as (one, two):
        with monkeypatch.context() as patched:
            patched.setattr(record_files, "_write_all", held)
            writing = asyncio.create_task(put(one, keys, SIZE))
            assert await asyncio.to_thread(reached.wait, PATIENCE_S)
            await one.reset(1)
            patched.setattr(record_files, "_write_all", real)
            assert await put(two, [key_of(99)], SIZE) == [OK]  # the common folder exists again
            gate.set()
            assert await writing == [WriteOutcome.FAILED] * 60
        assert await two.present(keys) == [False] * 60
        await assert_misses(two, keys, SIZE)
        await assert_holds(two, [key_of(99)], SIZE)
        assert not list((tmp_path / "tier").glob("epoch-*/*.tmp"))


async def test_the_capacity_of_the_first_engine_counts_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tier"
    small, large = SharedFileTier(folder, 8 << 20), SharedFileTier(folder, 64 << 20)
    await small.open()
    clock = tmp_path / "clock"
    clock.touch()
    first_ns = clock.stat().st_mtime_ns
    while clock.stat().st_mtime_ns == first_ns:  # until the clock of the file system has gone on
        clock.touch()
    assert (await large.open()).capacity_bytes == 8 << 20
    assert "8388608 bytes" in caplog.text
    assert "configured here, 67108864 bytes" in caplog.text
    keys = [key_of(n) for n in range(200)]
    size = 100_000
    for start in range(0, 200, 20):
        assert await put(large, keys[start : start + 20], size) == [OK] * 20
        held = sum(path.stat().st_size for path in folder.glob("epoch-*/*"))
        assert held <= 8 << 20
    assert await put(small, [key_of(1000)], size) == [OK]
    held = sum(path.stat().st_size for path in folder.glob("epoch-*/*"))
    assert held > 7 << 20, "the other engine has no reason to evict anything"
    await small.aclose()
    caplog.clear()
    for start in range(1000, 1200, 20):
        assert await put(large, [key_of(n) for n in range(start, start + 20)], size) == [OK] * 20
    await assert_holds(large, [key_of(n) for n in range(1100, 1200)], size)
    assert "have left" in caplog.text
    assert caplog.text.count("have left") == 1
    await large.aclose()


@pytest.mark.parametrize("what", ["announced", "touched", "process"])
async def test_an_engine_that_cannot_be_checked_now_keeps_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """If the engine lost its epoch, a temporary error would lose its records permanently."""
    folder = tmp_path / "tier"
    async with engines(folder) as (one, two):
        await one.reset(1)
        await put(one, [key_of(0)], SIZE)
        [own] = [path for path in folder.glob("epoch-*") if path.name != "epoch-0"]
        long_ago = time.time() - 7200
        os.utime(own, (long_ago, long_ago))
        assert one._files is not None
        name = one._files.engines.name
        with monkeypatch.context() as patched:
            if what == "announced":
                _fail_for(patched, "open", name)
            elif what == "touched":
                other = f"{'a' * 12}-1-1-{'b' * 8}"
                (folder / "engines" / name).rename(folder / "engines" / other)
                _fail_for(patched, "stat", other)
            else:
                patched.setattr(Path, "read_text", _fails)
            assert two._files is not None
            await asyncio.to_thread(two._files.scan)
        assert own.exists()
        await assert_holds(one, [key_of(0)], SIZE)


def _fail_for(patched: pytest.MonkeyPatch, call: str, name: str) -> None:
    """A call of the operating system fails for this name."""
    real = getattr(os, call)

    def failing(path: Any, *rest: Any, **options: Any) -> Any:
        if path == name:
            raise OSError(errno.EIO, "planted")
        return real(path, *rest, **options)

    patched.setattr(f"tiers.files.engines.os.{call}", failing)


def _fails(*_arguments: object, **_options: object) -> None:
    raise OSError(errno.EIO, "planted")


async def test_exclusive_and_shared_tiers_exclude_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    alone, shared = FileTier(folder, 1 << 20), SharedFileTier(folder, 1 << 20)
    await alone.open()
    await put(alone, [key_of(1)], SIZE)
    with pytest.raises(TierIoError, match="does not share it"):
        await shared.open()
    await alone.aclose()
    await shared.open()
    await assert_holds(shared, [key_of(1)], SIZE)
    with pytest.raises(TierIoError, match="is shared by other engines"):
        await alone.open()
    await shared.aclose()


async def test_records_of_changed_weights_are_not_adopted(tmp_path: Path) -> None:
    alone = FileTier(tmp_path / "tier", 1 << 20)
    await alone.open()
    await alone.reset(1)
    await put(alone, [key_of(1)], SIZE)
    await alone.aclose()
    with pytest.raises(TierIoError, match="was reset"):
        await SharedFileTier(tmp_path / "tier", 1 << 20).open()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    living = FolderEngines(fd, engine_name())
    living.announce(0)
    machine, pid, start, _rest = living.name.split("-")
    assert living.is_alive(living.name)
    assert not living.is_alive(f"{machine}-{pid}-{int(start) + 1}-{'0' * 8}")
    living.close()
    os.close(fd)


def test_a_killed_engine_is_dead_before_its_parent_notices(tmp_path: Path) -> None:
    """Until then the process is a zombie, which still has a pid and a start time."""
    code = "from tiers.files.engines import engine_name; print(engine_name(), flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    fd = os.open(tmp_path, os.O_RDONLY)
    living = FolderEngines(fd, engine_name())
    with subprocess.Popen(command, cwd=ROOT, **pipes) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        file = tmp_path / "engines" / name
        file.touch()
        assert living.is_alive(name)
        assert seen_alive(file)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not living.is_alive(name)
        assert seen_alive(file) is None
    living.close()
    os.close(fd)
