"""Queries this machine's memory, and places memory on a NUMA node.

The functions here read /proc and /sys, and report "unknown" if these have no information.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}  # asm/unistd_64.h, asm-generic/unistd.h

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def available_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how much memory this process can allocate without swapping: the machine's
    ``MemAvailable`` or what its control groups have left, whichever is less. ``None`` if both are
    unknown."""
    limits = [_meminfo_available(proc / "meminfo"), *_cgroup_free(proc / "self/cgroup", cgroups)]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def _meminfo_available(meminfo: Path) -> int | None:
    """``MemAvailable`` of /proc/meminfo (proc(5)), in bytes."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_free(membership: Path, cgroups: Path) -> list[int | None]:
    """Return the free memory of each version-2 control group above this process: ``memory.max``
    less ``memory.current``, with reclaimable file pages counted as free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    folder = cgroups / path.lstrip("/")
    folders = [folder, *folder.parents]
    return [_group_free(one) for one in folders if one.is_relative_to(cgroups)]


def _group_free(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    reclaimable = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, int(limit) - current + reclaimable)


def node_count(nodes: Path = NODES) -> int:
    """Return the number of NUMA nodes that have memory; 1 if the machine does not report it."""
    try:
        return max(1, len(parse_id_list((nodes / "has_memory").read_text())))
    except (OSError, ValueError):
        return 1


def pci_node(bus_id: str, devices: Path = PCI_DEVICES) -> int | None:
    """Return the NUMA node of a PCI device (``0000:65:00.0``); ``None`` if unknown, which the
    kernel reports as -1."""
    try:
        node = int((devices / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_id_list(text: str) -> list[int]:
    """Parse the kernel's list format: ``0-2,5`` is 0, 1, 2, 5."""
    ids: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return ids


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Request that missing pages of ``[address, address + nbytes)`` come from ``node`` (mbind(2),
    MPOL_PREFERRED: from another node when that one is full). Returns True if that worked. Without
    placement the machine is only slower, so a failure is logged as a warning."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        logger.warning("kvtiers: NUMA placement is not supported on %s", platform.machine())
        return False
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << (node % 64)
    bits = len(words) * 64 + 1  # the kernel reads maxnode - 1 bits
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    name = errno.errorcode.get(code, str(code))
    logger.warning(
        "kvtiers: memory could not be placed on NUMA node %d: %s",
        node,
        f"{name} ({os.strerror(code)})",
    )
    return False
