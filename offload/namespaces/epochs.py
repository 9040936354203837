"""Begins epochs of a server's lower tiers, on behalf of the scheduler's process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence

from offload.errors import TierUnavailableError
from offload.namespaces.epoch_file import bump_epoch, read_epoch, restore_epoch
from offload.namespaces.folders import open_namespace, replica_folder
from offload.namespaces.manifest import Namespace
from offload.namespaces.mounts import mount_point_of

READ_ONLY_EPOCH = 1
"""The epoch of a read-only tier after a reset; the tier is then empty."""
RANDOM_BITS = 30


def draw_epoch() -> int:
    """Draw an epoch of a shared tier for weights that only this engine is known to have. The epoch
    differs from those of all other engines.

    It consists of the seconds since 1970, random bits, and a one. So it is odd, as are all epochs
    of changed weights, and never 0, which is the epoch of the model's files.
    """
    return (int(time.time()) << RANDOM_BITS | secrets.randbits(RANDOM_BITS)) << 1 | 1


class TierEpochs:
    """Begins the epochs of the tiers at ``paths``, which must exist, and remembers their disks.

    ``shared`` are the numbers of shared tiers, whose epochs are stored nowhere. Tiers numbered
    beyond the paths are read-only; their owners keep their epochs.
    """

    def __init__(
        self,
        paths: Sequence[str],
        namespace: Namespace,
        replica: int,
        shared: Collection[int] = (),
    ) -> None:
        """Raises ``OSError`` if a path does not exist."""
        self._paths = tuple(paths)
        self._shared = frozenset(shared)
        self._mount_points = {
            tier: mount_point_of(path)
            for tier, path in enumerate(paths)
            if tier not in self._shared
        }
        self._before: dict[int, int] = {}
        self._drawn = dict.fromkeys(self._shared, 0)
        self._namespace = namespace
        self._replica = replica

    def begin(self, tier: int, noted: Callable[[], None] = lambda: None) -> int:
        """Begin a new epoch, durably when this returns.

        ``noted`` is called as soon as a server that starts would see the epoch, even if this
        process is killed. If a disk has come back empty, this creates its folders again, so that no
        process has to wait for another to create them. Raises ``OSError``, ``NamespaceError`` or
        ``TierUnavailableError`` if the epoch cannot be written; may block as long as the disk does.
        """
        if tier >= len(self._paths):
            return READ_ONLY_EPOCH
        if tier in self._shared:
            # The clock alone does not make epochs grow: several begin within a second, and the
            # clock can be set back.
            self._drawn[tier] = max(draw_epoch(), self._drawn[tier] + 2)
            return self._drawn[tier]
        path = self._paths[tier]
        replica_dir = replica_folder(path, self._namespace, self._replica)
        if not replica_dir.parent.is_dir():
            if not self._mount_points[tier].is_same_disk(mount_point_of(path)):
                raise TierUnavailableError(f"{path} is on another file system than before")
            open_namespace(path, self._namespace)
        before = read_epoch(replica_dir)
        epoch = bump_epoch(replica_dir, noted=noted)
        self._before[tier] = before
        return epoch

    def take_back(self, tier: int, epoch: int) -> None:
        """Undo ``begin``: restore the epoch before this one, under which nothing was stored. Raises
        and blocks as ``begin`` does."""
        before = self._before.get(tier)
        if before is not None:  # otherwise the epoch is not stored
            path = self._paths[tier]
            restore_epoch(replica_folder(path, self._namespace, self._replica), epoch, before)
