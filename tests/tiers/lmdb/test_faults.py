"""Disks that fail, fill up, hang or vanish under an LMDB tier: outcomes, never a dead process.

The suite samples the nth-call faults; ``KVTIERS_NTH=1`` tries every n up to 200, 7 every seventh.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.patience import PATIENCE_S, turns
from tiers.base import Buffer, ReadOutcome, TierIoError, WriteOutcome
from tiers.io.device_queue import DeviceQueue
from tiers.io.direct_io import DiskIo
from tiers.lmdb.index import Changes, LmdbIndex
from tiers.lmdb.tier import SPARE_THREADS, LmdbTier
from tiers.testing import aligned, assert_holds, fetch, key_of, payload_of, put

NTH = range(1, 201, int(os.environ.get("KVTIERS_NTH", "57")))
SIZE = 20_000
KEYS = [key_of(n) for n in range(12)]
CHILD = Path(__file__).with_name("strace_child.py")


class FailingIo(DiskIo):
    """Fails the nth call, counted over all kinds, with one error number."""

    def __init__(self, number: int, code: int = errno.EIO) -> None:
        self.calls = 0
        self.met = 0
        self._number = number
        self._code = code
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
            is_hit = self.calls == self._number
            self.met += is_hit
        if is_hit:
            raise OSError(self._code, os.strerror(self._code))

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._count()
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._count()
        return super().pwritev(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        self._count()
        super().fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._count()
        super().allocate(fd, offset, length)


async def workload(tier: LmdbTier) -> tuple[int, int]:
    """Write, read, delete, and check every byte served. Returns (records stored, outcomes not
    OK)."""
    stored = bad = 0
    for round_ in range(17):
        keys = [key_of(100 * round_ + n) for n in range(4)]
        written = [(await put(tier, [key], SIZE))[0] for key in keys]
        for key, outcome in zip(keys, written, strict=True):
            got, data = await fetch(tier, key, SIZE)
            bad += outcome is not WriteOutcome.OK or got is not ReadOutcome.OK
            if outcome is WriteOutcome.OK:
                stored += 1
                assert got in (ReadOutcome.OK, ReadOutcome.CORRUPT)
            else:
                assert got is ReadOutcome.MISS
            if got is ReadOutcome.OK:
                assert np.array_equal(data, payload_of(key, SIZE))
        await tier.delete(keys[:2])
        tier.check()
    return stored, bad


@pytest.mark.parametrize("number", NTH)
async def test_eio_on_the_nth_call(tmp_path: Path, number: int) -> None:
    io = FailingIo(number)
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, grow_bytes=1 << 20, io=io)
    try:
        await tier.open()
        stored, bad = await workload(tier)
        assert bad <= 1, "a failed read is tried once more, any other failure costs one record"
        assert stored >= 67
    except TierIoError:
        assert number <= 3, "only the first calls, those made by open, may fail the tier"
    finally:
        await tier.aclose()
    assert io.met == 1, f"the workload makes only {io.calls} calls"
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    await tier.open()
    assert await workload(tier) == (68, 0)
    await tier.aclose()


@pytest.mark.parametrize("number", range(1, 201, int(os.environ.get("KVTIERS_NTH", "97"))))
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_eio_on_the_nth_system_call_of_the_index_too(
    tmp_path: Path, call: str, number: int
) -> None:
    """Injected below Python, so that LMDB's own calls fail as well; strace counts per thread."""
    if not shutil.which("strace"):
        pytest.skip("needs strace: apt-get install strace")
    command = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={call}"]
    command += ["-e", f"inject={call}:error=EIO:when={number}"]
    command += [sys.executable, str(CHILD), str(tmp_path / "tier")]
    environment = {**os.environ, "PYTHONPATH": str(CHILD.parents[3])}
    ended = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if "ptrace" in ended.stderr:
        pytest.skip("needs permission to trace processes (in Docker: --cap-add SYS_PTRACE)")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "(INJECTED)" in (tmp_path / "trace").read_text(), "the fault never occurred"


