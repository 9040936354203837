"""Several servers use one path: folders, claims, capacities, and the command line."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import NamespaceError, TierUnavailableError
from offload.namespaces import claims, wait_for_owners
from offload.namespaces.claims import live_owners
from offload.namespaces.cleanup import remove_namespace
from offload.namespaces.epoch_file import EPOCH_NAME, bump_epoch
from offload.namespaces.folders import replica_folder
from offload.namespaces.inventory import find_namespaces
from offload.namespaces.manifest import MANIFEST_NAME
from offload.worker import tier_factory
from offload.worker.tier_factory import make_tier
from tests.offload.cli.rank_folders import kvtiers
from tests.offload.worker.reopening_child import KEYS, NAMESPACE, places
from tests.offload.worker.test_tier_folders import release, renew
from tests.tiers.shared.child import RANGE
from tests.tiers.shared.processes import Child, children, watch
from tiers.adapters.reopening import SharedReopeningTier
from tiers.base import ReadOutcome, SharedTier, Tier, TierIoError, WriteOutcome
from tiers.files.shared_tier import SharedFileTier
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import assert_holds, assert_misses, key_of, put

SIZE = 20_000
KINDS = {"lmdb": SharedLmdbTier, "file": SharedFileTier}


@pytest.mark.parametrize("kind", KINDS)
def test_servers_share_a_folder_and_exclude_others(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_for_owners, "OWNERS_WAIT_S", 0.0)
    path = tmp_path / "tier"
    [one] = places(path, type=kind, shared=True).specs()
    [two] = places(path, type=kind, shared=True).specs()
    assert one.folder == two.folder
    assert one.capacity_bytes == two.capacity_bytes
    assert [owner.is_sharing for owner in live_owners(path)] == [True, True]
    with pytest.raises(TierUnavailableError, match='Give this server "shared": true'):
        places(path, type=kind).specs()
    assert not remove_namespace(path, NAMESPACE.name)
    release(one)
    assert not remove_namespace(path, NAMESPACE.name)
    release(two)
    [alone] = places(path, type=kind).specs()
    with pytest.raises(TierUnavailableError, match="which does not share it"):
        places(path, type=kind, shared=True).specs()
    release(alone)
    assert remove_namespace(path, NAMESPACE.name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_option_reaches_the_tier(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def make(*place: Any, **options: Any) -> SharedTier:
        made.append(options)
        return KINDS[kind](*place, **options)

    monkeypatch.setattr(tier_factory, KINDS[kind].__name__, make)
    [spec] = places(tmp_path / "tier", type=kind, shared=True, low_watermark=0.5).specs()
    tier = make_tier(spec, 4096)
    assert isinstance(tier, SharedReopeningTier)
    [options] = made
    assert kind == "file" or options["low_watermark"] == 0.5
    release(spec)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reopened_tier_keeps_its_weights(tmp_path: Path, kind: str) -> None:
    """Before a reset and after a restart, its records are those of the model's files; after a
    reset, they belong to this engine alone."""
    [spec] = places(tmp_path / "tier", type=kind, shared=True).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    assert await put(tier, [key_of(1)], SIZE) == [WriteOutcome.OK]
    await tier.aclose()
    for epoch, is_there in ((4711, False), (0, True)):
        spec = renew(spec, epoch)
        tier = make_tier(spec, 4096)
        await tier.open()
        assert await tier.present([key_of(1)]) == [is_there]
        await tier.aclose()
    release(spec)


async def served(path: Path, numbers: Sequence[int], **options: Any) -> set[int]:
    """A server starts, stores these records, and ends. Returns those of ``KEYS`` that it found."""
    [spec] = places(path, **options).specs()
    tier = make_tier(spec, 4096)
    try:
        await tier.open()
        found = {n for n, key in enumerate(KEYS) if await holds(tier, key)}
        await put(tier, [KEYS[n] for n in numbers], SIZE)
        await tier.aclose()
    finally:
        release(spec)
    return found


async def holds(tier: Tier, key: bytes) -> bool:
    """True if the tier can read this record, which is then right."""
    into = np.empty(SIZE, np.uint8)
    return await tier.read([key], [into]) == [ReadOutcome.OK]


def begin_reset(path: Path) -> None:
    """A server that does not share the folder is killed after its reset has begun an epoch, and
    before its tier has begun it."""
    bump_epoch(replica_folder(path, NAMESPACE))


@pytest.mark.parametrize("before", ["alone", "shared", "restarted"])
async def test_records_from_before_an_unfinished_reset_are_not_shared(
    tmp_path: Path, before: str
) -> None:
    """They may be of the new weights, which are in no file. The folder may have been shared before,
    or another server may have been killed before it opened the tier."""
    path = tmp_path / "tier"
    if before == "shared":
        await served(path, [0], shared=True)
        assert await served(path, [1]) == {0}
    else:
        await served(path, [0, 1])
    begin_reset(path)
    if before == "restarted":
        release(*places(path).specs())
    assert await served(path, [2], shared=True) == set()
    assert await served(path, [3], shared=True) == {2}, "what engines share is dropped once"


async def test_what_live_engines_adopted_from_before_an_unfinished_reset_is_dropped(
    tmp_path: Path,
) -> None:
    """Engines of an earlier version did not compare the epochs. They go on with those that join,
    under a new common epoch, which is begun once."""
    path = tmp_path / "tier"
    await served(path, [0])
    [spec] = places(path, shared=True).specs()  # the earlier version
    tier = make_tier(spec, 4096)
    await tier.open()
    assert await holds(tier, KEYS[0])
    for _ in range(2):  # they were first, but the earlier version leaves the same index
        begin_reset(path)
    assert await served_by_another_process(path, 1) == "[]"
    assert not await holds(tier, KEYS[0])
    assert await holds(tier, KEYS[1]), "both engines are under the common epoch"
    await put(tier, [KEYS[2]], SIZE)
    assert await served_by_another_process(path, 3) == "[1, 2]"
    await tier.aclose()
    release(spec)
    assert await served(path, [], shared=True) == {1, 2, 3}


async def served_by_another_process(path: Path, number: int) -> str:
    """The sorted result of ``served`` there: LMDB opens an index once per process."""
    code = (
        "import asyncio, sys; from pathlib import Path; from tests.offload.worker."
        "test_shared_tier_folders import served; print(sorted(asyncio.run("
        "served(Path(sys.argv[1]), [int(sys.argv[2])], shared=True))))"
    )
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, path, str(number)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return out.decode().strip()


async def test_files_from_before_an_unfinished_reset_are_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    await served(path, [0], type="file")
    begin_reset(path)
    for _ in range(2):
        with pytest.raises(TierIoError, match="not shared and that was reset"):
            await served(path, [1], type="file", shared=True)
    shutil.rmtree(replica_folder(path, NAMESPACE) / "rank-0")
    assert await served(path, [1], type="file", shared=True) == set()
    assert await served(path, [], type="file", shared=True) == {1}


async def test_files_that_an_earlier_version_shares_after_such_a_reset_are_refused(
    tmp_path: Path,
) -> None:
    """It did not compare the epochs, so it has marked the folder and uses its records."""
    path = tmp_path / "tier"
    await served(path, [0], type="file")
    assert await served(path, [1], type="file", shared=True) == {0}
    begin_reset(path)  # it was first, but the earlier version leaves the same files
    for _ in range(2):
        with pytest.raises(TierIoError, match="not shared and that was reset"):
            await served(path, [2], type="file", shared=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_records_beside_a_damaged_epoch_are_not_shared(tmp_path: Path, kind: str) -> None:
    """A power cut in the middle of a reset can leave a damaged epoch file."""
    path = tmp_path / "tier"
    await served(path, [0], type=kind)
    (replica_folder(path, NAMESPACE) / EPOCH_NAME).write_bytes(b"")
    if kind == "lmdb":
        with pytest.raises(NamespaceError, match="is damaged"):
            places(path, type=kind, shared=True, recovery="strict").specs()
    assert await served(path, [1], type=kind, shared=True) == set()
    assert await served(path, [], type=kind, shared=True) == {1}


@asynccontextmanager
async def live_engine(path: Path, kind: str) -> AsyncIterator[Path]:
    """An engine that shares the folder, has stored the first record, and still has it at the end.
    Yields the folder."""
    [spec] = places(path, type=kind, shared=True).specs()
    tier = make_tier(spec, 4096)
    try:
        await tier.open()
        await put(tier, [KEYS[0]], SIZE)
        yield spec.folder
        assert await holds(tier, KEYS[0])
        await tier.aclose()
    finally:
        release(spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [b"", b"1 0123456789abcdef\n"])
async def test_a_damaged_epoch_moves_no_folder_of_a_live_engine(
    tmp_path: Path, kind: str, damage: bytes
) -> None:
    """Earlier versions started beside such a file. The folder of their engines stays where it is
    until the last one has ended."""
    path = tmp_path / "tier"
    async with live_engine(path, kind) as folder:
        inode = folder.stat().st_ino
        (folder.parent / EPOCH_NAME).write_bytes(damage)
        [joins] = places(path, type=kind, shared=True).specs()
        assert (joins.folder.stat().st_ino, joins.noted_epoch, joins.set_aside) == (inode, 0, 0)
        release(joins)
    assert await served(path, [1], type=kind, shared=True) == set()
    assert await served(path, [], type=kind, shared=True) == {1}


MANIFESTS: dict[str, bytes | None] = {"garbled": b"{", "empty": b"", "missing": None}


def damage_manifest(namespace: Path, content: bytes | None) -> None:
    path = namespace / MANIFEST_NAME
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("manifest", MANIFESTS)
async def test_engines_join_others_beside_a_damaged_manifest(
    tmp_path: Path, kind: str, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folder stays where it is until the last one has ended."""
    monkeypatch.setattr(wait_for_owners, "OWNERS_WAIT_S", 0.0)
    path = tmp_path / "tier"
    async with live_engine(path, kind) as folder:
        inode = folder.stat().st_ino
        damage_manifest(folder.parent.parent, MANIFESTS[manifest])
        [joins] = places(path, type=kind, shared=True).specs()
        assert (joins.folder.stat().st_ino, joins.set_aside) == (inode, 0)
        release(joins)
        if kind == "lmdb":
            with pytest.raises(TierUnavailableError, match=r"cannot be trusted .* in use by pid"):
                places(path, type=kind, shared=True, recovery="strict").specs()
    assert await served(path, [1], type=kind, shared=True) == set()
    assert await served(path, [], type=kind, shared=True) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [MANIFEST_NAME, EPOCH_NAME])
