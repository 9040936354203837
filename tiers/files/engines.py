"""The engines that use a folder on a network file system. It uses no locks, only small files.

    engines/<engine>    its separate epoch (0 if it has none), its configured capacity in bytes, and
                        when it joined, in ns; decimal, in one line. Touched from time to time

An engine's name consists of its machine, pid, start time and a random part. An engine on this
machine is alive as long as its process exists. An engine on another machine is alive if it has
touched its file recently, by the clock of the file server. Locks are not used: some network file
systems limit them to one machine or do not have them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "engines"
TOUCH_S = 60.0
SILENT_NS = 15 * 60 * 10**9
"""An engine on another machine that has not touched its file for this long counts as dead."""
CLOCKS_NS = 15 * 60 * 10**9
"""The largest expected difference between the clocks of a machine and of the file server."""
_ENDED = ("Z", "X")
"""States of a process that has ended (proc(5)): a zombie, or dead."""
_NAME = re.compile(r"([0-9a-f]{12})-([0-9]+)-([0-9]+)-[0-9a-f]{8}", re.ASCII)


class Announced(NamedTuple):
    """The content of an engine's file. ``capacity_bytes`` and ``joined_ns`` (by the clock of the
    file server) are 0 if unknown."""

    own_epoch: int
    capacity_bytes: int = 0
    joined_ns: int = 0


def engine_name() -> str:
    """Return a new name for an engine of this process; every call returns a different one."""
    pid = os.getpid()
    return f"{machine()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"


def machine() -> str:
    """Return an id of this boot and pid namespace; pids are comparable only under the same id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    namespace = os.readlink("/proc/self/ns/pid")
    found = f"{socket.gethostname()}\n{boot}\n{namespace}"
    return hashlib.blake2b(found.encode(), digest_size=6).hexdigest()


def start_time(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 if it does not exist, or has ended
    and its parent has not noticed (some launchers, and some containers' first process, never do).
    Pid and start time together are unique. Raises ``OSError`` if the time cannot be read now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in _ENDED else int(fields[19])


class LiveEngine(NamedTuple):
    """A live engine, as seen by a process that is not an engine: its pid, on this machine or
    another."""

    pid: int
    is_here: bool


def engine_files(folder: Path) -> list[Path]:
    """Return the files of all engines of a tier's folder, alive or not."""
    try:
        names = sorted(os.listdir(folder / FOLDER))
    except OSError:
        return []
    return [folder / FOLDER / name for name in names if _NAME.fullmatch(name)]


def seen_alive(file: Path) -> LiveEngine | None:
    """Return the engine of a file if it is alive, without writing anything. Engines on other
    machines are judged by this machine's clock, so they count as alive for longer."""
    match = _NAME.fullmatch(file.name)
    if match is None:
        return None
    pid, is_here = int(match[2]), match[1] == machine()
    try:
        if is_here:
            return LiveEngine(pid, is_here) if start_time(pid) == int(match[3]) else None
        silent_ns = time.time_ns() - os.lstat(file).st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        return LiveEngine(pid, is_here)  # its state cannot be read now
    return LiveEngine(pid, is_here) if silent_ns < SILENT_NS + CLOCKS_NS else None


class FolderEngines:
    """The engines of one folder; one of them is this process. Blocks; any thread may call."""

    def __init__(self, folder_fd: int, name: str, capacity_bytes: int = 0) -> None:
        """Raises ``OSError``."""
        self.name = name
        self.announced = Announced(0, capacity_bytes)
        with contextlib.suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=folder_fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._folder_fd = folder_fd
        self._fd = os.open(FOLDER, flags, dir_fd=folder_fd)
        self._machine = machine()
        self.now_ns = 0
        """The server's clock at the last touch, in ns."""

    def are_here(self) -> bool:
        """Return False if the folder of the engines' files was removed or replaced. Raises
        ``OSError``."""
        try:
            found = os.stat(FOLDER, dir_fd=self._folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def announce(self, own_epoch: int) -> None:
        """Declare that this engine is alive, and publish its separate epoch. Raises ``OSError``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.name, flags, 0o600, dir_fd=self._fd)
        try:
            os.utime(fd)  # by the server's clock
            self.now_ns = os.fstat(fd).st_mtime_ns
            joined_ns = self.announced.joined_ns or self.now_ns
            announced = Announced(own_epoch, self.announced.capacity_bytes, joined_ns)
            text = f"{' '.join(map(str, announced))}\n".encode()
            os.write(fd, text)
            os.ftruncate(fd, len(text))
            os.utime(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.announced = announced

    def all(self) -> dict[str, bool]:
        """Return every engine that has a file, with True for each live one. Raises ``OSError``."""
        self.touch()
        names = [name for name in os.listdir(self._fd) if _NAME.fullmatch(name)]
        return {name: self.is_alive(name) for name in names}

    def touch(self) -> None:
        """Declare that this engine is still alive. Raises ``OSError``."""
        try:
            os.utime(self.name, dir_fd=self._fd, follow_symlinks=False)
            found = os.stat(self.name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            # this engine was silent for so long that others considered it dead
            self.announce(self.announced.own_epoch)
        else:
            self.now_ns = found.st_mtime_ns

    def is_alive(self, name: str) -> bool:
        """Return True if the engine of this name is alive, or if its state cannot be read now.
        Returns False for a name that is not an engine's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        try:
            if match[1] == self._machine:
                return start_time(int(match[2])) == int(match[3])
            return self.silent_ns(name) < SILENT_NS
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def silent_ns(self, name: str) -> int:
        """Return the time since an engine last touched its file. Raises ``OSError``."""
        touched = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns
        return self.now_ns - touched

    def announced_by(self, name: str) -> Announced | None:
        """Return the content of an engine's file, or ``None`` if it cannot be read now, for
        example because it is being written. ``None`` does not mean that the engine has no
        separate epoch."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
            try:
                raw = os.read(fd, 128)
            finally:
                os.close(fd)
            return Announced(*map(int, raw.split()[:3])) if raw.endswith(b"\n") else None
        except (OSError, ValueError, TypeError):
            return None

    def forget(self, name: str) -> None:
        """Remove an engine's file."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Remove this engine's file and release the folder. Idempotent."""
        if self._fd >= 0:
            self.forget(self.name)
            os.close(self._fd)
            self._fd = -1
