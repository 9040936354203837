"""A process uses a shared tier while another process changes it between two of its steps."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.tiers.lmdb.shared.inside import index_of
from tests.tiers.shared.processes import make_tier
from tiers.adapters import reopening
from tiers.adapters.reopening import SharedReopeningTier
from tiers.base import Buffer, ReadOutcome, TierIoError, WriteOutcome
from tiers.folders.folder import LOCK_NAME
from tiers.io.codec import Codec
from tiers.io.direct_io import DiskIo
from tiers.lmdb.shared.index import WRITING_NAME
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.shared.transaction import WriteTransaction
from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, assert_holds, assert_misses, fetch, key_of, payload_of, put

SIZE = 40_000
CAPACITY = 4 << 20
OK = WriteOutcome.OK


class GatedIo(DiskIo):
    """Reads wait for ``gate``; ``reached`` is set when one does."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.reached.set()
        assert self.gate.wait(PATIENCE_S)
        return super().preadv(fd, views, offset)


def in_other_process(folder: Path, code: str) -> str:
    """Run the body of an async function over ``tier`` in another process and return its output."""
    program = (
        "import asyncio, sys\n"
        "from tests.tiers.shared.processes import make_tier\n"
        "from tiers.testing import *\n"
        "async def main():\n"
        f"    tier = make_tier('lmdb', sys.argv[1], {CAPACITY})\n"
        "    await tier.open()\n"
        f"    {code}\n"
        "    await tier.aclose()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    root = Path(__file__).parents[4]
    return subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True).stdout


async def opened(folder: Path, io: DiskIo | None = None) -> SharedLmdbTier:
    tier = make_tier("lmdb", folder, CAPACITY, io)
    assert isinstance(tier, SharedLmdbTier)
    await tier.open()
    return tier


async def read_while_the_place_is_reused(folder: Path) -> tuple[ReadOutcome, Buffer]:
    """A read that found its record, but reaches the disk after other bytes were written there."""
    io = GatedIo()
    tier = await opened(folder, io)
    try:
        assert await put(tier, [key_of(1)], SIZE) == [OK]
        reading = asyncio.create_task(fetch(tier, key_of(1), SIZE))
        assert await asyncio.to_thread(io.reached.wait, PATIENCE_S)
        others = "[key_of(n) for n in range(10, 70)]"
        fill = f"await tier.delete([key_of(1)]); await put(tier, {others}, {SIZE})"
        await asyncio.to_thread(in_other_process, folder, fill)
        io.gate.set()
        return await reading
    finally:
        io.gate.set()
        await tier.aclose()


async def test_an_extent_reused_while_it_is_read_is_a_miss(tmp_path: Path) -> None:
    outcome, _data = await read_while_the_place_is_reused(tmp_path / "tier")
    assert outcome is ReadOutcome.MISS
    tier = await opened(tmp_path / "tier")
    tier.check()
    await tier.aclose()


async def test_without_the_checksum_it_would_be_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Codec, "decode", lambda *_arguments: True)
    outcome, data = await read_while_the_place_is_reused(tmp_path / "tier")
    assert outcome is ReadOutcome.OK
    assert not np.array_equal(data, payload_of(key_of(1), SIZE))


