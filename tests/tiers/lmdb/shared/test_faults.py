"""Failing system calls under a shared LMDB tier: outcomes, and no extent is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.patience import PATIENCE_S, turns
from tests.tiers.lmdb.shared.inside import index_of
from tiers.base import Buffer, ReadOutcome, TierIoError, WriteOutcome
from tiers.io.direct_io import DiskIo
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.shared.transaction import WriteTransaction
from tiers.lmdb.tier import LmdbTier
from tiers.testing import aligned, assert_holds, assert_misses, key_of, payload_of, put

SIZE = 40_000
KEYS = [key_of(n) for n in range(6)]


class FailingIo(DiskIo):
    """Fails the calls of one name with an error number, while one is set."""

    def __init__(self, name: str, error: int) -> None:
        self._name, self.error = name, error

    def _fail(self, name: str) -> None:
        if self.error and name == self._name:
            raise OSError(self.error, os.strerror(self.error))

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        if offset:  # page 0 is written when the file is opened
            self._fail("pwritev")
        return super().pwritev(fd, views, offset)

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._fail("preadv")
        return super().preadv(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        if threading.current_thread().name == "tier-commit":
            self._fail("fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        if offset:
            self._fail("allocate")
        super().allocate(fd, offset, length)


async def opened(folder: Path, io: DiskIo) -> SharedLmdbTier:
    tier = SharedLmdbTier(folder, 8 << 20, reserve_bytes=0, grow_bytes=1 << 20, io=io)
    await tier.open()
    return tier


@pytest.mark.parametrize(
    ("name", "error", "outcome"),
    [
        ("pwritev", errno.EIO, WriteOutcome.FAILED),
        ("pwritev", errno.ENOSPC, WriteOutcome.FULL),
        ("fdatasync", errno.EIO, WriteOutcome.FAILED),
        ("allocate", errno.ENOSPC, WriteOutcome.FULL),
    ],
)
async def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, name: str, error: int, outcome: WriteOutcome
) -> None:
    io = FailingIo(name, error)
    tier = await opened(tmp_path / "tier", io)
    assert await put(tier, KEYS, SIZE) == [outcome] * 6
    await assert_misses(tier, KEYS, SIZE)
    await tier.delete([])  # after freeing the allocations
    assert index_of(tier).state().reserved == 0
    tier.check()
    io.error = 0
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 6
    await assert_holds(tier, KEYS, SIZE)
    tier.check()
    await tier.aclose()


async def test_extents_that_cannot_be_freed_at_once_are_freed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is full at that moment; otherwise the extents would be lost until the process
    ends."""

    def full(_changes: object, allocations: object) -> None:
        raise lmdb.MapFullError(f"planted for {allocations}")

    io = FailingIo("pwritev", errno.EIO)
    tier = await opened(tmp_path / "tier", io)
    with monkeypatch.context() as patched:
        patched.setattr(WriteTransaction, "abandon", full)
        assert await put(tier, KEYS, SIZE) == [WriteOutcome.FAILED] * 6
        await tier.delete([])
        assert index_of(tier).state().reserved == 6
        io.error = 0
        many = [key_of(n) for n in range(100, 400)]  # more than fits
        assert await put(tier, many[:150], SIZE) == [WriteOutcome.OK] * 150
        assert index_of(tier).state().reserved == 6, "freeing was tried again, and failed again"
    assert await put(tier, many[150:], SIZE) == [WriteOutcome.OK] * 150
    assert index_of(tier).state().reserved == 0
    await assert_holds(tier, many[-20:], SIZE)
    tier.check()
    await tier.aclose()


async def test_a_failed_read_is_not_a_wrong_answer(tmp_path: Path) -> None:
    io = FailingIo("preadv", 0)
    tier = await opened(tmp_path / "tier", io)
    await put(tier, KEYS, SIZE)
    io.error = errno.EIO
    into = [aligned(SIZE) for _ in KEYS]
    assert set(await tier.read(KEYS, into)) == {ReadOutcome.CORRUPT}
    io.error = 0
    await tier.delete([])
    # records that cannot be read are forgotten, as everywhere
    await assert_misses(tier, KEYS, SIZE)
    tier.check()
    await tier.aclose()


