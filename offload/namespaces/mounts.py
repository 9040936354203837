"""Finds the mounted disk that contains a path, to notice when that disk is missing.

A mount point without its disk is an empty folder of the enclosing file system. Folders created
there fill the wrong disk, and disappear from view when the right disk is back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MountPoint:
    """The ``device`` number of a file system, as ``stat`` reports it, and the folder where it is
    mounted.

    The number changes when a disk is plugged in again, the folder does not.
    """

    device: int
    mount: str

    def is_same_disk(self, other: MountPoint) -> bool:
        """Return True if both are the same disk for a path: the same file system, or file systems
        mounted at the same folder."""
        return self.device == other.device or self.mount == other.mount


def mount_point_of(path: str | Path) -> MountPoint:
    """Find the mount point of ``path``. Raises ``OSError``, for example if the path does not exist;
    may block."""
    mount = Path(path).resolve(strict=True)
    device = os.stat(mount).st_dev
    while not os.path.ismount(mount):
        mount = mount.parent
    return MountPoint(device, str(mount))
