"""A file tier whose mount hangs, is removed or is exchanged: the event loop keeps running, and no
wrong byte is read."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, turns
from tests.tiers.files.test_tier import KEYS, SIZE, filled, flip, reopened
from tiers.adapters import reopening
from tiers.adapters.reopening import ReopeningTier
from tiers.base import ReadOutcome, Tier, TierIoError, WriteOutcome
from tiers.files import exclusive_folder as record_folder
from tiers.files.record_files import record_name
from tiers.files.tier import FileTier
from tiers.io.threads import in_thread
from tiers.testing import assert_holds, assert_misses, fetch, key_of, payload_of, put

# -- faults of the medium --------------------------------------------------------------------


GONE = r"removed or replaced|cannot be read"


class Gate:
    """A system call that hangs while the gate is shut. ``held`` is set when a call hangs. The
    thread that creates the gate must never make such a call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop_thread = threading.get_ident()
        self._open, self.held = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.held.set()
        assert threading.get_ident() != self._loop_thread, "the loop waits for the disk"
        self._open.wait()
        return self._call(*arguments, **options)

    def open(self) -> None:
        self._open.set()


OPERATIONS: dict[str, tuple[str, Callable[[Tier], Awaitable[object]]]] = {
    "touch": ("utime", lambda tier: tier.touch(KEYS)),
    "delete": ("unlink", lambda tier: tier.delete(KEYS)),
    "reset": ("mkdir", lambda tier: tier.reset(1)),
    "write": ("fsync", lambda tier: put(tier, [key_of(99)], SIZE)),
    "read": ("readv", lambda tier: fetch(tier, KEYS[0], SIZE)),
    "reclaim": ("rmdir", lambda tier: tier.reset(1)),
    "drop": ("unlink", lambda tier: fetch(tier, KEYS[0], SIZE)),  # a damaged record
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_mount_that_hangs_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All disk accesses run in threads: the loop keeps running, here as part of the test."""
    call, operation = OPERATIONS[name]
    records = await filled(tmp_path / "tier")
    if name == "drop":
        flip(records / record_name(KEYS[0]))
    tier = await reopened(tmp_path / "tier")
    with monkeypatch.context() as patch:
        gate = Gate(getattr(os, call))
        patch.setattr(record_folder.os, call, gate)
        running = asyncio.ensure_future(operation(tier))
        await in_thread(gate.held.wait)
        closing = asyncio.ensure_future(tier.aclose())
        ended: list[object] = []
        for task in (running, closing):
            task.add_done_callback(ended.append)
        await turns(10)
        gate.open()
        await running
        await closing
        assert ended == [running, closing], "closing must wait for the operation"
    other = await reopened(tmp_path / "tier")  # the lock was released
    await other.aclose()


HUNG_END = """
import asyncio, os, sys, threading
from pathlib import Path
from offload.loop import EventLoopThread
from tiers.files.tier import FileTier
from tiers.testing import key_of, put

async def main(path):
    tier = FileTier(path, 1 << 20)
    await tier.open()
    await put(tier, [key_of(1)], 8192)
    held = threading.Event()
    def hang(*_, **__):
        held.set()
        threading.Event().wait()
    os.utime = hang
    tasks = [asyncio.ensure_future(tier.touch([key_of(1)])) for _ in range(40)]
    while not held.is_set():
        await asyncio.wait(tasks, timeout=0.01)
    print("ends", flush=True)

EventLoopThread().call(main(Path(sys.argv[1])), float(sys.argv[2]))
"""


def test_the_process_ends_while_the_mount_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUNG_END, str(tmp_path / "tier"), str(PATIENCE_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "ends\n", done.stderr


async def test_closing_continues_when_no_caller_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(tmp_path / "tier")
    tier = await reopened(tmp_path / "tier")
    gate = Gate(os.utime)
    with monkeypatch.context() as patch:
        patch.setattr(record_folder.os, "utime", gate)
        running = asyncio.ensure_future(tier.touch(KEYS))
        await in_thread(gate.held.wait)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tier.aclose(), 0.01)
        gate.open()
        await running
    await tier.aclose()
    other = await reopened(tmp_path / "tier")
    await assert_holds(other, KEYS, SIZE)
    await other.aclose()


def removed(path: Path) -> None:
    shutil.rmtree(path)


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(mode=0o700)


def without_records(path: Path) -> None:
    shutil.rmtree(path / "epoch-0")


def exchanged(path: Path) -> None:
    path.rename(path.with_name("away"))
    shutil.copytree(path.with_name("other"), path)


@pytest.mark.parametrize("happens", [removed, emptied, without_records, exchanged])
@pytest.mark.parametrize("first", ["write", "read"])
async def test_a_missing_folder_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None], first: str
) -> None:
    """No record of another disk is returned, even before the tier has noticed the exchange."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    monkeypatch.setattr(reopening, "CLOSE_WAIT_S", PATIENCE_S)
    path, losses = tmp_path / "tier", []
    other = await reopened(tmp_path / "other")
    await other.write(KEYS, [payload_of(key, SIZE, version=1) for key in KEYS])
    await other.aclose()
    tier = ReopeningTier(
        FileTier(path, 1 << 20), lambda epoch: FileTier(path, 1 << 20, epoch=epoch)
    )
    tier.on_loss(lambda: losses.append(1))
    await tier.open()
    await put(tier, KEYS[:3], SIZE)
    happens(path)
    if first == "read" and happens is exchanged:
        # from the disk that was removed: still this tier's records
        await assert_holds(tier, KEYS[:3], SIZE)
    elif first == "read":
        with pytest.raises(TierIoError, match=GONE):
            await fetch(tier, KEYS[0], SIZE)
    if first == "write" or happens is exchanged:
        with pytest.raises(TierIoError, match=GONE):
            await put(tier, KEYS[3:], SIZE)
    await assert_misses(tier, KEYS, SIZE)
    assert losses == [1]
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 6
    await assert_holds(tier, KEYS, SIZE)
    assert tier.reopenings == 1
    await tier.aclose()


async def test_a_later_epoch_never_begins_with_records(tmp_path: Path) -> None:
    """A folder with the epoch's name may already exist there."""
    records = await filled(tmp_path / "tier")
    tier = await reopened(tmp_path / "tier")
    shutil.copytree(records, records.with_name("epoch-1"))
    await tier.reset(1)
    assert list(records.with_name("epoch-1").iterdir()) == []  # a test
    await tier.aclose()


async def test_a_record_that_is_being_removed_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal must not affect a record that was written after it."""
    records = await filled(tmp_path / "tier")
    flip(records / record_name(KEYS[0]))
    tier = await reopened(tmp_path / "tier")
    gate = Gate(os.unlink)
    with monkeypatch.context() as patch:
        patch.setattr(record_folder.os, "unlink", gate)
        reading = asyncio.ensure_future(fetch(tier, KEYS[0], SIZE))
        await in_thread(gate.held.wait)
        removal: Any = tier._removing[KEYS[0]]
        callbacks = len(removal._callbacks)
        writing = asyncio.ensure_future(put(tier, KEYS[:1], SIZE))
        while not writing.done() and len(removal._callbacks) == callbacks:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        assert not writing.done(), "removing must not wait; the file is removed later"
        gate.open()
        assert (await reading)[0] is ReadOutcome.CORRUPT
        assert await writing == [WriteOutcome.OK]
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()
