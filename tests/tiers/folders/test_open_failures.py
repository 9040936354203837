"""A process that cannot create more threads: opening a tier fails, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from tests.tiers.adapters.unplugged import KEYS, SIZE, opened
from tiers.adapters import reopening
from tiers.adapters.remote_read_only import RemoteReadOnlyTier
from tiers.base import Tier, TierInfo, TierIoError, WriteOutcome
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.lmdb.shared.index import SharedIndex
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.tier import LmdbTier
from tiers.mooncake import tier as mooncake_tier
from tiers.mooncake.client import MooncakeSettings
from tiers.mooncake.tier import MooncakeTier
from tiers.testing import assert_holds, key_of, put

SIZES = {"record_bytes": 4096, "reserve_bytes": 0, "grow_bytes": 1 << 20, "io_threads": 1}
MAKERS: dict[str, Callable[[Path], Tier]] = {
    "lmdb": lambda path: LmdbTier(path, 8 << 20, **SIZES),
    "file": lambda path: FileTier(path, 8 << 20, depth=2),
    "shared lmdb": lambda path: SharedLmdbTier(path, 8 << 20, **SIZES),
    "shared file": lambda path: SharedFileTier(path, 8 << 20, depth=2),
}


class Scarce:
    """``threading.Thread.start`` in a process that can create only ``left`` more threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.start(thread))

    def start(self, thread: threading.Thread) -> None:
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        self._start(thread)


def held() -> tuple[set[str], int]:
    """Threads of tiers, and open files."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("tier-")}
    for thread in list(threads):
        if re.match("tier-[_A-Z]", thread.name):  # used by one function, which has returned
            thread.join()
            threads.discard(thread)
    return {thread.name for thread in threads}, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", MAKERS)
async def test_a_tier_without_threads_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tier = MAKERS[kind](tmp_path / "tier")
    before = held()
    threads = Scarce(monkeypatch)
    failures, said = 0, set[str]()
    while True:
        threads.left = failures
        try:
            await tier.open()
        except TierIoError as error:
            said.add(str(error))
            failures += 1
            await tier.aclose()
            assert held() == before, f"{failures} threads"
        else:
            break
    assert failures > 2, "no thread that the tier needs was ever missing"
    assert said == {f"the tier in {tmp_path}/tier cannot be opened: can't start new thread"}
    threads.left = 100
    assert await put(tier, [key_of(1)], 4096) == [WriteOutcome.OK]
    await tier.aclose()


async def test_a_tier_without_threads_can_be_reopened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium of the tier failed, and then opening it fails once more, for a reason other than
    the disk."""
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)
    async with opened(tmp_path) as disk:
        disk.unplug()
        await disk.fails()
        disk.plug()
        threads = Scarce(monkeypatch)
        failures = 0
        while disk.tier.stats()["reopenings"] == 0:
            assert failures < 100, "the tier was never opened again"
            threads.left = failures
            try:
                await assert_holds(disk.tier, KEYS, SIZE)
            except TierIoError:
                failures += 1
        assert failures > 10
        threads.left = 1000
        await assert_holds(disk.tier, KEYS, SIZE)


class Source:
    """A store of other engines, or a client of a store, that only counts how often it is open."""

    def __init__(self, *_settings: object, **_options: object) -> None:
        Source.opened += 1

    opened = 0

    def look(self) -> None:
        """Connects to nothing."""

    def close(self) -> None:
        Source.opened -= 1


@pytest.mark.parametrize("kind", ["remote", "mooncake"])
async def test_the_client_of_a_store_is_closed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """For tiers over other engines' stores, it is the client that must not stay open."""
    monkeypatch.setattr(mooncake_tier, "MooncakeClient", Source)
    before = held()
    threads = Scarce(monkeypatch)
    for failures in itertools.count():
        tier: Tier = RemoteReadOnlyTier(Source)
        if kind == "mooncake":
            tier = MooncakeTier(MooncakeSettings("localhost:1", "P2PHANDSHAKE"), threads=2)
        threads.left = failures
        opening = asyncio.gather(tier.open(), return_exceptions=True)
        [found] = await opening
        threads.left = 1000
        await tier.aclose()
        assert (Source.opened, held()) == (0, before), f"{failures} threads"
        if isinstance(found, TierInfo):
            break
        assert str(found) == "can't start new thread"
    assert failures > 2


async def test_an_index_that_cannot_be_read_once_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(index: SharedIndex) -> object:
        if threading.current_thread().name.startswith("tier-lookup"):
            raise lmdb.Error("planted")
        return real(index)

    real = SharedIndex.state
    monkeypatch.setattr(SharedIndex, "state", state)
    before = held()
    tier = MAKERS["shared lmdb"](tmp_path / "tier")
    with pytest.raises(TierIoError, match="planted"):
        await tier.open()
    assert held() == before
    monkeypatch.undo()
    await tier.open()
    await tier.aclose()


@pytest.mark.parametrize("kind", ["lmdb", "shared lmdb"])
@pytest.mark.parametrize("is_new", [True, False])
async def test_an_index_that_does_not_fit_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_new: bool
) -> None:
    """The disk fills up while the index is being allocated, and keeps the blocks allocated until
    then."""
    path = tmp_path / "tier"
    if not is_new:
        tier = MAKERS[kind](path)
        await tier.open()
        await put(tier, [key_of(1)], 4096)
        await tier.aclose()
    before = {file.name: file.stat().st_size for file in path.glob("data.mdb")}
    make = {"lmdb": LmdbTier, "shared lmdb": SharedLmdbTier}[kind]
    large: Tier = make(path, 256 << 20, **SIZES)
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            real(fd, offset, min(length, 1 << 20))
            raise OSError(errno.ENOSPC, "planted")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(TierIoError, match="planted"):
        await large.open()
    monkeypatch.undo()
    assert {file.name: file.stat().st_size for file in path.glob("data.mdb")} == before
    tier = MAKERS[kind](path)
    info = await tier.open()
    assert info.record_count == (not is_new)
    assert tier.stats()["quarantined"] == 0
    await tier.aclose()
