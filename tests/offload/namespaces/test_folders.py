"""Folders of namespaces: opening, epoch files, claims, moving aside, and freeing space. Uses real
processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.errors import NamespaceError, TierUnavailableError
from offload.namespaces import claims
from offload.namespaces.claims import live_owners
from offload.namespaces.cleanup import (
    describe_nearest_namespace,
    make_space,
    other_namespaces,
    remove_namespace,
)
from offload.namespaces.epoch_file import EPOCH_NAME, bump_epoch, read_epoch
from offload.namespaces.folders import (
    ClaimedFolder,
    OnDamage,
    claim_rank_folder,
    open_namespace,
    replica_folder,
)
from offload.namespaces.manifest import MANIFEST_NAME, Namespace, read_manifest
from tests.patience import PATIENCE_S
from tiers.folders.folder import OwnerLock

ONE = Namespace.of({"model": "a", "tp": 1})
TWO = Namespace.of({"model": "a", "tp": 2})
THREE = Namespace.of({"model": "b", "tp": 2, "dtype": "bf16"})


def claim(root: Path, namespace: Namespace = ONE, rank: int = 0, notes: list[str] | None = None):
    on_damage = OnDamage(notes.append if notes is not None else print)
    return claim_rank_folder(
        root, namespace, replica=0, rank=rank, engine="test", on_damage=on_damage
    )


@contextmanager
def child(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that prints a line when it is ready and then waits until it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


HOLD = """
import sys
from offload.namespaces.manifest import Namespace
from offload.namespaces.folders import claim_rank_folder
fields = {"model": "a", "tp": int(sys.argv[2])}
claimed = claim_rank_folder(sys.argv[1], Namespace.of(fields), replica=0, rank=0, engine="other")
print("ready", flush=True)
sys.stdin.read()
"""


def test_opening_makes_private_folders_and_reopening_keeps_content(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "kv"
    with claim(root) as claimed:
        (claimed.folder / "data").write_bytes(b"x")
        assert claimed.epoch == 0
    with claim(root) as claimed:
        assert (claimed.folder / "data").read_bytes() == b"x"
    assert claimed.folder == root / ONE.name / "replica-0" / "rank-0"
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in folders)
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "data"]
    assert len(files) == 4
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_ranks_and_replicas_have_separate_folders(tmp_path: Path) -> None:
    with claim(tmp_path, rank=0) as a, claim(tmp_path, rank=1) as b:
        other = claim_rank_folder(tmp_path, ONE, replica=1, rank=0, engine="test")
        with other as c:
            assert len({a.folder, b.folder, c.folder}) == 3


def test_epochs_only_grow_and_survive(tmp_path: Path) -> None:
    with claim(tmp_path):
        replica = replica_folder(tmp_path, ONE)
        assert read_epoch(replica) == 0
        assert [bump_epoch(replica) for _ in range(3)] == [1, 3, 5]
    with claim(tmp_path) as claimed:
        assert claimed.epoch == 5
    with claim(tmp_path, TWO) as claimed:
        assert claimed.epoch == 0


def test_a_starting_server_does_not_use_records_of_changed_weights(tmp_path: Path) -> None:
    """A running server received other weights; the next start has those of the files again."""

    def start(rank: int = 0) -> ClaimedFolder:
        return claim_rank_folder(tmp_path, ONE, replica=0, rank=rank, engine="test", starts=True)

    with start() as claimed:
        assert claimed.epoch == 0
    with start() as claimed:
        assert claimed.epoch == 0, "the weights have not changed, so everything must be kept"
        assert bump_epoch(replica_folder(tmp_path, ONE)) == 1
    with start() as claimed, start(rank=1) as other:
        assert (claimed.epoch, other.epoch) == (2, 2), "all ranks must begin the same epoch"
        assert bump_epoch(replica_folder(tmp_path, ONE)) == 3
        with claim(tmp_path, rank=2) as renewed:
            assert renewed.epoch == 3, "this must not count as a start"
    with start() as claimed:
        assert claimed.epoch == 4
    with start() as claimed:
        assert claimed.epoch == 4


def test_a_bump_is_durable_before_it_returns(tmp_path: Path) -> None:
    """After kill -9 right after the call returned, the returned epoch is on the disk."""
    code = """
import sys
from offload.namespaces.epoch_file import bump_epoch
while True:
    print(bump_epoch(sys.argv[1]), flush=True)
"""
    with claim(tmp_path):
        replica = replica_folder(tmp_path, ONE)
    for _ in range(5):
        with child(code, str(replica)) as process:
            assert process.stdout is not None
            for _ in range(3):
                answered = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        assert read_epoch(replica) >= max([answered, *map(int, rest)])
    with claim(tmp_path) as claimed:
        assert claimed.epoch == read_epoch(replica)


def test_two_concurrent_bumps_never_return_the_same_epoch(tmp_path: Path) -> None:
    code = """