async def test_processes_read_each_others_records(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = await opened(folder)
    keys = [key_of(n) for n in range(8)]
    assert await tier.present(keys) == [False] * 8
    in_other_process(folder, f"await put(tier, [key_of(n) for n in range(6)], {SIZE})")
    assert await tier.present(keys) == [True] * 6 + [False] * 2
    await assert_holds(tier, keys[:6], SIZE)
    in_other_process(folder, "await tier.touch([key_of(0)]); await tier.delete([key_of(3)])")
    order = [stored.key for stored in await all_keys(tier)]
    assert order == [keys[1], keys[2], keys[4], keys[5], keys[0]]
    await tier.aclose()


async def test_a_capacity_below_the_first_index_has_no_effect(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = SharedLmdbTier(folder, 32 * CAPACITY, record_bytes=4096, reserve_bytes=0)
    await tier.open()
    assert (folder / "data.mdb").stat().st_size > CAPACITY
    in_other_process(folder, f"await put(tier, [key_of(n) for n in range(200)], {SIZE})")
    assert await tier.present([key_of(n) for n in range(200)]) == [True] * 200
    tier.check()
    await tier.aclose()


async def test_a_reset_by_one_process_forgets_for_all_and_separates_them(tmp_path: Path) -> None:
    """The process with other weights continues alone; the others continue together."""
    folder = tmp_path / "tier"
    tier = await opened(folder)
    old, new = [key_of(1), key_of(2)], [key_of(3)]
    await put(tier, old, SIZE)
    in_other_process(folder, f"await tier.reset(1); await put(tier, [key_of(9)], {SIZE})")
    assert await tier.present([*old, key_of(9)]) == [False] * 3
    await assert_misses(tier, [*old, key_of(9)], SIZE)
    assert await put(tier, new, SIZE) == [OK]
    assert [stored.key for stored in await all_keys(tier)] == new
    found = in_other_process(folder, "print(await tier.present([key_of(n) for n in (1, 3, 9)]))")
    assert found.strip() == "[False, True, False]"
    await tier.reset(3)
    assert await put(tier, old, SIZE) == [OK] * 2
    await assert_holds(tier, old, SIZE)
    assert "True" not in in_other_process(
        folder, "print(await tier.present([key_of(1), key_of(3)]))"
    )
    tier.check()
    await tier.aclose()


async def test_a_write_that_a_reset_overtakes_is_not_stored_for_the_others(tmp_path: Path) -> None:
    """The reset is called before the loop begins the write's own task."""
    folder, keys = tmp_path / "tier", [key_of(1), key_of(2)]
    tier = await opened(folder)
    writing = asyncio.ensure_future(put(tier, keys, SIZE))
    resetting = asyncio.ensure_future(tier.reset(1))
    assert await writing == [WriteOutcome.FAILED] * 2
    await resetting
    assert await tier.present(keys) == [False] * 2
    assert "True" not in in_other_process(folder, "print(await tier.present([key_of(1)]))")
    tier.check()
    await tier.aclose()


async def test_changed_weights_do_not_join_the_others(tmp_path: Path) -> None:
    """A server that was reset reopens a tier after its disk was away."""
    folder = tmp_path / "tier"
    tier = await opened(folder)
    await put(tier, [key_of(1)], SIZE)
    await tier.aclose()
    tier = SharedLmdbTier(folder, CAPACITY, reserve_bytes=0, epoch=5)
    await tier.open()
    await assert_misses(tier, [key_of(1)], SIZE)
    await put(tier, [key_of(2)], SIZE)
    await tier.aclose()
    tier = await opened(folder)
    assert await tier.present([key_of(1), key_of(2)]) == [True, False]
    await tier.aclose()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_repeated_reset_removes_the_old_records_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The reset's transaction fails, and with it the tier, which is reopened for the next
    attempt."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    monkeypatch.setattr(reopening, "CLOSE_WAIT_S", PATIENCE_S)
    folder = tmp_path / "tier"

    def make(epoch: int = 0) -> SharedLmdbTier:
        return SharedLmdbTier(folder, CAPACITY, reserve_bytes=0, epoch=epoch)

    def fail(*_arguments: object) -> int:
        raise OSError("planted")

    tier, keys = SharedReopeningTier(make(), make), [key_of(1), key_of(2)]
    await tier.open()
    await put(tier, keys, SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(WriteTransaction, "begin_epoch", fail)
        for _ in range(times):
            with pytest.raises(TierIoError):
                await tier.reset(5)
    await tier.reset(5)
    assert tier.reopenings >= 1
    await assert_misses(tier, keys, SIZE)
    look = "print(await tier.present([key_of(n) for n in range(1, 5)]))"
    assert "True" not in in_other_process(folder, look)
    in_other_process(folder, f"await put(tier, [key_of(3)], {SIZE})")
    assert await put(tier, [key_of(4)], SIZE) == [OK]
    assert in_other_process(folder, look).strip() == "[False, False, True, False]"
    with monkeypatch.context() as patched:
        patched.setattr(WriteTransaction, "begin_epoch", fail)
        with pytest.raises(TierIoError):
            await tier.reset(7)
    await tier.reset(7)
    assert "[False, False, True, False]" in in_other_process(folder, look), (
        "it must use only its own records"
    )
    await tier.aclose()


async def test_exclusive_and_shared_tiers_exclude_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    shared, alone = await opened(folder), LmdbTier(folder, CAPACITY, reserve_bytes=0)
    await put(shared, [key_of(1)], SIZE)
    with pytest.raises(TierIoError, match="in use by process"):
        await alone.open()
    await shared.aclose()
    await alone.open()
    await assert_holds(alone, [key_of(1)], SIZE)
    await put(alone, [key_of(2)], SIZE)
    with pytest.raises(TierIoError, match='give all of them "shared": true'):
        await shared.open()
    await alone.aclose()
    await shared.open()
    await assert_holds(shared, [key_of(1), key_of(2)], SIZE)
    shared.check()
    await shared.aclose()


async def test_records_of_changed_weights_in_an_exclusive_folder_are_not_shared(
    tmp_path: Path,
) -> None:
    alone = LmdbTier(tmp_path / "tier", CAPACITY, reserve_bytes=0)
    await alone.open()
    await alone.reset(1)
    await put(alone, [key_of(1)], SIZE)
    await alone.aclose()
    for epoch in (1, 2):
        shared = SharedLmdbTier(tmp_path / "tier", CAPACITY, reserve_bytes=0, epoch=epoch)
        await shared.open()
        assert await shared.present([key_of(1)]) == [False]
        shared.check()
        await shared.aclose()


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_tier_whose_folder_was_replaced_does_not_go_on_in_the_old_one(
    tmp_path: Path, is_shared: bool
) -> None:
    """An operator removes the folder, and another engine that shares it reopens it first."""
    folder = tmp_path / "tier"
    tier = await opened(folder) if is_shared else LmdbTier(folder, CAPACITY, reserve_bytes=0)
    if not is_shared:
        await tier.open()
    await put(tier, [key_of(1)], SIZE)
    shutil.rmtree(folder)
    in_other_process(folder, f"await put(tier, [key_of(2)], {SIZE})")
    assert await put(tier, [key_of(3)], SIZE) == [WriteOutcome.FAILED]
    with pytest.raises(TierIoError, match="was replaced while in use"):
        await put(tier, [key_of(3)], SIZE)
    await tier.aclose()
    await tier.open()
    await assert_misses(tier, [key_of(1), key_of(3)], SIZE)
    await assert_holds(tier, [key_of(2)], SIZE)
    await tier.aclose()


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_look_at_the_owner_does_not_count_as_a_sharer(tmp_path: Path, is_new: bool) -> None:
    """A command looks up the owner while the first sharer opens the folder. This sharer must not
    trust the tables of earlier sharers: another tier has used the folder since, and was reset."""
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    if not is_new:
        shared, alone = await opened(folder), LmdbTier(folder, CAPACITY, reserve_bytes=0)
        await shared.aclose()
        await alone.open()
        await alone.reset(1)
        await put(alone, [key_of(1)], SIZE)
        await alone.aclose()
    real = fcntl.flock
    with (folder / LOCK_NAME).open("ab") as other, pytest.MonkeyPatch.context() as patched:

        def noted(fd: int, flags: int) -> None:
            """Let the look end after the sharer's first attempt."""
            is_common = os.path.samestat(os.fstat(fd), os.fstat(other.fileno()))
            try:
                real(fd, flags)
            finally:
                if is_common and flags == fcntl.LOCK_EX | fcntl.LOCK_NB:
                    real(other, fcntl.LOCK_UN)

        real(other, fcntl.LOCK_SH)
        patched.setattr(fcntl, "flock", noted)
        shared = SharedLmdbTier(folder, CAPACITY, reserve_bytes=0, noted_epoch=int(not is_new))
        await shared.open()
    assert await shared.present([key_of(1)]) == [False]
    shared.check()
    await shared.aclose()


@pytest.mark.parametrize("at", ["reserve", "publish"])
async def test_killed_in_the_middle_of_a_transaction(tmp_path: Path, at: str) -> None:
    """The process has changed tables and holds LMDB's lock; the others continue as if its
    transaction had not begun."""
    folder = tmp_path / "tier"
    tier = await opened(folder)
    await put(tier, [key_of(1)], SIZE)
    code = (
        "import os, signal\n"
        "    from tiers.lmdb.shared.transaction import WriteTransaction\n"
        f"    real = WriteTransaction.{at}\n"
        "    def killed(*arguments):\n"
        "        real(*arguments)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"    WriteTransaction.{at} = killed\n"
        f"    await put(tier, [key_of(n) for n in range(5, 9)], {SIZE})"
    )
    with pytest.raises(subprocess.CalledProcessError) as error:
        await asyncio.to_thread(in_other_process, folder, code)
    assert error.value.returncode == -signal.SIGKILL
    tier.check()
    assert await tier.present([key_of(n) for n in range(9)]) == [n == 1 for n in range(9)]
    many = [key_of(n) for n in range(100, 160)]  # this needs the reserved extents, if there are any
    assert await put(tier, many, SIZE) == [OK] * 60
    await assert_holds(tier, many[-10:], SIZE)
    tier.check()
    assert index_of(tier).state().reserved == 0
    await tier.aclose()


async def test_a_damaged_record_is_forgotten_for_all(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = await opened(folder)
    await put(tier, [key_of(1)], SIZE)
    with (folder / "payload.data").open("r+b") as file:
        file.seek(4096 + 123)
        file.write(b"rot")
    assert (await fetch(tier, key_of(1), SIZE))[0] is ReadOutcome.CORRUPT
    await tier.delete([])  # after the removal
    assert "False" in in_other_process(folder, "print(await tier.present([key_of(1)]))")
    assert await put(tier, [key_of(1)], SIZE) == [OK]
    await assert_holds(tier, [key_of(1)], SIZE)
    await tier.aclose()


async def test_processes_take_turns_before_they_take_lmdbs_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await opened(tmp_path / "tier")
    flock, loop, asked = fcntl.flock, asyncio.get_running_loop(), asyncio.Event()

    def noted(fd: int, flags: int) -> None:
        if os.path.samestat(os.fstat(fd), turns) and flags == fcntl.LOCK_EX:
            loop.call_soon_threadsafe(asked.set)
        flock(fd, flags)

    with (tmp_path / "tier" / WRITING_NAME).open("rb") as other:
        turns = os.fstat(other.fileno())
        flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", noted)
        writing = asyncio.ensure_future(put(tier, [key_of(1)], 4096))
        waiting = asyncio.ensure_future(asked.wait())
        await asyncio.wait([writing, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), "it wrote without waiting for its turn"
        assert not writing.done(), "it wrote out of turn"
    assert await writing == [WriteOutcome.OK]
    await tier.aclose()