async def test_a_failed_flush_publishes_nothing(tmp_path: Path) -> None:
    io = FailingIo(-1)
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io)
    await tier.open()
    await put(tier, KEYS[:1], SIZE)

    class Broken(FailingIo):
        def fdatasync(self, fd: int) -> None:
            raise OSError(errno.EIO, "flush failed")

    io.__class__ = Broken  # from now on
    assert await put(tier, KEYS[1:], SIZE) == [WriteOutcome.FAILED] * 11
    assert tier.stats()["sync_failures"] > 0
    await assert_holds(tier, KEYS[:1], SIZE)
    io.__class__ = FailingIo
    assert await put(tier, KEYS[1:], SIZE) == [WriteOutcome.OK] * 11
    await assert_holds(tier, KEYS, SIZE)
    tier.check()
    await tier.aclose()


class GatedIo(DiskIo):
    """Holds reads or writes until the gate opens."""

    def __init__(self) -> None:
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.reads.set()
        self.writes.set()
        self.waiting = threading.Event()

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.waiting.set()
        self.reads.wait()
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.waiting.set()
        self.writes.wait()
        return super().pwritev(fd, views, offset)


class CountingIo(GatedIo):
    """Records the maximum number of reads in progress at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._lock = threading.Lock()

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return super().preadv(fd, views, offset)
        finally:
            with self._lock:
                self._now -= 1


def place(thread: threading.Thread) -> str:
    """The place where a read thread waits for the gate: at the device, or in the queue for the
    device. Empty if the thread can continue."""
    codes = {at.f_code for at, _ in traceback.walk_stack(sys._current_frames()[thread.ident or 0])}
    if CountingIo.preadv.__code__ in codes:
        return "device"
    queued = {DeviceQueue.begin_read.__code__, threading.Condition.wait.__code__}
    return "queue" if queued <= codes else ""


def places_at_rest(threads: Sequence[threading.Thread]) -> list[str]:
    """Wait until no thread can continue; return where they stand."""
    give_up = time.monotonic() + PATIENCE_S
    while "" in (found := [place(thread) for thread in threads]):
        assert time.monotonic() < give_up, found
        time.sleep(0.001)
    return found


async def test_the_device_gets_exactly_the_configured_number_of_requests(tmp_path: Path) -> None:
    """There are more threads, and more jobs than threads. While the device holds all reads, every
    thread is followed until it can get no further."""
    io = CountingIo()
    size = 1 << 20  # one job each
    tier = LmdbTier(tmp_path / "tier", 16 << 20, reserve_bytes=0, io=io, io_threads=3)
    await tier.open()
    assert await put(tier, KEYS, size) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(tier, KEYS, size)
    io.reads.clear()
    into = [[aligned(size) for _ in KEYS] for _ in range(3)]
    reading = asyncio.gather(*(tier.read(KEYS, each) for each in into))
    try:
        await turns()
        places = places_at_rest(tier._read_threads._threads)
        assert Counter(places) == {"device": 3, "queue": SPARE_THREADS}
    finally:
        io.reads.set()
    assert await reading == [[ReadOutcome.OK] * len(KEYS)] * 3
    assert io.most == 3
    await tier.aclose()


class NotedIo(DiskIo):
    """Records writes and flushes of the payload file, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        found = super().pwritev(fd, views, offset)
        self.done.append("write")
        return found

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.done.append("flush")


