"""Who uses a folder on a file system that several machines see: no locks, only small files.

    engines/<engine>    its own epoch (0 if it has none), decimal; touched from time to time

An engine's name is that of its machine, pid, start time and a random part. One of this machine is
alive while its process is; one of another machine while it has touched its file lately, by the
clock of the file server. Locks are not used: some network file systems keep them to one machine,
or do not have them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

FOLDER = "engines"
TOUCH_S = 60.0
SILENT_NS = 15 * 60 * 10**9
"""After so long without a touch an engine of another machine counts as dead."""
_NAME = re.compile(r"([0-9a-f]{12})-([0-9]+)-([0-9]+)-[0-9a-f]{8}", re.ASCII)


def engine_name() -> str:
    """Another name at each call, always of this process."""
    pid = os.getpid()
    return f"{machine()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"


def machine() -> str:
    """Within it pids are comparable: this boot of a machine, seen from one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    namespace = os.readlink("/proc/self/ns/pid")
    found = f"{socket.gethostname()}\n{boot}\n{namespace}"
    return hashlib.blake2b(found.encode(), digest_size=6).hexdigest()


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 if there is none. Together with its pid
    it is not given out twice."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


class LiveEngines:
    """The engines of one folder, one of them this process. Blocks; any thread."""

    def __init__(self, folder_fd: int, name: str) -> None:
        """Raises ``OSError``."""
        self.name = name
        with contextlib.suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=folder_fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(FOLDER, flags, dir_fd=folder_fd)
        self._machine = machine()
        self.now_ns = 0
        """The server's clock at the last touch, in ns."""

    def announce(self, own_epoch: int) -> None:
        """Say that this engine lives, and under which epoch of its own. Raises ``OSError``."""
        self._own_epoch = own_epoch
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.name, flags, 0o600, dir_fd=self._fd)
        try:
            os.write(fd, f"{own_epoch}\n".encode())
            os.ftruncate(fd, len(f"{own_epoch}\n"))
            os.utime(fd)  # by the server's clock
            os.fsync(fd)
            self.now_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def all(self) -> dict[str, bool]:
        """Every engine that has a file, and whether it is alive. Raises ``OSError``."""
        self.touch()
        names = [name for name in os.listdir(self._fd) if _NAME.fullmatch(name)]
        return {name: self.is_alive(name) for name in names}

    def touch(self) -> None:
        """Say that this engine still lives. Raises ``OSError``."""
        try:
            os.utime(self.name, dir_fd=self._fd, follow_symlinks=False)
            found = os.stat(self.name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:  # it was silent for so long that others took it for dead
            self.announce(self._own_epoch)
        else:
            self.now_ns = found.st_mtime_ns

    def is_alive(self, name: str) -> bool:
        """Whether an engine lives, as far as can be told; what has no such name does not."""
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        if match[1] == self._machine:
            return start_time(int(match[2])) == int(match[3])
        try:
            touched = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns
        except OSError:
            return False
        return self.now_ns - touched < SILENT_NS

    def own_epoch(self, name: str) -> int:
        """The epoch of its own that an engine announced; 0 if it is not known."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError:
            return 0
        try:
            return int(os.read(fd, 32))
        except (OSError, ValueError):
            return 0
        finally:
            os.close(fd)

    def forget(self, name: str) -> None:
        """Remove an engine's file."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._fd >= 0:
            self.forget(self.name)
            os.close(self._fd)
            self._fd = -1