import sys
from offload.namespaces import claims
from offload.namespaces.epoch_file import bump_epoch
claims.LOCK_WAIT_S = float(sys.argv[2])
print(*[bump_epoch(sys.argv[1]) for _ in range(20)])
"""
    with claim(tmp_path):
        replica = replica_folder(tmp_path, ONE)
    args = [sys.executable, "-c", code, str(replica), str(PATIENCE_S)]
    processes = [subprocess.Popen(args, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    epochs = [int(word) for p in processes for word in p.communicate()[0].split()]
    assert sorted(epochs) == list(range(1, 81, 2))


def test_a_claim_names_its_owner_and_ends_with_kill_9(tmp_path: Path) -> None:
    with child(HOLD, str(tmp_path), "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(
            TierUnavailableError, match=rf"in use by pid {process.pid} \(engine oth"
        ):
            claim(tmp_path)
        owners = live_owners(tmp_path)
        assert [(owner.pid, owner.engine) for owner in owners] == [(process.pid, "other")]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert live_owners(tmp_path) == []
        claim(tmp_path).close()


@pytest.mark.parametrize("before", [b"", b'{"pid": 4194304999, "engine": "dead"}'])
def test_an_owner_that_has_not_written_its_name_yet_is_waited_for(
    before: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of one server start together: one finds a claim that another is just taking."""
    path = tmp_path / "rank-0.claim"
    path.write_bytes(before)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    claim = f'{{"pid": {os.getpid()}, "engine": "mine"}}'
    monkeypatch.setattr(claims.time, "sleep", lambda _: path.write_text(claim))
    assert [owner.pid for owner in live_owners(tmp_path)] == [os.getpid()]
    os.close(fd)


def test_the_lock_of_a_tier_counts_as_a_claim(tmp_path: Path) -> None:
    with claim(tmp_path) as claimed:
        folder = claimed.folder
    lock = OwnerLock(folder)
    assert [owner.pid for owner in live_owners(tmp_path)] == [os.getpid()]
    assert remove_namespace(tmp_path, ONE.name) is False
    lock.release()
    assert live_owners(tmp_path) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 50_000, "missing", "other", "pipe"])
def test_a_folder_that_cannot_be_trusted_is_moved_aside(damage: object, tmp_path: Path) -> None:
    with claim(tmp_path) as claimed:
        (claimed.folder / "data").write_bytes(b"old")
    manifest = tmp_path / ONE.name / MANIFEST_NAME
    if isinstance(damage, bytes):
        manifest.write_bytes(damage)
    else:
        manifest.unlink()
    if damage == "other":
        open_namespace(tmp_path, TWO)
        os.rename(tmp_path / TWO.name / MANIFEST_NAME, manifest)
    if damage == "pipe":
        os.mkfifo(manifest)
    notes: list[str] = []
    with claim(tmp_path, notes=notes) as claimed:
        assert list(claimed.folder.iterdir()) == []
    assert len(notes) == 1
    assert "starting empty" in notes[0]
    assert read_manifest(tmp_path / ONE.name) == ONE
    (aside,) = tmp_path.glob("quarantine-*")
    assert (aside / "replica-0" / "rank-0" / "data").read_bytes() == b"old"
    assert [stored.name for stored in other_namespaces(tmp_path, ONE)].count(aside.name) == 1


