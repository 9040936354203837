"""Claims on folders and short locks; both are ``flock`` locks of the kernel.

A claim ends with its process, for whatever reason the process ends. The claim's file stays and
names the last holder, for messages. Two other kinds of files count as claims: the tiers'
``owner.lock`` files, and the files of engines that share a folder without locks, by which these
engines show that they are alive (``tiers.files.engines``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import NamespaceError, TierUnavailableError
from tiers.files.engines import FOLDER as ENGINES
from tiers.files.engines import engine_files, machine, seen_alive
from tiers.folders.folder import LOCK_NAME as TIER_LOCK_NAME
from tiers.folders.folder import MEMBERS_MAX, try_flock
from tiers.folders.lock_file import LockFile

LOCK_NAME = ".kvtiers.lock"
LOCK_WAIT_S = 10.0
CLAIM_WAIT_S = 0.2
"""Longer than the time for which a process that only checks a claim locks it."""
OWNER_WAIT_S = 1.0
"""Longer than the time between taking a claim and writing the owner into it."""
_CLAIM = re.compile(r"rank-[0-9]+(\.sharer-[0-9]+)?\.claim", re.ASCII)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems that have no ``flock``."""
_FOLDER = re.compile(r"[0-9a-f]{32}|quarantine-[0-9a-f-]+|(replica|rank)-[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that uses a folder at present.

    ``pid`` and ``engine`` are what that process wrote about itself; ``is_sharing`` means that
    others may use the folder as well.
    """

    folder: str
    pid: int
    engine: str
    is_sharing: bool = False
    is_here: bool = True
    """False if ``pid`` is a number in another container or on another machine."""


class FolderClaimedError(TierUnavailableError):
    """Another process, which may be about to end, holds the folder. ``what`` is the message without
    the advice to stop that process."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. {fix}")
        self.what = what


def live_owners(root: str | Path) -> list[Owner]:
    """The processes that hold a claim anywhere below ``root`` at present."""
    found = []
    for claim in claims_below(Path(root)):
        owner = holder(claim)
        if owner is not None:
            found.append(owner)
    return found


@contextlib.contextmanager
def locked(folder: Path, *, may_lack_locks: bool = False) -> Iterator[None]:
    """Hold the folder's lock; raises ``TierUnavailableError`` after ``LOCK_WAIT_S``.

    With ``may_lack_locks``, nothing is locked on a file system without locks; otherwise that is an
    error.
    """
    file = _open_lock(folder / LOCK_NAME)
    try:
        if not _lock(file, LOCK_WAIT_S, may_lack_locks=may_lack_locks):
            raise TierUnavailableError(
                f"{folder} has been locked by another process for more than {LOCK_WAIT_S:g} s"
            )
        yield
    finally:
        file.close()


def _open_lock(path: Path) -> LockFile:
    """A lock file, created if necessary. Raises ``NamespaceError`` if the path is something
    else."""
    try:
        file = LockFile(path)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise NamespaceError(f"{path} is not a regular file") from None
        raise TierUnavailableError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        file.close()
        raise NamespaceError(f"{path} is not a regular file")
    return file


def _lock(file: LockFile, wait_s: float, *, may_lack_locks: bool = False) -> bool:
    """Take an exclusive lock within ``wait_s`` seconds; return whether that worked."""
    try:
        return try_flock(file.fd, fcntl.LOCK_EX, wait_s)
    except OSError as error:
        if not (may_lack_locks and error.errno in _NO_LOCKS):
            raise
        return True


def claim_shared(path: Path, engine: str) -> LockFile:
    """Claim a folder that others share, under a number chosen for this process.

    ``path`` is the claim of a process that does not share. Returns the file to close when the
    folder is no longer used. Raises ``FolderClaimedError`` if a process that does not share has the
    folder, and ``TierUnavailableError`` if too many processes share it.
    """
    owner = holder(path)
    if owner is not None:
        raise FolderClaimedError(
            f"{path.parent} is in use by pid {owner.pid} (engine {owner.engine}), which does not "
            "share it",
            'Stop that server, or give all of them "shared": true',
        )
    for number in range(MEMBERS_MAX):
        file = _open_lock(path.with_suffix(f".sharer-{number}.claim"))
        if _lock(file, 0.0, may_lack_locks=True):
            _write_owner(file.fd, engine)
            return file
        file.close()
    raise TierUnavailableError(f"{path.parent} is shared by {MEMBERS_MAX} processes already")


