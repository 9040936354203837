"""Begins epochs of a server's lower tiers, on behalf of the scheduler's process."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import TierUnavailableError
from offload.mounts import spot_of
from offload.namespace import Namespace
from offload.namespace_folders import bump_epoch, open_namespace, replica_folder

READ_ONLY_EPOCH = 1
"""What a tier that is only read is told at a reset; it has forgotten everything then."""


class TierEpochs:
    """For tiers at ``paths``, which are there now: where they lie is remembered. Tiers numbered
    beyond them are only read, and their epochs are their owners'."""

    def __init__(self, paths: Sequence[str], namespace: Namespace, replica: int) -> None:
        """Raises ``OSError`` if a path is not there."""
        self._paths = tuple(paths)
        self._spots = [spot_of(path) for path in paths]
        self._namespace = namespace
        self._replica = replica

    def begin(self, tier: int) -> int:
        """Begin a new epoch, durably when this returns.

        A disk that has come back empty gets its folders again, so that nobody waits for the other
        to make them. Raises ``OSError``, ``NamespaceError`` or ``TierUnavailableError`` if the
        epoch cannot be written; may block as long as the disk does.
        """
        if tier >= len(self._paths):
            return READ_ONLY_EPOCH
        path = self._paths[tier]
        home = replica_folder(path, self._namespace, self._replica)
        if not home.parent.is_dir():
            if not self._spots[tier].is_same_place(spot_of(path)):
                raise TierUnavailableError(f"{path} lies on another file system than before")
            open_namespace(path, self._namespace)
        return bump_epoch(home)
