"""Where the lower tiers of one rank lie: claimed at start, and again when a medium has failed.

A server that runs knows more than the folders of a disk that has come back: which epoch it has
reached, what capacity its scheduler counts on, and on which disk the tier is meant to be.

Everything here blocks on the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.config.options import TIER_TYPES
from offload.config.schema import OffloadConfig, TierConfig, tier_names
from offload.config.tier_capacity import SMALL_FILES_BYTES
from offload.errors import ConfigError, Problem, TierUnavailableError
from offload.geometry.folder_source import ForeignStore, find_foreign, open_sources, write_geometry
from offload.geometry.mooncake_source import MooncakeView, notice_of, open_store_source
from offload.namespaces.cleanup import other_namespaces
from offload.namespaces.folders import (
    ClaimedFolder,
    OnDamage,
    claim_rank_folder,
    describe_neighbours,
    make_room,
    raise_epoch,
    replica_folder,
    share_rank_folder,
)
from offload.namespaces.geometry import Geometry
from offload.namespaces.manifest import Namespace
from offload.namespaces.mounts import MountPoint, mount_point_of
from offload.sizes import MIB, format_size
from offload.worker.tier_factory import TierSpec, mooncake_settings
from tiers.adapters.read_only import ReadOnlyTier, SharedReadOnlyTier
from tiers.adapters.remote_read_only import RemoteReadOnlyTier
from tiers.base import TierError

logger = logging.getLogger(__name__)

OWN_SHARE = 0.1
"""Of a tier's capacity so much must be left to it beside what is read of others."""


