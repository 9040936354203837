"""Checks of a tier's folder, its lock, and how files of others are moved aside."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.folders.folder import FolderError, OwnerLock, file_system_of, prepare, quarantine

IS_ROOT = os.geteuid() == 0


def test_created_files_are_private(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(FolderError, match="symbolic link"):
        prepare(tmp_path / "link")


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give links away")
def test_a_path_through_another_users_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real" / "tier").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prepare(tmp_path / "link" / "tier")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(FolderError, match="user 12345"):
        prepare(tmp_path / "link" / "tier")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FolderError):
        prepare(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FolderError, match="chmod 700"):
        prepare(folder)


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give folders away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(FolderError, match="12345"):
        prepare(tmp_path / "theirs")


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:50 / {0}/net rw,relatime - nfs4 server:/export rw
41 22 0:51 / {0}/net/inner rw,relatime master:2 - xfs /dev/vdb rw
42 22 0:52 / {0}/with\\040space rw,relatime - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("x", "ext4"),
        ("net", "nfs4"),
        ("net/deep/er", "nfs4"),
        ("network", "ext4"),
        ("net/inner", "xfs"),
        ("with space/x", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(
    tmp_path: Path, place: str, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    lines = MOUNTS.format(tmp_path).encode() + b"9 1 0:9 / /\xff rw - ext4 /dev/z rw\n"
    mounts.write_bytes(lines)  # another mount's name is not UTF-8
    assert file_system_of(tmp_path / place, mounts) == kind


def test_an_unknown_file_system_is_not_guessed(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path / "absent") == "unknown"


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("nfs4", "fuse.sshfs", "cifs"):
        monkeypatch.setattr("tiers.folders.folder.file_system_of", lambda _folder, kind=kind: kind)
        with pytest.raises(FolderError, match=kind):
            prepare(tmp_path / "tier")
        prepare(tmp_path / "tier", allow_network=True)


def test_a_second_owner_gets_the_pid_of_the_first(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tiers.folders.folder import OwnerLock\n"
    code += "lock = OwnerLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner:
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(FolderError, match=f"process {owner.pid}"):
            OwnerLock(tmp_path)
        owner.kill()
        owner.wait()
    OwnerLock(tmp_path).release()


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    with pytest.raises(FolderError, match=f"process {os.getpid()}"):
        OwnerLock(tmp_path)
    lock.release()
    lock.release()
    OwnerLock(tmp_path).release()


def test_quarantine_renames_and_keeps_only_the_latest(tmp_path: Path) -> None:
    for content in ("old", "new"):
        (tmp_path / "data").write_text(content)
        (tmp_path / "other").write_text("stays")
        target = quarantine(tmp_path, ["data", "absent"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", target.name]
    assert (target / "data").read_text() == "new"
