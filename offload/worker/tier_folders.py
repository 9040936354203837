"""Describes one rank's lower tiers, and claims their folders.

A running server knows more than the folders on a disk that has come back: its current epoch, the
capacity on which its scheduler relies, and the disk to which the tier belongs. Every function here
blocks on the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.config.schema import OffloadConfig, TierConfig, tier_names
from offload.config.tier_capacity import SMALL_FILES_BYTES
from offload.config.tier_types import TIER_TYPES
from offload.errors import ConfigError, Problem, TierUnavailableError
from offload.geometry.folder_source import (
    OtherReplica,
    find_other_replicas,
    open_sources,
    write_geometry,
)
from offload.geometry.mooncake_source import MooncakeView, notice_of, open_mooncake_source
from offload.namespaces.cleanup import describe_nearest_namespace, make_space, other_namespaces
from offload.namespaces.epoch_file import raise_epoch
from offload.namespaces.folders import (
    ClaimedFolder,
    OnDamage,
    claim_rank_folder,
    replica_folder,
    share_rank_folder,
)
from offload.namespaces.geometry import Geometry
from offload.namespaces.manifest import Namespace
from offload.sizes import MIB, format_size, rounded_size
from offload.worker.tier_claim import TierClaim
from offload.worker.tier_factory import TierSpec, mooncake_settings
from tiers.adapters.read_only import ReadOnlyTier, SharedReadOnlyTier
from tiers.adapters.remote_read_only import RemoteReadOnlyTier
from tiers.base import TierError

logger = logging.getLogger(__name__)

OWN_SHARE = 0.1
"""The part of a tier's capacity that must be left for its own records beside those of other
geometries that it reads."""


@dataclass(frozen=True)
class TierFolders:
    """Claims the folders of one rank's lower tiers.

    Capacities are divided among ``shares`` workers of this machine; the capacity of a tier that all
    replicas share is divided among ``ranks`` workers. Records carry ``identity``, and their bytes
    are ordered as ``geometry`` describes; ``engine`` names this server in messages to other
    engines.
    """

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
        """Describe this rank's lower tiers, and claim their folders for this process.

        Raises ``NamespaceError`` if a tier's ``geometry`` option forbids a start beside the
        existing namespaces.
        """
        names = tier_names(self.config)
        others = [self._other_replicas(number) for number in range(len(self.config.tiers))]
        own = [self._spec(*about) for about in zip(range(len(others)), names, others, strict=False)]
        translated = [n for n, tier in enumerate(self.config.tiers) if tier.geometry == "translate"]
        for number, name in zip(translated, names[len(own) :], strict=True):
            own.append(self._translated(own[number], name, others[number]))
        return own

    def _other_replicas(self, number: int) -> list[OtherReplica]:
        """Find other engines' namespaces below a tier's path that may be read. Runs before anything
        is created."""
        config, where = self.config.tiers[number], f"$.tiers[{number}]"
        if self.geometry is None:
            return []
        if config.path:
            return find_other_replicas(
                where, config.path, self.namespace, self.geometry, config.geometry
            )
        if config.geometry != "own":
            try:
                self._view(config).check(where)
            except TierError as error:
                raise TierUnavailableError(f"kvtiers: {where}: {error}") from error
        return []

    def _view(self, config: TierConfig) -> MooncakeView:
        """The records that this rank looks for in a store."""
        assert self.geometry is not None
        settings = mooncake_settings(config, 0)
        return MooncakeView(settings, self.namespace, self.geometry, config.geometry)

    def _translated(self, own: TierSpec, name: str, others: list[OtherReplica]) -> TierSpec:
        """Describe a read-only tier over other namespaces."""
        assert self.geometry is not None
        if not own.config.path:
            open_source = open_mooncake_source(self._view(own.config))
            tier = partial(RemoteReadOnlyTier, open_source)
            return replace(own, name=name, capacity_bytes=0, notice=None, make=tier)
        if self.rank == 0:
            for other in others:
                logger.info("kvtiers: translating blocks of another geometry in %s", other.folder)
        key_file = own.config.encryption.key_file if own.config.encryption else ""
        opened = open_sources(others, self.geometry, key_file)
        # engines that share the folder keep writing while this server runs
        make = partial(SharedReadOnlyTier if own.config.shared else ReadOnlyTier, opened)
        return replace(own, name=name, capacity_bytes=0, claim=None, make=make)

    def _spec(self, number: int, name: str, others: list[OtherReplica]) -> TierSpec:
        config = self.config.tiers[number]
        wanted = {other.namespace for other in others}
        if not config.path:
            return self._mooncake_spec(number, name)
        if not config.shared:
            _check_space(f"$.tiers[{number}].capacity", config, self.namespace, wanted)
        damage: list[str] = []
        claim = self._claim(config, wanted, damage)
        try:
            capacity = self._capacity(config, wanted)
        except BaseException:  # whatever failed, the folder is not kept claimed
            claim.close()
            raise
        return TierSpec(
            f"$.tiers[{number}]",
            name,
            config,
            claim.folder,
            max(0, capacity // (self.ranks if config.shared else self.shares) - SMALL_FILES_BYTES),
            self.identity,
            self.rank,
            claim.epoch,
            claim=claim,
            set_aside=len(damage),
        )

    def _capacity(self, config: TierConfig, wanted: Collection[str]) -> int:
        """The capacity of a tier. Makes space for it, but not in the ``wanted`` namespaces.

        On a network file system that engines share, the folders of other namespaces are left alone:
        a machine cannot tell whether another one uses them.
        """
        if config.shared and not TIER_TYPES[config.type].needs_local_disk:
            return config.capacity
        return make_space(config.path, self.namespace, config.capacity, note=_note, wanted=wanted)

    def _mooncake_spec(self, number: int, name: str) -> TierSpec:
        """Describe a tier on a store that many machines use; there is no folder to claim."""
        config = self.config.tiers[number]
        where, share = f"$.tiers[{number}]", config.capacity // self.shares
        spec = TierSpec(where, name, config, Path(), share, self.identity, self.rank, 0)
        if self.geometry is None:
            return spec
        return replace(spec, notice=notice_of(self.namespace, self.geometry, config.geometry))

    def _claim(self, config: TierConfig, known: Collection[str], damage: list[str]) -> TierClaim:
        """Claim a tier's folder. Messages do not mention the ``known`` namespaces; ``damage``
        collects the folders that were moved aside."""
        on_damage = _on_damage(config, damage)
        if config.shared:
            claim = partial(self._claim_shared, config.path, on_damage)
            return TierClaim(config.path, claim, lambda _epoch: None)
        replica_dir = replica_folder(config.path, self.namespace, self.replica)
        claim = partial(self._claim_own, config.path, on_damage, known)
        return TierClaim(config.path, claim, partial(raise_epoch, replica_dir))

    def _claim_shared(self, path: str, on_damage: OnDamage, _epoch: int | None) -> ClaimedFolder:
        """Claim a folder that other engines use as well. All replicas have the same one. An odd
        epoch means that this engine's weights differ from those of the others."""
        claimed = share_rank_folder(
            path, self.namespace, rank=self.rank, engine=self.engine, on_damage=on_damage
        )
        return self._described(claimed)

    def _claim_own(
        self, path: str, on_damage: OnDamage, known: Collection[str], epoch: int | None
    ) -> ClaimedFolder:
        """Claim this replica's folder, for a server that is starting or that has already reached
        this ``epoch``."""
        claimed = claim_rank_folder(
            path,
            self.namespace,
            replica=self.replica,
            rank=self.rank,
            engine=self.engine,
            epoch_min=epoch or 0,
            starts=epoch is None,
            on_damage=on_damage,
        )
        if self.rank == 0 and not any(claimed.folder.iterdir()):
            for line in describe_nearest_namespace(path, self.namespace, known):
                logger.warning("kvtiers: %s", line)
        return self._described(claimed)

    def _described(self, claimed: ClaimedFolder) -> ClaimedFolder:
        """Record in the folder how this rank orders its records; return the folder."""
        try:
            if self.geometry is not None:
                write_geometry(claimed.folder, self.geometry)
        except BaseException:  # whatever failed, the folder is not kept claimed
            claimed.close()
            raise
        return claimed


