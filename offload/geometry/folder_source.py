"""Finds and reads the records that engines with another geometry left below a tier's path.

As the tier's ``geometry`` option requires, each namespace of the same model is translated, refused
with an error that names the differing field, or left alone. Namespaces of other models, versions or
hashes are ignored, because their keys are never requested.

A source reads one replica of one namespace, and combines the records of its ranks. A live engine
may own the folders: they are read as the command line reads them (decision 0070), and a record that
the owner removes, replaces or resets meanwhile is a miss. A source belongs to one thread.

This module never writes below another namespace, and never claims or locks it. Every function here
blocks on the disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.errors import NamespaceError
from offload.geometry.compatibility import problems_with, refusal
from offload.geometry.translate import GroupTranslation, Incompatibility, apply, translation_of
from offload.layout.keys import GROUP_BYTES, group_suffix
from offload.namespaces.claims import entries
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.geometry import GEOMETRY_BYTES_MAX, Geometry, content_fields
from offload.namespaces.inventory import REPLICA, RankFolder
from offload.namespaces.manifest import (
    NAME,
    Namespace,
    UnreadableError,
    read_manifest,
    read_small_file,
    write_durably,
)
from tiers.adapters.read_only import RecordSource, SourceKey
from tiers.base import Buffer, Key, ReadOutcome
from tiers.copy.base import padded
from tiers.folders.folder import FolderUnusableError
from tiers.offline.offline_folder import Checker, FolderChangedError, OfflineFolder, RecordHealth
from tiers.record import Identity

logger = logging.getLogger(__name__)

_GEOMETRY = re.compile(r"rank-([0-9]{1,5})\.geometry\.json", re.ASCII)


@dataclass(frozen=True)
class OtherReplica:
    """One replica of another namespace: each rank's description of its records, by rank."""

    folder: Path
    epoch: int
    ranks: tuple[Geometry, ...]

    @property
    def namespace(self) -> str:
        """The name of its namespace."""
        return self.folder.parent.name

    def open(self, now: Geometry, key_file: str) -> TranslatedSource | None:
        """Open its records with the geometry ``now``; ``None`` if there is nothing to read."""
        try:
            return TranslatedSource(self.folder, self.epoch, self.ranks, now, key_file)
        except (OSError, FolderUnusableError, NamespaceError) as error:
            logger.warning(
                "kvtiers: the records in %s cannot be translated: %s", self.folder, error
            )
            return None


def write_geometry(rank_folder: Path, geometry: Geometry) -> None:
    """Durably write a description of how this rank orders its records, beside its folder.

    Raises ``OSError``; writing the same description again changes nothing.
    """
    path = rank_folder.with_name(f"{rank_folder.name}.geometry.json")
    content = geometry.dump()
    try:
        if read_small_file(path, GEOMETRY_BYTES_MAX) == content:
            return
    except (NamespaceError, UnreadableError):
        pass  # unreadable or not ours: replace it
    write_durably(path, content)


def find_other_replicas(
    where: str, root: str | Path, namespace: Namespace, now: Geometry, how: str
) -> list[OtherReplica]:
    """Find folders of other geometry below ``root`` that can be translated to ``now``.

    With ``how`` "own" nothing is searched; with "refuse" every such folder is an error. Raises
    ``NamespaceError`` for folders that cannot be translated, or must not be. The error names every
    conflicting field, both values, and the user's choices.
    """
    found: list[OtherReplica] = []
    refused: dict[str, list[Incompatibility]] = {}
    if how == "own":
        return found
    for name, other in _same_model(Path(root), namespace):
        replicas = list(_replicas_in(Path(root) / name))
        if not replicas:
            continue  # no replica has usable records
        ranks = {str(replica.folder): replica.ranks for replica in replicas}
        problems = problems_with(other, ranks, namespace, now, how)
        if problems:
            refused[name] = problems
        else:
            found += replicas
    if refused:
        raise refusal(where, str(root), "path", refused)
    return found


