"""A file that a process locks: its forked children have no copy, and closing it unlocks it although
other copies exist. Each test fails without exactly one of the two."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import FORKS
from tiers.folders.folder import try_flock
from tiers.folders.lock_file import LockFile


def locked(path: Path) -> LockFile:
    file = LockFile(path)
    assert try_flock(file.fd, fcntl.LOCK_EX)
    return file


def is_locked(path: Path) -> bool:
    file = LockFile(path, creates=False)
    try:
        return not try_flock(file.fd, fcntl.LOCK_SH)
    finally:
        file.close()


def true_in_child(fork: str, check: Callable[[], bool]) -> bool:
    child = FORKS[fork]()
    if not child:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_child_has_no_copy(tmp_path: Path) -> None:
    file = locked(tmp_path / "lock")
    fd = file.fd
    assert true_in_child("python", lambda: file.fd == -1 and not is_open(fd))
    assert is_locked(tmp_path / "lock")
    file.close()


def test_a_child_has_no_copy_of_a_file_to_which_nothing_refers(tmp_path: Path) -> None:
    fd = locked(tmp_path / "lock").fd
    gc.collect()
    assert true_in_child("python", lambda: not is_open(fd))
    assert is_locked(tmp_path / "lock"), "it stays locked as long as the process lives"
    os.close(fd)


def test_closing_unlocks_although_a_copy_is_open(tmp_path: Path) -> None:
    """A child of a library's fork keeps such a copy, and any child until it begins a program."""
    file = locked(tmp_path / "lock")
    copy = os.dup(file.fd)
    file.close()
    assert not is_locked(tmp_path / "lock")
    os.close(copy)


@pytest.mark.parametrize("fork", FORKS)
def test_a_child_cannot_unlock_its_parents_file(tmp_path: Path, fork: str) -> None:
    file = locked(tmp_path / "lock")

    def close_twice() -> bool:
        file.close()
        file.close()
        return file.fd == -1

    assert true_in_child(fork, close_twice)
    assert is_locked(tmp_path / "lock")
    file.close()
    assert not is_locked(tmp_path / "lock")


def test_a_file_is_created_only_if_asked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LockFile(tmp_path / "lock", creates=False)
    LockFile(tmp_path / "lock").close()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
