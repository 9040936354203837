"""The claim of one tier's folder: taken at start, and again after the folder's medium has failed.

Its owner is a ``TierClaim``, whatever tier is open over the folder. Every method blocks on the
disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from offload.errors import TierUnavailableError
from offload.namespaces.claims import FolderClaimedError
from offload.namespaces.folders import ClaimedFolder
from offload.namespaces.mounts import mount_point_of
from offload.namespaces.wait_for_owners import Patience

logger = logging.getLogger(__name__)


class TierClaim:
    """Holds a tier's folder below ``path`` until ``close``, or until the process ends.

    ``claim(None)`` claims the folder for a server that is starting, and ``claim(epoch)`` for one
    that has already reached this epoch. ``keep_epoch(epoch)`` records in the folder that the tier
    is about to reach this epoch; it raises ``OSError``, ``NamespaceError`` or
    ``TierUnavailableError``.
    """

    def __init__(
        self,
        path: str,
        claim: Callable[[int | None], ClaimedFolder],
        keep_epoch: Callable[[int], object],
    ) -> None:
        """Claim the folder; wait for a while if another server, which may be about to end, holds
        it. Raises the errors of ``claim``, and ``OSError``."""
        self.keep_epoch = keep_epoch
        self._path = path
        self._claim = claim
        patience = Patience(lambda line: logger.warning("kvtiers: %s", line))
        self._claimed = patience.repeat(
            lambda: claim(None), FolderClaimedError, lambda error: error.what
        )
        try:
            self._mount = mount_point_of(path)
        except BaseException:  # whatever failed, the folder is not kept claimed
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """The claimed folder."""
        return self._claimed.folder

    @property
    def epoch(self) -> int:
        """The epoch of the folder when it was claimed."""
        return self._claimed.epoch

    @property
    def noted_epoch(self) -> int:
        """The epoch in the folder's epoch file when it was claimed."""
        return self._claimed.noted_epoch

    def renew(self, epoch: int) -> None:
        """Claim the folder again after its medium has failed.

        ``epoch`` is the epoch that the tier has reached, which a folder on another medium does not
        know. A missing path is not created, because an operator may still restore it.

        Raises ``OSError``, ``NamespaceError`` or ``TierUnavailableError`` while the medium is
        unavailable.
        """
        if not self._mount.is_same_disk(mount_point_of(self._path)):
            raise TierUnavailableError(f"{self._path} is on another file system than before")
        self.close()
        self._claimed = self._claim(epoch)

    def close(self) -> None:
        """Release the folder. Idempotent."""
        self._claimed.close()
