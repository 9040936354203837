"""The folder of a disk tier: who may use it, and what happens to files that a tier did not write.

One tier of one process owns a folder at a time. It must be a real directory (no symbolic link) of
this user that no other user can write to, on a local file system. New folders get mode 0700 and new
files 0600. Files that cannot be trusted are renamed into ``quarantine-<time>/`` beside the live
ones; they are never opened again. Only the latest quarantine is kept, because its bytes do not
count towards any capacity.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from tiers.base import TierIoError
from tiers.folders.lock_file import LockFile

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MEMBERS_MAX = 64
"""Maximum number of processes that share a folder, or a rank of a namespace."""
LOCK_NAME = "owner.lock"
LOCK_WAIT_S = 0.2
"""Time to wait for the lock, because a process that only looks up the owner holds it briefly."""
QUARANTINE_PREFIX = "quarantine-"
MODE = 0o700
NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs", "gfs2"),
        *("ocfs2", "gpfs", "beegfs", "glusterfs", "pvfs2", "orangefs", "ncpfs", "coda"),
        *("fuse", "fuseblk", "virtiofs"),
    )
)


class FolderError(TierIoError):
    """Raised if the folder cannot be used as it is. The message says why and what to do."""


class FolderInUseError(FolderError):
    """Another process holds the folder. It may be about to end. ``what`` is the message without the
    advice to stop it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Stop it, or use another folder")
        self.what = what


class FolderUnusableError(Exception):
    """Raised if the files in a tier's folder cannot be used. The message says why. A tier that
    opens the folder moves them aside or refuses to start; a command that only inspects it reports
    the message."""


def prepare(folder: Path, *, allow_network: bool = False) -> None:
    """Create the folder if necessary and check it. Raises ``FolderError``."""
    try:
        folder.mkdir(mode=MODE, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise FolderError(f"cannot create or read the folder {folder}: {error}") from error
    if stat.S_ISLNK(found.st_mode):
        raise FolderError(f"{folder} is a symbolic link. Give the folder it points to instead")
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{folder} is not a directory")
    _check_owner(folder, found)
    _check_parents(folder)
    kind = file_system_of(folder)
    if not allow_network and kind.split(".")[0] in NETWORK_FILE_SYSTEMS:
        raise FolderError(
            f"{folder} is on the network file system {kind}, where LMDB must not be used. Use a "
            "local disk, or the file tier"
        )


def _check_owner(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise FolderError(
            f"{folder} belongs to user {found.st_uid}, but this process runs as "
            f"{os.geteuid()}. Run this as user {found.st_uid}, or use a folder of this user"
        )
    if found.st_mode & 0o022:
        raise FolderError(
            f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}), who "
            f"could change what the model computes. Run: chmod 700 {folder}"
        )


def _check_parents(folder: Path) -> None:
    """Reject a path through symbolic links that a third user could redirect."""
    for parent in folder.absolute().parents:
        found = os.lstat(parent)
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise FolderError(
                f"{parent} is a symbolic link of user {found.st_uid}, who could redirect it. "
                "Give the real path"
            )


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system (``ext4``, ``nfs4``, ...), or ``unknown``."""
    path = str(folder.resolve())
    best, kind = "", "unknown"
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best) and right:
            best, kind = point, right.split()[0]
    return kind


class OwnerLock:
    """The lock of a folder's only owner: a ``flock`` on a file that contains the owner's pid.

    The kernel releases the lock when the process ends. The file stays, but then means nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ``FolderError``, or ``FolderInUseError`` that names the other owner."""
        path = folder / LOCK_NAME
        try:
            self._file = LockFile(path)
        except OSError as error:
            raise FolderError(f"cannot open the lock {path}: {error}") from error
        try:
            if not try_flock(self._file.fd, fcntl.LOCK_EX, LOCK_WAIT_S):
                raise BlockingIOError(errno.EAGAIN, "another process holds the lock")
        except OSError as error:
            owner = os.pread(self._file.fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self._file.close()
            raise FolderInUseError(f"{folder} is in use by process {owner}") from error
        with contextlib.suppress(OSError):  # the disk is full or read-only; the lock is held anyway
            os.ftruncate(self._file.fd, 0)
            os.pwrite(self._file.fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the folder. Idempotent."""
        self._file.close()


def try_flock(fd: int, kind: int, wait_s: float = 0.0) -> bool:
    """Take the ``flock`` of an open file (``kind`` is ``fcntl.LOCK_SH`` or ``LOCK_EX``). Returns
    False if others held it for ``wait_s`` seconds. Raises ``OSError`` if the file system has no
    locks."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def quarantine(folder: Path, names: Iterable[str]) -> Path:
    """Move the named files into a new quarantine folder and return it. Raises ``FolderError``."""
    try:
        for old in folder.glob(QUARANTINE_PREFIX + "*"):
            shutil.rmtree(old, ignore_errors=True)  # another process may remove it at the same time
        target = folder / f"{QUARANTINE_PREFIX}{time.time_ns()}"
        target.mkdir(mode=MODE)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / name, target / name)
    except OSError as error:
        raise FolderError(f"cannot move damaged files of {folder} aside: {error}") from error
    return target


def sync_folder(folder: Path) -> None:
    """Make created and renamed entries of the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