def _check_space(
    where: str, config: TierConfig, namespace: Namespace, wanted: Collection[str]
) -> None:
    """Check that records of other geometries leave enough space.

    Such records are never removed to free space, but they count towards the capacity like
    everything below the path. Raises ``ConfigError`` if they leave almost no space.
    """
    others = other_namespaces(config.path, namespace) if wanted else []
    taken = sum(stored.size_bytes for stored in others if stored.name in wanted)
    if taken > config.capacity * (1 - OWN_SHARE):
        what = (
            f"the namespaces read from other geometries take {rounded_size(taken)} of "
            f"{format_size(config.capacity)}, which leaves too little"
        )
        needed = format_size(-(-int(taken / (1 - OWN_SHARE)) // MIB + 1) * MIB)
        fix = f'Give at least {needed}, or use "geometry": "own" to allow their removal.'
        raise ConfigError([Problem(where, what, fix)])


def _note(line: str) -> None:
    logger.info("kvtiers: %s", line)


def _on_damage(config: TierConfig, damage: list[str]) -> OnDamage:
    """Return handlers that warn of folders moved aside and add them to ``damage``.

    With ``recovery`` "strict", damage is an error instead.
    """

    def note(line: str) -> None:
        logger.warning("kvtiers: %s", line)
        damage.append(line)

    return OnDamage(note, is_strict=config.recovery == "strict")
