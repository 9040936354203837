"""Finds the memory limits of the machine and its control groups, and processes of the same server.

Linux only. Everything is read from ``/proc`` and ``/sys/fs/cgroup``; the paths are parameters so
that tests can use a copy. A file that is missing or unreadable counts as "no limit".
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The total memory that this process may use, and the source of the limit (``cgroup`` or
    ``RAM``).

    ``available_bytes`` can be allocated now without causing other memory to be swapped out.
    """

    limit_bytes: int
    available_bytes: int
    source: str


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryLimit:
    """The smallest of physical memory and the limits of every control group above this process."""
    info = _meminfo(proc)
    total = info.get("MemTotal", 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = info.get("MemAvailable", total)
    best = MemoryLimit(total, available, "RAM")
    for limit, used in _cgroup_limits(proc, cgroup):
        available = min(available, max(0, limit - used))
        if limit < best.limit_bytes:
            best = MemoryLimit(limit, available, "cgroup")
    return MemoryLimit(best.limit_bytes, available, best.source)


def is_relative(pid: int, proc: Path = PROC) -> bool:
    """Return True if ``pid`` is this process or one of its ancestors, descendants or siblings (the
    ranks of one server are siblings). Valid only for processes of a server, because all programs
    that a user starts in one shell are siblings, too."""
    parent = _parent(os.getpid(), proc)
    if parent > 1 and parent == _parent(pid, proc):
        return True
    return pid in _ancestors(os.getpid(), proc) or os.getpid() in _ancestors(pid, proc)


def _ancestors(pid: int, proc: Path) -> set[int]:
    """``pid`` and its parents up to the first process."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = _parent(pid, proc)
    return found


def _parent(pid: int, proc: Path) -> int:
    """The parent of a process, or 0 if it has none or has ended; format: proc_pid_stat(5)."""
    # The command is in parentheses and may contain any character: count from its end.
    fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _meminfo(proc: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes (the file says kB and means 1,024)."""
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in pairs}


def _cgroup_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable page cache) of each control group up to the root."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            names = (cgroup, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = (
                cgroup / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        found += _limits_upwards(*names, inside)
    return found


def _limits_upwards(
    root: Path, limit_file: str, used_file: str, cache_field: str, inside: str
) -> list[tuple[int, int]]:
    found = []
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        limit = _number(_read(folder / limit_file))
        if limit is None or limit >= _UNLIMITED:
            continue
        cache = re.search(rf"^{cache_field} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        used = (_number(_read(folder / used_file)) or 0) - (int(cache[1]) if cache else 0)
        found.append((limit, max(0, used)))
    return found


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