@dataclass(frozen=True)
class TierFolders:
    """``shares`` is among how many workers of this machine the capacities are divided; records
    carry ``identity``, and are ordered as ``geometry`` says; ``engine`` names this server in
    messages to others. ``ranks`` is among how many of them the capacity of a tier is divided that
    all replicas share."""

    config: OffloadConfig
    namespace: Namespace
    identity: bytes
    rank: int
    replica: int
    shares: int
    engine: str
    geometry: Geometry | None = None
    ranks: int = 1

    def specs(self) -> list[TierSpec]:
        """This rank's lower tiers; claims their folders for this process.

        Raises ``NamespaceError`` if a tier's ``geometry`` does not allow what lies there.
        """
        names = tier_names(self.config)
        foreign = [self._foreign(number) for number in range(len(self.config.tiers))]
        own = [
            self._spec(*about) for about in zip(range(len(foreign)), names, foreign, strict=False)
        ]
        translated = [n for n, tier in enumerate(self.config.tiers) if tier.geometry == "translate"]
        for number, name in zip(translated, names[len(own) :], strict=True):
            own.append(self._translated(own[number], name, foreign[number]))
        return own

    def _foreign(self, number: int) -> list[ForeignStore]:
        """What others have left below a tier's path that may be read. Before anything is made."""
        config, where = self.config.tiers[number], f"$.tiers[{number}]"
        if self.geometry is None:
            return []
        if config.path:
            return find_foreign(where, config.path, self.namespace, self.geometry, config.geometry)
        if config.geometry != "own":
            try:
                self._view(config).check(where)
            except TierError as error:
                raise TierUnavailableError(f"kvtiers: {where}: {error}") from error
        return []

    def _view(self, config: TierConfig) -> MooncakeView:
        """What this rank looks for in a store."""
        assert self.geometry is not None
        settings = mooncake_settings(config, 0)
        return MooncakeView(settings, self.namespace, self.geometry, config.geometry)

    def _translated(self, own: TierSpec, name: str, foreign: list[ForeignStore]) -> TierSpec:
        """A tier over other namespaces, which is only read."""
        assert self.geometry is not None
        if not own.config.path:
            opened_there = open_store_source(self._view(own.config))
            tier = partial(RemoteReadOnlyTier, opened_there)
            return replace(own, name=name, capacity_bytes=0, notice=None, make=tier)
        if self.rank == 0:
            for store in foreign:
                logger.info("kvtiers: blocks in %s are read translated", store.folder)
        key_file = own.config.encryption.key_file if own.config.encryption else ""
        opened = open_sources(foreign, self.geometry, key_file)
        # Those who share a folder go on writing while this server runs.
        make = partial(SharedReadOnlyTier if own.config.shared else ReadOnlyTier, opened)
        return replace(own, name=name, capacity_bytes=0, renew=None, make=make)

    def _spec(self, number: int, name: str, foreign: list[ForeignStore]) -> TierSpec:
        config = self.config.tiers[number]
        wanted = {store.namespace for store in foreign}
        if not config.path:
            return self._store_spec(number, name)
        if config.shared:
            return self._shared_spec(number, name, wanted)
        _check_room(f"$.tiers[{number}].capacity", config, self.namespace, wanted)
        damage: list[str] = []
        place = self._claim(config, known=wanted, damage=damage)
        try:
            capacity = make_room(
                config.path, self.namespace, config.capacity, note=_note, wanted=wanted
            )
            spot = mount_point_of(config.path)
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
            set_aside=len(damage),
        )
        return replace(spec, renew=partial(self._renew, spec, place, spot))

    def _store_spec(self, number: int, name: str) -> TierSpec:
        """A tier that is a store of many machines: there is nothing to claim."""
        config = self.config.tiers[number]
        where, share = f"$.tiers[{number}]", config.capacity // self.shares
        spec = TierSpec(where, name, config, Path(), share, self.identity, self.rank, 0)
        if self.geometry is None:
            return spec
        return replace(spec, notice=notice_of(self.namespace, self.geometry, config.geometry))

    def _shared_spec(self, number: int, name: str, wanted: Collection[str]) -> TierSpec:
        """A tier whose folder others use as well. Its capacity is divided among ranks only: all
        replicas have the same folders. On a network file system what other namespaces have there is
        left alone, because whether a machine uses it cannot be seen from another."""
        config = self.config.tiers[number]
        damage: list[str] = []
        place = self._claim_shared(config, damage)
        try:
            capacity = config.capacity
            if TIER_TYPES[config.type].needs_local_disk:
                capacity = make_room(
                    config.path, self.namespace, capacity, note=_note, wanted=wanted
                )
            spot = mount_point_of(config.path)
        except BaseException:
            place.close()
            raise
        share = max(0, capacity // self.ranks - SMALL_FILES_BYTES)
        spec = TierSpec(
            *(f"$.tiers[{number}]", name, config, place.folder, share),
            *(self.identity, self.rank, place.epoch),
            set_aside=len(damage),
        )
        return replace(spec, renew=partial(self._renew_shared, spec, place, spot))

    def _renew_shared(
        self, spec: TierSpec, place: ClaimedFolder, spot: MountPoint, epoch: int
    ) -> TierSpec:
        """As ``_renew``. An odd ``epoch`` tells the tier that it has weights of its own."""
        if not spot.is_same_disk(mount_point_of(spec.config.path)):
            raise TierUnavailableError(
                f"{spec.config.path} lies on another file system than before"
            )
        place.close()
        place = self._claim_shared(spec.config, [])
        renew = partial(self._renew_shared, spec, place, spot)
        return replace(spec, folder=place.folder, epoch=epoch, renew=renew)

    def _claim_shared(self, config: TierConfig, damage: list[str]) -> ClaimedFolder:
        place = share_rank_folder(
            *(config.path, self.namespace),
            rank=self.rank,
            engine=self.engine,
            on_damage=_on_damage(config, damage),
        )
        return self._described(place)

    def _described(self, place: ClaimedFolder) -> ClaimedFolder:
        """The place, when it says how the records are ordered that this rank keeps there."""
        try:
            if self.geometry is not None:
                write_geometry(place.folder, self.geometry)
        except BaseException:
            place.close()
            raise
        return place

    def _renew(
        self, spec: TierSpec, place: ClaimedFolder, spot: MountPoint, epoch: int
    ) -> TierSpec:
        """The tier's folder, claimed anew after its medium had failed, for what the tier was: its
        capacity, which the scheduler counts on, and its epoch, which the folder of another medium
        does not know. A path that is gone is not made: whoever moved it may bring it back.

        Raises ``OSError``, ``NamespaceError`` or ``TierUnavailableError`` while it is not back.
        """
        path = spec.config.path
        if not spot.is_same_disk(mount_point_of(path)):
            raise TierUnavailableError(f"{path} lies on another file system than before")
        place.close()
        place = self._claim(spec.config, epoch)
        renew = partial(self._renew, spec, place, spot)
        return replace(spec, folder=place.folder, epoch=epoch, renew=renew)

    def _claim(
        self,
        config: TierConfig,
        epoch: int | None = None,
        known: Collection[str] = (),
        damage: list[str] | None = None,
    ) -> ClaimedFolder:
        """The folder, for a server that starts or one that has come to this ``epoch``. Nothing is
        said of ``known`` namespaces beside it; ``damage`` is told of what was moved aside."""
        path = config.path
        place = claim_rank_folder(
            path,
            self.namespace,
            replica=self.replica,
            rank=self.rank,
            engine=self.engine,
            at_least=epoch or 0,
            starts=epoch is None,
            on_damage=_on_damage(config, damage if damage is not None else []),
        )
        if self.rank == 0 and not any(place.folder.iterdir()):
            for line in describe_neighbours(path, self.namespace, known):
                logger.warning("kvtiers: %s", line)
        return self._described(place)


def _check_room(
    where: str, config: TierConfig, namespace: Namespace, wanted: Collection[str]
) -> None:
    """What is to be read is never removed to make room; it counts as everything below the path
    does. Raises ``ConfigError`` if it leaves next to nothing."""
    others = other_namespaces(config.path, namespace) if wanted else []
    taken = sum(stored.size_bytes for stored in others if stored.name in wanted)
    if taken > config.capacity * (1 - OWN_SHARE):
        what = (
            f"of {format_size(config.capacity)} the namespaces that are read translated take "
            f"{format_size(taken)}, which leaves too little"
        )
        least = format_size(-(-int(taken / (1 - OWN_SHARE)) // MIB + 1) * MIB)
        fix = f'Give at least {least}, or use "geometry": "own" to have them removed for room.'
        raise ConfigError([Problem(where, what, fix)])


def _note(line: str) -> None:
    logger.info("kvtiers: %s", line)


def _on_damage(config: TierConfig, damage: list[str]) -> OnDamage:
    """Warn of what is moved aside and add it to ``damage``, unless ``recovery`` forbids that."""

    def note(line: str) -> None:
        logger.warning("kvtiers: %s", line)
        damage.append(line)

    return OnDamage(note, is_strict=config.recovery == "strict")
