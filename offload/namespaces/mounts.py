"""On which mounted disk a path lies, to notice when that disk is not there.

A mount point without its disk is an empty folder of the file system around it. Whoever makes
folders there fills the wrong disk, and what is stored there is hidden when the right one is back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MountPoint:
    """``device`` of a file system as ``stat`` numbers it, and the folder where it is mounted.

    The number changes when a disk is plugged in again, the folder does not.
    """

    device: int
    mount: str

    def is_same_place(self, other: MountPoint) -> bool:
        """Whether a path that lay here and lies there now still lies on the disk that is meant:
        the same file system, or whatever is mounted at the same folder."""
        return self.device == other.device or self.mount == other.mount


def spot_of(path: str | Path) -> MountPoint:
    """Where ``path`` lies. Raises ``OSError``, also if nothing is there; may block."""
    place = Path(path).resolve(strict=True)
    device = os.stat(place).st_dev
    while not os.path.ismount(place):
        place = place.parent
    return MountPoint(device, str(place))