async def test_payloads_are_flushed_before_the_index_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, a power cut would leave records whose bytes were never written."""
    io = NotedIo()
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io)
    await tier.open()
    apply = LmdbIndex.apply

    def noted(self: LmdbIndex, changes: Changes) -> None:
        if any(value is not None for value in changes.edits.values()):
            io.done.append("name")
        apply(self, changes)

    monkeypatch.setattr(LmdbIndex, "apply", noted)
    for key in KEYS:
        assert await put(tier, [key], SIZE) == [WriteOutcome.OK]
    assert io.done.count("name") == len(KEYS)
    last = {"write": -1, "flush": -1}
    for at, what in enumerate(io.done):
        assert what != "name" or last["flush"] > last["write"], io.done
        last[what] = at
    await tier.aclose()


async def test_an_index_after_a_failed_write_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect of the failed transaction on the disk is unknown until the index is opened
    again."""
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    await tier.open()
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.OK]

    def failing(self: LmdbIndex, changes: Changes) -> None:
        monkeypatch.undo()
        raise lmdb.DiskError("the disk")

    monkeypatch.setattr(LmdbIndex, "apply", failing)
    assert await put(tier, KEYS[1:2], SIZE) == [WriteOutcome.FAILED]
    with pytest.raises(TierIoError, match="cannot be written any more"):
        await put(tier, KEYS[2:3], SIZE)
    await tier.aclose()
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    await tier.open()
    await assert_holds(tier, KEYS[:1], SIZE)
    assert await put(tier, KEYS[2:3], SIZE) == [WriteOutcome.OK]
    await tier.aclose()


async def test_a_read_overtaken_by_a_reset_finds_nothing(tmp_path: Path) -> None:
    """The bytes that it has read belong to the old weights."""
    io = GatedIo()
    tier = LmdbTier(tmp_path / "tier", 4 << 20, reserve_bytes=0, io=io)
    await tier.open()
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.OK]
    io.reads.clear()
    io.waiting.clear()
    reading = asyncio.create_task(fetch(tier, KEYS[0], SIZE))
    await asyncio.to_thread(io.waiting.wait)
    await tier.reset(5)
    io.reads.set()
    assert (await reading)[0] is ReadOutcome.MISS
    tier.check()
    await tier.aclose()


def await_commit(tier: LmdbTier, before: int) -> None:
    """Wait for a commit while the event loop does not run."""
    give_up = time.monotonic() + PATIENCE_S
    while tier.stats()["commits"] == before:
        assert time.monotonic() < give_up, "nothing was committed"
        time.sleep(0.001)


async def test_a_write_committed_when_a_reset_begins_is_forgotten(tmp_path: Path) -> None:
    """The event loop is notified of the commit after the reset; the epoch number was used
    before."""
    tier = LmdbTier(tmp_path / "tier", 4 << 20, reserve_bytes=0)
    await tier.open()
    assert await put(tier, KEYS[1:2], SIZE) == [WriteOutcome.OK]  # the file has space now
    before, commits = tier.epoch, tier.stats()["commits"]
    writing = asyncio.create_task(put(tier, KEYS[:1], SIZE))
    await asyncio.sleep(0)
    resetting = asyncio.create_task(tier.reset(before))
    await_commit(tier, commits)
    await resetting
    assert tier.epoch > before
    assert await writing == [WriteOutcome.FAILED]
    assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.MISS
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.OK]
    tier.check()
    await tier.aclose()


async def test_an_extent_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    """A slow read of a deleted record gets its own bytes, not those of the next owner."""
    io = GatedIo()
    tier = LmdbTier(tmp_path / "tier", 4 << 20, reserve_bytes=0, io=io)
    info = await tier.open()
    fits = info.capacity_bytes // tier.footprint_bytes(SIZE)
    keys = [key_of(n) for n in range(fits)]
    assert await put(tier, keys, SIZE) == [WriteOutcome.OK] * fits
    io.reads.clear()
    io.waiting.clear()
    reading = asyncio.create_task(fetch(tier, keys[0], SIZE))
    await asyncio.to_thread(io.waiting.wait)
    await tier.delete(keys[:1])
    io.waiting.clear()
    writing = asyncio.create_task(put(tier, [key_of(10**6)], SIZE))
    await tier.delete([key_of(10**7)])
    assert not io.waiting.is_set(), "the new record was written over the one being read"
    io.reads.set()
    outcome, data = await reading
    assert outcome is ReadOutcome.OK
    assert np.array_equal(data, payload_of(keys[0], SIZE))
    assert await writing == [WriteOutcome.OK]
    tier.check()
    await tier.aclose()