async def test_a_server_alone_moves_no_folder_that_others_share(
    tmp_path: Path, kind: str, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_for_owners, "OWNERS_WAIT_S", 0.0)
    path = tmp_path / "tier"
    async with live_engine(path, kind) as folder:
        inode = folder.stat().st_ino
        [file] = path.rglob(damaged) if damaged == MANIFEST_NAME else [folder.parent / damaged]
        file.write_bytes(b"{")
        refused = pytest.raises(TierUnavailableError, match=r"cannot be trusted .* in use by pid")
        with refused as caught:
            places(path, type=kind).specs()
        assert str(file) in str(caught.value)
        assert folder.stat().st_ino == inode
        assert file.read_bytes() == b"{"
    [alone] = places(path, type=kind).specs()
    assert (alone.set_aside, alone.folder) == (1, folder)
    assert alone.folder.stat().st_ino != inode
    release(alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        (EPOCH_NAME, errno.ESTALE),
        *((MANIFEST_NAME, one) for one in (errno.ESTALE, errno.EIO, errno.EACCES, errno.ELOOP)),
    ],
)
async def test_a_file_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, kind: str, call: str, name: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment, say, the file server does not know the file's handle."""
    path, real = tmp_path / "tier", getattr(os, call)

    def failing(file: Any, *arguments: Any, **options: Any) -> Any:
        found = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if Path(found).name == name and not Path(found).parent.name.startswith("rank-"):
            raise OSError(error, os.strerror(error))
        return real(file, *arguments, **options)

    def refused() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            for shared in (True, False):
                text = f"{path}/.*{name} cannot be read: {os.strerror(error)}"
                with pytest.raises(TierUnavailableError, match=text):
                    places(path, type=kind, shared=shared).specs()

    async with live_engine(path, kind) as folder:
        inode = folder.stat().st_ino
        refused()
        assert folder.stat().st_ino == inode
    refused()
    assert await served(path, [1], type=kind, shared=True) == {0}