def open_sources(
    replicas: Sequence[OtherReplica], now: Geometry, key_file: str = ""
) -> Callable[[], list[RecordSource]]:
    """Open the sources for ``tiers.adapters.read_only.ReadOnlyTier``."""

    def opened() -> list[RecordSource]:
        sources = [replica.open(now, key_file) for replica in replicas]
        return [source for source in sources if source is not None]

    return opened


def _same_model(root: Path, namespace: Namespace) -> Iterator[tuple[str, Namespace]]:
    content = content_fields(namespace.fields)
    for name in entries(root):
        if not NAME.fullmatch(name) or name == namespace.name or (root / name).is_symlink():
            continue
        try:
            other = read_manifest(root / name)
        except (NamespaceError, UnreadableError):
            continue  # the process that opens the folder reports the problem
        if other is not None and content_fields(other.fields) == content:
            yield name, other


def _replicas_in(namespace: Path) -> Iterator[OtherReplica]:
    """The replicas of a namespace that contain records.

    A replica is left out if it is damaged, or if its weights were replaced while it ran (an odd
    epoch).
    """
    for replica in entries(namespace):
        folder = namespace / replica
        if not REPLICA.fullmatch(replica) or folder.is_symlink():
            continue
        ranks = sorted(
            int(name.partition("-")[2])
            for name in entries(folder)
            if re.fullmatch(r"rank-[0-9]{1,5}", name) and RankFolder(folder / name).kind != "empty"
        )
        if not ranks:
            continue
        try:
            epoch = read_epoch(folder)
        except (NamespaceError, UnreadableError) as error:
            logger.warning("kvtiers: %s", error)
            continue
        if epoch % 2:
            text = "kvtiers: %s is not translated: its weights were replaced while it ran"
            logger.info(text, folder)
            continue
        yield OtherReplica(folder, epoch, tuple(_geometries(folder)))


def _geometries(folder: Path) -> Iterator[Geometry]:
    """Read the ranks' descriptions of their records; damaged ones are left out."""
    for name in entries(folder):
        if not _GEOMETRY.fullmatch(name):
            continue
        try:
            content = read_small_file(folder / name, GEOMETRY_BYTES_MAX)
            if content is not None:
                yield Geometry.load(content, str(folder / name))
        except (NamespaceError, UnreadableError) as error:
            logger.warning("kvtiers: %s", error)


_NOTHING: Buffer = np.empty(0, np.uint8)


