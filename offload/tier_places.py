"""Where the lower tiers of one rank lie: claimed at start, and again when a medium has failed.

A server that runs knows more than the folders of a disk that has come back: which epoch it has
reached, what capacity its scheduler counts on, and on which disk the tier is meant to be.

Everything here blocks on the disk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from offload.config import OffloadConfig
from offload.errors import TierUnavailableError
from offload.mounts import Spot, spot_of
from offload.namespace import Namespace
from offload.namespace_folders import (
    Place,
    describe_neighbours,
    make_room,
    open_place,
    raise_epoch,
    replica_folder,
)
from offload.tier_factory import TierSpec, tier_names

logger = logging.getLogger(__name__)

SMALL_FILES_BYTES = 64 << 10
"""What locks, claim, epoch and manifest of a rank may take of its share of a tier's capacity."""


@dataclass(frozen=True)
class TierPlaces:
    """``shares`` is among how many workers of this machine the capacities are divided; records
    carry ``identity``; ``engine`` names this server in messages to others."""

    config: OffloadConfig
    namespace: Namespace
    identity: bytes
    rank: int
    replica: int
    shares: int
    engine: str

    def specs(self) -> list[TierSpec]:
        """This rank's lower tiers; claims their folders for this process."""
        names = tier_names(self.config)
        return [self._spec(number, name) for number, name in enumerate(names)]

    def _spec(self, number: int, name: str) -> TierSpec:
        config = self.config.tiers[number]
        place = self._claim(config.path)
        try:
            capacity = make_room(config.path, self.namespace, config.capacity, note=_note)
            spot = spot_of(config.path)
        except BaseException:
            place.close()
            raise
        home = replica_folder(config.path, self.namespace, self.replica)
        spec = TierSpec(
            f"$.tiers[{number}]",
            name,
            config,
            place.folder,
            max(0, capacity // self.shares - SMALL_FILES_BYTES),
            self.identity,
            self.rank,
            place.epoch,
            keep_epoch=partial(raise_epoch, home),
        )
        return replace(spec, renew=partial(self._renew, spec, place, spot))

    def _renew(self, spec: TierSpec, place: Place, spot: Spot, epoch: int) -> TierSpec:
        """The tier's folder, claimed anew after its medium had failed, for what the tier was: its
        capacity, which the scheduler counts on, and its epoch, which the folder of another medium
        does not know. A path that is gone is not made: whoever moved it may bring it back.

        Raises ``OSError``, ``NamespaceError`` or ``TierUnavailableError`` while it is not back.
        """
        path = spec.config.path
        if not spot.is_same_place(spot_of(path)):
            raise TierUnavailableError(f"{path} lies on another file system than before")
        place.close()
        place = self._claim(path, epoch)
        renew = partial(self._renew, spec, place, spot)
        return replace(spec, folder=place.folder, epoch=epoch, renew=renew)

    def _claim(self, path: str, epoch: int | None = None) -> Place:
        """The folder, for a server that starts or one that has come to this ``epoch``."""
        place = open_place(
            path,
            self.namespace,
            replica=self.replica,
            rank=self.rank,
            engine=self.engine,
            at_least=epoch or 0,
            starts=epoch is None,
            note=_note,
        )
        if self.rank == 0 and not any(place.folder.iterdir()):
            for line in describe_neighbours(path, self.namespace):
                logger.warning("kvtiers: %s", line)
        return place


def _note(line: str) -> None:
    logger.info("kvtiers: %s", line)
