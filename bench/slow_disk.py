"""A disk that the kernel slows for chosen processes, for ``bench backlog`` and ``bench replay``.

Linux's ``blkio`` controller (cgroup v1, as root) bounds the bytes per second that the processes of
a group read from a block device. Nothing else in the system is slowed, and the code that reads is
the one that users run.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/blkio")
DEVICES = Path("/sys/dev/block")
REMOVE_S = 10.0


class SlowDiskError(Exception):
    """Raised if this machine's kernel cannot slow the disk. The message says why."""


class SlowDisk:
    """Bounds the reads of the processes that are added to it; used as a context manager.

    All of them together read at most ``bytes_per_s`` from the disk that ``folder`` is on. With 0
    nothing is bounded.
    """

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        self._limit = f"{_disk_of(folder)} {bytes_per_s}" if bytes_per_s else ""
        self._group = CONTROLLER / f"kvtiers-bench-{os.getpid()}"

    def __enter__(self) -> SlowDisk:
        if self._limit:
            try:
                self._group.mkdir()
                (self._group / "blkio.throttle.read_bps_device").write_text(self._limit)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._group.rmdir()
                raise SlowDiskError(
                    f"the kernel cannot slow reads here: {error}. This needs root and the blkio "
                    "controller of cgroup v1; with a rate of 0 the disk is not slowed"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + REMOVE_S
        while self._limit and self._group.exists():
            with contextlib.suppress(OSError):  # processes that were killed leave it soon
                self._group.rmdir()
                return
            if time.monotonic() > end:
                return
            time.sleep(0.1)

    def add(self, process: int) -> None:
        """Slow the reads of this process from now on."""
        if self._limit:
            (self._group / "cgroup.procs").write_text(str(process))


def _disk_of(folder: Path) -> str:
    """The number of the whole disk that holds this folder, as ``major:minor``."""
    number = os.stat(folder).st_dev
    device = DEVICES / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        raise SlowDiskError(
            f"{folder} is not on a block device; choose a folder on a disk with --folder"
        )
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()