@pytest.mark.parametrize("call", ["lstat", "listdir"])
def test_a_folder_that_cannot_be_examined_is_left_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path).close()
    folder = tmp_path / ONE.name
    (folder / MANIFEST_NAME).unlink()  # so that the folder's content decides
    inode, real = folder.stat().st_ino, getattr(os, call)

    def failing(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(TierUnavailableError, match=f"{folder} cannot be read: Input/output"):
            claim(tmp_path)
    assert folder.stat().st_ino == inode


@pytest.mark.parametrize("damage", [b"", b"7\n", b"7 0123456789abcdef\n", None])
def test_a_damaged_epoch_moves_the_records_below_it_aside(
    damage: bytes | None, tmp_path: Path
) -> None:
    with claim(tmp_path) as claimed:
        bump_epoch(replica_folder(tmp_path, ONE))
        (claimed.folder / "data").write_bytes(b"old")
    epoch = replica_folder(tmp_path, ONE) / EPOCH_NAME
    if damage is None:
        epoch.unlink()
    else:
        epoch.write_bytes(damage)
        with pytest.raises(NamespaceError, match="damaged"):
            read_epoch(epoch.parent)
    notes: list[str] = []
    with claim(tmp_path, notes=notes) as claimed:
        assert list(claimed.folder.iterdir()) == []
        assert claimed.epoch == 0
    assert len(notes) == 1


def test_a_flipped_bit_in_the_epoch_never_revives_an_older_one(tmp_path: Path) -> None:
    with claim(tmp_path):
        replica = replica_folder(tmp_path, ONE)
        for _ in range(7):
            bump_epoch(replica)
    whole = (replica / EPOCH_NAME).read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (replica / EPOCH_NAME).write_bytes(damaged)
        with pytest.raises(NamespaceError):
            read_epoch(replica)


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = open_namespace(tmp_path, ONE)
    (folder / MANIFEST_NAME).write_bytes(b'{"format": 2}')
    with pytest.raises(NamespaceError, match="newer"):
        open_namespace(tmp_path, ONE)
    assert (folder / MANIFEST_NAME).read_bytes() == b'{"format": 2}'


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = open_namespace(tmp_path / "outside", ONE)
    (outside / "precious").write_bytes(b"x" * 10_000)
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    (root / ONE.name).symlink_to(outside)
    (root / TWO.name).symlink_to(outside)
    with claim(root):
        assert not (root / ONE.name).is_symlink()
    assert other_namespaces(root, ONE) == []
    make_space(root, ONE, 1, others_share=0)
    assert (outside / "precious").read_bytes() == b"x" * 10_000
    assert {path.name for path in outside.iterdir()} == {"precious", MANIFEST_NAME}


@pytest.mark.parametrize("thing", ["link", "pipe", "folder"])
def test_a_lock_that_is_not_a_file_is_refused_without_waiting(thing: str, tmp_path: Path) -> None:
    lock = tmp_path / claims.LOCK_NAME
    if thing == "link":
        (tmp_path / "file").touch()
        lock.symlink_to(tmp_path / "file")
    elif thing == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises((NamespaceError, TierUnavailableError)):
        open_namespace(tmp_path, ONE)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(TierUnavailableError, match="chmod 700"):
        open_namespace(tmp_path, ONE)


def test_waiting_for_the_lock_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LOCK_WAIT_S", 0.05)
    with (
        claims.locked(tmp_path),
        pytest.raises(TierUnavailableError, match="locked by another"),
        claims.locked(tmp_path),
    ):
        pass


def test_other_namespaces_report_which_field_differs_with_both_values(tmp_path: Path) -> None:
    assert describe_nearest_namespace(tmp_path, ONE) == []
    open_namespace(tmp_path, TWO)
    open_namespace(tmp_path, THREE)
    (tmp_path / ("0" * 32)).mkdir()
    (tmp_path / ("1" * 32)).mkdir()
    (tmp_path / ("1" * 32) / MANIFEST_NAME).write_bytes(b"junk")
    assert describe_nearest_namespace(tmp_path, ONE) == [
        f"stored blocks of namespace {TWO.name} are not used, because tp differs: 2 stored, 1 now"
    ]


def _fill(root: Path, namespace: Namespace, size: int, used: float) -> None:
    with claim(root, namespace) as claimed:
        (claimed.folder / "data").write_bytes(os.urandom(size))  # which no file system compresses
    for path in [root / namespace.name, *(root / namespace.name).rglob("*")]:
        os.utime(path, (used, used))


@pytest.mark.parametrize(("old", "new"), [(TWO, THREE), (THREE, TWO)])
def test_freeing_space_removes_the_oldest_first_and_counts_the_rest(
    old: Namespace, new: Namespace, tmp_path: Path
) -> None:
    _fill(tmp_path, new, 1 << 20, 2_000.0)
    _fill(tmp_path, old, 1 << 20, 1_000.0)
    open_namespace(tmp_path, ONE)
    assert [stored.name for stored in other_namespaces(tmp_path, ONE)] == [old.name, new.name]
    capacity = 3 << 20
    left = make_space(tmp_path, ONE, capacity)
    assert [stored.name for stored in other_namespaces(tmp_path, ONE)] == [new.name]
    assert left == capacity - other_namespaces(tmp_path, ONE)[0].size_bytes
    assert make_space(tmp_path, ONE, capacity) == left
    assert (tmp_path / ONE.name).exists()
    assert not list(tmp_path.glob(".trash-*"))


def test_a_namespace_in_use_is_never_removed(tmp_path: Path) -> None:
    with child(HOLD, str(tmp_path), "2") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        open_namespace(tmp_path, ONE)
        assert remove_namespace(tmp_path, TWO.name) is False
        left = make_space(tmp_path, ONE, 1 << 30, others_share=0)
        assert (tmp_path / TWO.name / MANIFEST_NAME).exists()
        assert 0 < left < 1 << 30
    assert make_space(tmp_path, ONE, 1 << 30, others_share=0) == 1 << 30


@pytest.mark.parametrize("name", ["..", "/etc", "", "quarantine-x", "0" * 31, "A" * 32, ".trash-0"])
def test_only_names_of_kvtiers_can_be_removed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name"):
        remove_namespace(tmp_path, name)


def test_trash_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    trash = tmp_path / ".trash-0123456789abcdef"
    trash.mkdir()
    (trash / "data").write_bytes(b"x")
    make_space(tmp_path, ONE, 1)
    assert not trash.exists()
