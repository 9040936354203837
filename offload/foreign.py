"""Namespaces of the same model below a tier's path that engines of other geometry have written.

Attaching looks at each of them: it is translated, or refused by an error that says which field
differs, or left alone, as the tier's ``geometry`` says. Namespaces of other models, versions or
hashes are nobody's business here; their keys can never be asked for.

Nothing here writes below another namespace, claims it or locks it. Everything blocks on the disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.claims import entries
from offload.errors import NamespaceError
from offload.foreign_checks import problems_with, refusal
from offload.foreign_source import TranslatedSource
from offload.geometry import GEOMETRY_BYTES_MAX, Geometry, content_fields
from offload.namespace import NAME, Namespace, read_manifest, read_small_file, write_durably
from offload.namespace_folders import read_epoch
from offload.stores import Store
from offload.translation import Obstacle
from tiers.folder import StoreUnusableError
from tiers.foreign_tier import Source

logger = logging.getLogger(__name__)

_GEOMETRY = re.compile(r"rank-([0-9]{1,5})\.geometry\.json", re.ASCII)
_REPLICA = re.compile(r"replica-([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True)
class ForeignStore:
    """One replica of another namespace: what each of its ranks says of its records, by rank."""

    folder: Path
    epoch: int
    ranks: tuple[Geometry, ...]

    @property
    def namespace(self) -> str:
        """The name of its namespace."""
        return self.folder.parent.name

    def open(self, now: Geometry, key_file: str) -> TranslatedSource | None:
        """Look at its records with the geometry ``now``; ``None`` if there is nothing to see."""
        try:
            return TranslatedSource(self.folder, self.epoch, self.ranks, now, key_file)
        except (OSError, StoreUnusableError, NamespaceError) as error:
            logger.warning("kvtiers: what %s holds cannot be translated: %s", self.folder, error)
            return None


def write_geometry(rank_folder: Path, geometry: Geometry) -> None:
    """Say durably how the records of this rank are ordered, beside its folder. Raises ``OSError``;
    writing the same again changes nothing."""
    path = rank_folder.with_name(f"{rank_folder.name}.geometry.json")
    content = geometry.dump()
    try:
        if read_small_file(path, GEOMETRY_BYTES_MAX) == content:
            return
    except NamespaceError:
        pass  # it is replaced, whatever it is
    write_durably(path, content)


def find_foreign(
    where: str, root: str | Path, namespace: Namespace, now: Geometry, how: str
) -> list[ForeignStore]:
    """What of other geometry below ``root`` can be translated to ``now``. With ``how`` "own"
    nothing is looked for; with "refuse" nothing may be there.

    Raises ``NamespaceError`` that names every field in the way, both values, and the choice, for
    what is there and cannot be translated, or may not.
    """
    found: list[ForeignStore] = []
    refused: dict[str, list[Obstacle]] = {}
    if how == "own":
        return found
    for name, other in _same_model(Path(root), namespace):
        stores = list(_stores(Path(root) / name))
        if not stores:
            continue  # opened and never written
        ranks = {str(store.folder): store.ranks for store in stores}
        problems = problems_with(other, ranks, namespace, now, how)
        if problems:
            refused[name] = problems
        else:
            found += stores
    if refused:
        raise refusal(where, str(root), "path", refused)
    return found


def open_sources(
    stores: Sequence[ForeignStore], now: Geometry, key_file: str = ""
) -> Callable[[], list[Source]]:
    """For ``tiers.foreign_tier.ForeignTier``."""

    def opened() -> list[Source]:
        sources = [store.open(now, key_file) for store in stores]
        return [source for source in sources if source is not None]

    return opened


def _same_model(root: Path, namespace: Namespace) -> Iterator[tuple[str, Namespace]]:
    content = content_fields(namespace.fields)
    for name in entries(root):
        if not NAME.fullmatch(name) or name == namespace.name or (root / name).is_symlink():
            continue
        try:
            other = read_manifest(root / name)
        except NamespaceError:
            continue  # whoever opens it says so
        if other is not None and content_fields(other.fields) == content:
            yield name, other


def _stores(home: Path) -> Iterator[ForeignStore]:
    """The replicas of a namespace that hold anything. One whose weights were replaced while it ran
    (an odd epoch) or that is damaged has nothing for us."""
    for replica in entries(home):
        folder = home / replica
        if not _REPLICA.fullmatch(replica) or folder.is_symlink():
            continue
        ranks = sorted(
            int(name.partition("-")[2])
            for name in entries(folder)
            if re.fullmatch(r"rank-[0-9]{1,5}", name) and Store(folder / name).kind != "empty"
        )
        if not ranks:
            continue
        try:
            epoch = read_epoch(folder)
        except NamespaceError as error:
            logger.warning("kvtiers: %s", error)
            continue
        if epoch % 2:
            text = "kvtiers: %s is not translated: its weights were replaced while it ran"
            logger.info(text, folder)
            continue
        yield ForeignStore(folder, epoch, tuple(_geometries(folder)))


def _geometries(folder: Path) -> Iterator[Geometry]:
    """What the ranks say of their records; what is damaged is left out."""
    for name in entries(folder):
        if not _GEOMETRY.fullmatch(name):
            continue
        try:
            content = read_small_file(folder / name, GEOMETRY_BYTES_MAX)
            if content is not None:
                yield Geometry.load(content, str(folder / name))
        except NamespaceError as error:
            logger.warning("kvtiers: %s", error)
