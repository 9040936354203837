"""A disk that hangs while its tier is being closed or reopened."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.tiers.adapters.unplugged import KEYS, SIZE, Disk, assert_free, opened
from tiers.adapters import reopening
from tiers.base import Tier, TierError, TierIoError
from tiers.io.threads import in_thread
from tiers.testing import assert_holds


@pytest.fixture
async def disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Disk]:
    """``request.param``: options."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    async with opened(tmp_path, **getattr(request, "param", {})) as found:
        yield found


@pytest.mark.parametrize("disk", [{}, {"close_timeout_s": 0.05}], indirect=True)
async def test_a_tier_whose_thread_hung_is_reopened_when_the_thread_has_ended(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is not reopened earlier, because the thread may still write to the files."""
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


async def test_closing_does_not_wait_for_a_disk_that_hangs_while_it_is_opened(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the tier opens later, it is closed again."""
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
    monkeypatch.setattr(
        reopening, "CLOSE_WAIT_S", 0.05
    )  # tiers that were closed before did not hang
    await disk.tier.aclose()
    assert not waiting.done()
    released.set()
    (result,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(result, TierError)
    await assert_free(disk)


ENDING = """
import asyncio, os, sys, threading
from pathlib import Path
from offload.loop import EventLoopThread
from tiers.lmdb import tier as lmdb_tier
from tiers.adapters import reopening
from tiers.lmdb.tier import LmdbTier
from tiers.adapters.reopening import ReopeningTier
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
    lmdb_tier.LmdbFiles = hang
    while not reached.is_set():
        await asyncio.wait([asyncio.ensure_future(tier.touch([key_of(1)]))], timeout=0.1)
    print("ends", flush=True)

EventLoopThread().call(main(Path(sys.argv[1]), sys.argv[2]), float(sys.argv[3]))
"""


@pytest.mark.parametrize("hangs", ["make", "open"])
def test_the_process_ends_while_opening_hangs(tmp_path: Path, hangs: str) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "tier"), hangs, str(PATIENCE_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "ends\n", done.stderr


@pytest.mark.parametrize("is_back", [False, True])
async def test_closing_while_it_is_being_opened(disk: Disk, is_back: bool) -> None:
    """No file stays open: another tier can open the folder at once."""
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
    await assert_free(disk)