def members(path: Path) -> list[Owner]:
    """The owners that share the folder whose claim is ``path``."""
    claims = sorted(path.parent.glob(f"{path.stem}.sharer-*.claim"))
    return [owner for one in claims if (owner := holder(one)) is not None]


def claim(path: Path, engine: str) -> LockFile:
    """Claim ``path`` for this process; return the file to close when it is no longer used.

    Raises ``FolderClaimedError`` that names the owner if another process has it.
    """
    for owner in members(path):
        raise FolderClaimedError(
            f"{path.parent} is shared by pid {owner.pid} (engine {owner.engine}) and perhaps "
            "others",
            'Give this server "shared": true as well, or another path.',
        )
    file = _open_lock(path)
    if not _lock(file, CLAIM_WAIT_S):
        owner = _read_owner(file.fd, path)
        file.close()
        raise FolderClaimedError(
            f"{path.parent} is in use by pid {owner.pid} (engine {owner.engine})",
            "Stop that server or give this one another path.",
        )
    _write_owner(file.fd, engine)
    return file


def _write_owner(fd: int, engine: str) -> None:
    os.ftruncate(fd, 0)
    owner = {"pid": os.getpid(), "engine": engine[:200], "machine": _machine()}
    os.pwrite(fd, json.dumps(owner).encode(), 0)


def _machine() -> str:
    """The id of this machine; empty if ``/proc`` does not show it."""
    try:
        return machine()
    except OSError:
        return ""


def holder(claim: Path) -> Owner | None:
    """The holder of a claim, found by trying to take the claim; ``None`` if it is free."""
    if claim.parent.name == ENGINES:
        return _engine(claim)
    try:
        file = LockFile(claim, creates=False)
    except OSError:
        return None
    try:
        # A shared lock is enough to find out. With exclusive locks, two processes that check at
        # the same time would take each other for owners.
        if not try_flock(file.fd, fcntl.LOCK_SH):
            return _settled_owner(file.fd, claim)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        file.close()
    return None


def engines(folder: Path) -> list[Owner]:
    """The live engines among those that share a tier's folder without locks."""
    return [owner for file in engine_files(folder) if (owner := _engine(file)) is not None]


def _engine(file: Path) -> Owner | None:
    seen = seen_alive(file)
    if seen is None:
        return None
    engine = "" if seen.is_here else "on another machine"
    return Owner(str(file.parent.parent), seen.pid, engine, is_sharing=True, is_here=seen.is_here)


def _settled_owner(fd: int, path: Path) -> Owner:
    """The owner of a claim that is held.

    A process that has just taken the claim may not have written its name yet, and the file may
    still have the name of an earlier owner (the ranks of a server start together). So this waits a
    moment.
    """
    deadline = time.monotonic() + OWNER_WAIT_S
    owner = _read_owner(fd, path)
    while not (owner.pid and os.path.exists(f"/proc/{owner.pid}")):
        if time.monotonic() > deadline:
            break  # e.g. in another container
        time.sleep(0.01)
        owner = _read_owner(fd, path)
    return owner


def _read_owner(fd: int, path: Path) -> Owner:
    """Read the owner's entry: a JSON object in our claims, only a pid in the tiers' locks."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        is_sharing = ".sharer-" in path.name
        if isinstance(found, int):
            return Owner(str(path.parent), found, "")
        is_here = found["machine"] == _machine() if "machine" in found else True
        return Owner(str(path.parent), int(found["pid"]), str(found["engine"]), is_sharing, is_here)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Owner(str(path.parent), 0, "")


def claims_below(root: Path, only: str | None = None) -> Iterator[Path]:
    """Every claim file below ``root``, or below its entry ``only``, held or not.

    Includes folders that were moved aside: their claims moved with them, and they may still be in
    use.
    """
    folders = [root / only if only else root]
    while folders:
        folder = folders.pop()
        if os.path.lexists(folder / TIER_LOCK_NAME):
            yield folder / TIER_LOCK_NAME
        yield from engine_files(folder)
        if folder.name.startswith("rank-"):
            continue  # this folder contains payloads, perhaps a million files
        for name in entries(folder):
            inner = folder / name
            if _CLAIM.fullmatch(name):
                yield inner
            elif _FOLDER.fullmatch(name) and inner.is_dir() and not inner.is_symlink():
                folders.append(inner)


def entries(folder: Path) -> list[str]:
    """Names in a folder, sorted; empty if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