def test_a_file_system_without_locks_can_only_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_fd: int, _kind: int) -> None:
        raise OSError(errno.ENOSYS, "not here")

    path = tmp_path / "tier"
    monkeypatch.setattr(claims.fcntl, "flock", flock)
    [spec] = places(path, type="file", shared=True).specs()
    assert live_owners(path) == []
    make_tier(spec, 4096)
    release(spec)
    with pytest.raises(OSError, match="not here"):
        places(path, type="file").specs()


def test_replicas_share_and_capacity_is_divided_among_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    server = replace(places(path, shared=True), shares=4, ranks=2)
    [first] = server.specs()
    [other] = replace(server, replica=1).specs()
    assert first.folder == other.folder
    assert 31 << 20 < first.capacity_bytes < 32 << 20, "half of 64 MiB, not a quarter"
    release(first)
    release(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_reads_a_live_store(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tier"
    arguments = (64 << 20, SIZE)
    with children(
        Child(kind, folder, 0, *arguments, 30, "none"),
        Child(kind, folder, 1, *arguments, 30, "none"),
    ) as group:
        for child in group:
            child.go_on()  # no process is killed here: the second half may begin at once
        watch(group, lambda: all(child.said(".") for child in group), lambda: None)
        [home] = find_namespaces(folder)
        [rank_folder] = home.rank_folders
        pids = {child.process.pid for child in group}
        if kind == "lmdb":  # a server's claims are beside the folder; here there is no server
            assert {owner.pid for owner in rank_folder.members()} == pids
            assert {owner.pid for owner in home.owners()} == pids
        shown = kvtiers("inspect", folder, "--json")
        assert shown.code == 0, shown.err
        assert '"records": 60' in shown.out
        assert kvtiers("verify", folder).code == 0
        for child in group:
            child.leave()
    if kind == "lmdb":
        with (folder / "payload.data").open("r+b") as file:
            file.seek(4096 + 99)
            file.write(b"rot")
    else:
        os.truncate(min((folder / "epoch-0").iterdir()), 9000)
    assert kvtiers("verify", folder).code == 1
    asyncio.run(look_again(kind, folder))


async def look_again(kind: str, folder: Path) -> None:
    """A damaged record that the command line removed is gone for all sharers, and its space is
    free."""
    tier = KINDS[kind](folder, 64 << 20)
    info = await tier.open()
    assert info.record_count == 59
    keys = [key_of(n) for n in (*range(30), *range(RANGE, RANGE + 30))]
    there = await tier.present(keys)
    assert there.count(False) == 1
    await assert_holds(tier, [key for key, good in zip(keys, there, strict=True) if good], SIZE)
    await assert_misses(tier, [keys[there.index(False)]], SIZE)
    if isinstance(tier, SharedLmdbTier):
        tier.check()
    await tier.aclose()