async def test_a_hung_disk_refuses_writes_beyond_its_queue(tmp_path: Path) -> None:
    io = GatedIo()
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io, queue_records=16)
    await tier.open()
    await put(tier, KEYS, SIZE)
    io.reads.clear()
    io.writes.clear()
    into = [aligned(SIZE) for _ in KEYS]
    reading: asyncio.Task[list[ReadOutcome]] = asyncio.create_task(tier.read(KEYS, into))
    new = [key_of(1000 + n) for n in range(12)]
    writing = asyncio.create_task(put(tier, new, SIZE))
    await asyncio.sleep(0)
    refused = await tier.read(KEYS, [aligned(SIZE) for _ in KEYS])
    assert refused == [ReadOutcome.BUSY] * 12
    assert await put(tier, [key_of(2000 + n) for n in range(12)], SIZE) == (
        [WriteOutcome.FAILED] * 12
    )
    io.reads.set()
    io.writes.set()
    assert await reading == [ReadOutcome.OK] * 12
    assert await writing == [WriteOutcome.OK] * 12
    await tier.aclose()


async def test_a_cancelled_read_returns_only_when_its_buffer_is_no_longer_written(
    tmp_path: Path,
) -> None:
    io = GatedIo()
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io)
    await tier.open()
    await put(tier, KEYS, SIZE)
    io.reads.clear()
    io.waiting.clear()
    reading = asyncio.create_task(fetch(tier, KEYS[0], SIZE))
    await asyncio.to_thread(io.waiting.wait)
    reading.cancel()
    await tier.delete([key_of(10**7)])
    assert not reading.done()
    io.reads.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await tier.aclose()


async def test_closing_over_a_hung_disk_is_bounded(tmp_path: Path) -> None:
    io = GatedIo()
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io, close_timeout_s=0.05)
    await tier.open()
    await put(tier, KEYS, SIZE)
    io.reads.clear()
    io.waiting.clear()
    reading = asyncio.create_task(fetch(tier, KEYS[0], SIZE))
    await asyncio.to_thread(io.waiting.wait)
    await tier.aclose()
    assert not reading.done()
    io.reads.set()
    outcome, _ = await reading
    assert outcome is ReadOutcome.OK


async def test_the_reserve_of_the_file_system_is_respected(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    tier = LmdbTier(tmp_path / "tier", 64 << 20, reserve_bytes=2 * free)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.FULL] * 12
    await tier.aclose()
    tier = LmdbTier(tmp_path / "tier", 64 << 20, reserve_bytes=0)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 12
    await tier.aclose()


class Quota(DiskIo):
    """An exhausted quota: nothing can be allocated, and after that nothing can be written."""

    def __init__(self) -> None:
        self.used_up: set[str] = set()

    def allocate(self, fd: int, offset: int, length: int) -> None:
        if "allocate" in self.used_up:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        super().allocate(fd, offset, length)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        if "write" in self.used_up:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().pwritev(fd, views, offset)


async def test_an_exhausted_quota_is_full_and_temporary(tmp_path: Path) -> None:
    io = Quota()
    tier = LmdbTier(tmp_path / "tier", 32 << 20, reserve_bytes=0, grow_bytes=1 << 20, io=io)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 12
    more = [key_of(100 + n) for n in range(60)]
    io.used_up = {"allocate"}
    outcomes = await put(tier, more, SIZE)
    assert WriteOutcome.FULL in outcomes
    assert WriteOutcome.FAILED not in outcomes
    io.used_up = {"write"}
    await tier.delete(KEYS[:1])
    assert await put(tier, [key_of(300)], SIZE) == [WriteOutcome.FULL]
    await assert_holds(tier, KEYS[1:], SIZE)
    io.used_up = set()
    assert await put(tier, more, SIZE) == [WriteOutcome.OK] * 60
    await assert_holds(tier, more, SIZE)
    tier.check()
    await tier.aclose()