async def test_a_truncated_index_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    tier = await opened(tmp_path / "tier", DiskIo())
    await put(tier, KEYS, SIZE)
    os.truncate(tmp_path / "tier" / "data.mdb", 8192)
    with pytest.raises(TierIoError):
        await tier.present(KEYS)
    with pytest.raises(TierIoError):
        await tier.read(KEYS[:1], [aligned(SIZE)])
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.FAILED] * 6
    with pytest.raises(TierIoError, match="cannot be written any more"):
        await put(tier, KEYS, SIZE)
    await tier.aclose()
    tier = await opened(tmp_path / "tier", DiskIo())
    assert tier.stats()["quarantined"] == 1
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 6
    await tier.aclose()


class HangingIo(DiskIo):
    """Writes beyond page 0 wait for ``gate``; ``reached`` is set when one does."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        if offset:
            self.reached.set()
            assert self.gate.wait(PATIENCE_S)
        return super().pwritev(fd, views, offset)


async def test_a_reset_that_failed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_changes: object, _own_epoch: object) -> int:
        raise lmdb.MapFullError("planted")

    tier = await opened(tmp_path / "tier", DiskIo())
    await put(tier, KEYS[:1], SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(WriteTransaction, "begin_epoch", full)
        with pytest.raises(TierIoError, match="cannot be begun"):
            await tier.reset(1)
    await assert_misses(tier, KEYS[:1], SIZE)
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.FAILED]
    await tier.reset(1)
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.OK]
    await assert_holds(tier, KEYS[:1], SIZE)
    await tier.aclose()


async def test_a_reset_takes_effect_before_hung_writes_end(tmp_path: Path) -> None:
    """The hung writes carry records of the old weights, which no process ever sees."""
    io = HangingIo()
    tier = await opened(tmp_path / "tier", io)
    writing = asyncio.create_task(put(tier, KEYS, SIZE))
    assert await asyncio.to_thread(io.reached.wait, PATIENCE_S)
    await tier.reset(1)
    new = payload_of(KEYS[0], SIZE, version=1)
    again = asyncio.create_task(tier.write(KEYS[:1], [new]))
    await asyncio.sleep(0)
    io.gate.set()
    assert await writing == [WriteOutcome.FAILED] * 6
    assert await again == [WriteOutcome.OK]
    await assert_misses(tier, KEYS[1:], SIZE)
    into = aligned(SIZE)
    assert await tier.read(KEYS[:1], [into]) == [ReadOutcome.OK]
    assert np.array_equal(into, new)
    tier.check()
    await tier.aclose()


LOCKING_PROCESS = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


async def test_a_process_with_the_same_pid_in_another_container(tmp_path: Path) -> None:
    """LMDB takes a lock at the offset of its pid; here, another process takes the one for our
    pid."""
    first = await opened(tmp_path, DiskIo())
    await first.aclose()
    arguments = ["-c", LOCKING_PROCESS, str(tmp_path / "lock.mdb"), str(os.getpid())]
    other = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE
    )
    try:
        assert other.stdout is not None
        assert await other.stdout.readline() == b"locked\n"
        with pytest.raises(TierIoError, match=rf"\({os.getpid()}\).*share one pid namespace"):
            await opened(tmp_path, DiskIo())
    finally:
        await other.communicate(b"")
    again = await opened(tmp_path, DiskIo())
    await again.aclose()


@pytest.mark.parametrize("kind", [LmdbTier, SharedLmdbTier])
async def test_a_cancelled_close_ends_when_the_folder_is_free(
    tmp_path: Path, kind: type[LmdbTier] | type[SharedLmdbTier]
) -> None:
    """Closing is bounded: a cancelled caller still finds the tier closed."""
    io = HangingIo()
    tier = kind(tmp_path / "tier", 8 << 20, reserve_bytes=0, io=io)
    await tier.open()
    writing = asyncio.create_task(put(tier, KEYS, SIZE))
    assert await asyncio.to_thread(io.reached.wait, PATIENCE_S)
    closing = asyncio.create_task(tier.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await turns(10)
    is_early = closing.done()
    io.gate.set()
    assert not is_early, "the caller must wait until the folder is free"
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert await writing == [WriteOutcome.OK] * 6
    again = kind(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    assert (await again.open()).record_count == 6
    await again.aclose()