class TranslatedSource:
    """See the module's docstring. A ``tiers.adapters.read_only.RecordSource``."""

    def __init__(
        self,
        folder: Path,
        epoch: int,
        ranks: Sequence[Geometry],
        now: Geometry,
        key_file: str = "",
    ) -> None:
        """``folder`` is the replica's folder; ``now`` must be able to read the ``ranks``.

        Raises ``NamespaceError`` if a needed rank is missing or does not match its geometry, and
        the errors of ``RankFolder.open``.
        """
        self._epoch = epoch
        by_rank = {geometry.rank: geometry for geometry in ranks}
        first = ranks[0]
        self._translations: dict[bytes, GroupTranslation] = {
            group_suffix(group.group): translation_of(first, now, group.group)
            for group in now.groups
        }
        needed = sorted(
            {rank for translation in self._translations.values() for rank in translation.ranks}
        )
        with ExitStack() as undo:
            self._outside: dict[int, OfflineFolder] = {}
            for rank in needed:
                if rank not in by_rank:
                    raise NamespaceError(f"rank {rank} of {first.ranks} has no description")
                outside = RankFolder(folder / f"rank-{rank}").open(key_file)
                undo.callback(outside.close)
                _check_owner(outside, Identity(by_rank[rank].records, rank), epoch)
                self._outside[rank] = outside
            undo.pop_all()
        self._checkers = {rank: Checker(outside) for rank, outside in self._outside.items()}

    def keys(self) -> list[SourceKey]:
        """Chunks for which every needed rank has its part."""
        held: dict[int, dict[Key, int]] = {}
        try:
            for rank, outside in self._outside.items():
                held[rank] = self._held_by(outside)
        except FolderChangedError as error:
            logger.info("kvtiers: %s: no records will be translated", error)
            return []
        found = []
        for suffix, translation in self._translations.items():
            size = padded(translation.chunk_bytes)
            first, *others = (held[rank] for rank in translation.ranks)
            found += [
                SourceKey(key, use_ns, size)
                for key, use_ns in first.items()
                if key.endswith(suffix) and all(key in other for other in others)
            ]
        return found

    def _held_by(self, outside: OfflineFolder) -> dict[Key, int]:
        """Keys of the right size, with the time of their last use."""
        sizes = {
            suffix: padded(translation.record_bytes)
            for suffix, translation in self._translations.items()
        }
        return {
            found.key: found.use_ns
            for batch in outside.batches()
            for found in batch
            if sizes.get(found.key[-GROUP_BYTES:]) == found.payload_bytes
        }

    def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Read the chunks one after another."""
        return [self._read(key, data) for key, data in zip(keys, into, strict=True)]

    def _read(self, key: Key, into: Buffer) -> ReadOutcome:
        """Read one chunk.

        A record that has been removed, or is of another epoch, is only missing; a damaged one is
        ``CORRUPT``.
        """
        translation = self._translations.get(key[-GROUP_BYTES:])
        if translation is None or into.nbytes < translation.chunk_bytes:
            return ReadOutcome.CORRUPT
        records: list[Buffer] = []
        try:
            for rank in translation.ranks:
                outcome, record = self._record(rank, key, translation)
                if outcome is not ReadOutcome.OK:
                    return outcome
                records.append(record)
        except FolderChangedError:
            return ReadOutcome.MISS
        apply(translation, records, into)
        into[translation.chunk_bytes :] = 0
        return ReadOutcome.OK

    def _record(
        self, rank: int, key: Key, translation: GroupTranslation
    ) -> tuple[ReadOutcome, Buffer]:
        """The record of one rank, in memory that stays valid until the rank's next record."""
        outside, checker = self._outside[rank], self._checkers[rank]
        found = outside.find(key)
        if found is None or outside.epoch != self._epoch:
            return ReadOutcome.MISS, _NOTHING
        if found.payload_bytes != padded(translation.record_bytes):
            return ReadOutcome.MISS, _NOTHING
        health, payload = checker.check(found)
        if outside.epoch != self._epoch or health in (RecordHealth.GONE, RecordHealth.SEALED):
            return ReadOutcome.MISS, _NOTHING
        if health is RecordHealth.DAMAGED or payload.nbytes != padded(translation.record_bytes):
            return ReadOutcome.CORRUPT, _NOTHING
        return ReadOutcome.OK, payload

    def have(self, keys: Sequence[Key]) -> list[bool]:
        """Determine which chunks all needed ranks hold at present."""
        found = [key[-GROUP_BYTES:] in self._translations for key in keys]
        try:
            for at, key in enumerate(keys):
                if found[at]:
                    translation = self._translations[key[-GROUP_BYTES:]]
                    found[at] = all(self._has(rank, key, translation) for rank in translation.ranks)
        except FolderChangedError:
            return [False] * len(keys)
        return found

    def _has(self, rank: int, key: Key, translation: GroupTranslation) -> bool:
        outside = self._outside[rank]
        found = outside.find(key)
        return (
            found is not None
            and outside.epoch == self._epoch
            and found.payload_bytes == padded(translation.record_bytes)
        )

    def close(self) -> None:
        """Idempotent."""
        for outside in self._outside.values():
            outside.close()


def _check_owner(outside: OfflineFolder, identity: Identity, epoch: int) -> None:
    """Check that a rank's records match its description."""
    if outside.owner != identity:
        raise NamespaceError(f"{outside.folder} contains other records than its geometry describes")
    if outside.epoch != epoch:
        raise NamespaceError(
            f"{outside.folder} is of epoch {outside.epoch}, but its replica is of epoch {epoch}"
        )
