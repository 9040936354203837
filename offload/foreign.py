"""Namespaces of the same model below a tier's path that engines of other geometry have written.

Attaching looks at each of them: it is translated, or refused by an error that says which field
differs, or left alone, as the tier's ``geometry`` says. Namespaces of other models, versions or
hashes are nobody's business here; their keys can never be asked for.

Nothing here writes below another namespace, claims it or locks it. Everything blocks on the disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.claims import entries
from offload.errors import NamespaceError
from offload.foreign_source import TranslatedSource
from offload.geometry import GEOMETRY_BYTES_MAX, Geometry, content_fields
from offload.namespace import NAME, Namespace, read_manifest, read_small_file, write_durably
from offload.namespace_folders import read_epoch
from offload.stores import Store
from offload.translation import Obstacle, obstacles
from tiers.foreign_tier import Source
from tiers.lmdb_index import IndexUnusableError

logger = logging.getLogger(__name__)

FREE_FIELDS = frozenset({"block_size", "page_bytes", "num_kv_heads", "page_size_padded"})
"""Of a group in the manifest, what may differ: the geometry says the same of every layer."""
LEFT_TO_GEOMETRY = frozenset({"layers", "layer_count", "shapes"})
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
        except (OSError, IndexUnusableError, NamespaceError) as error:
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
    refused: list[str] = []
    if how == "own":
        return found
    for name, other in _same_model(Path(root), namespace):
        stores = list(_stores(Path(root) / name))
        if not stores:
            continue  # opened and never written
        problems = _field_obstacles(other.fields, namespace.fields)
        for store in stores:
            problems += _store_obstacles(store, now)
        if how == "refuse" and not problems:
            problems = _differences(other.fields, namespace.fields)
        if problems:
            refused.append(_refusal(name, problems))
        else:
            found += stores
    if refused:
        lines = "\n".join(refused)
        raise NamespaceError(
            f"kvtiers: {where}: {root} holds blocks of this model that this engine must not read:\n"
            f'{lines}\nUse another path, start with the same flags, or set "geometry": "own" to '
            "keep blocks of both side by side."
        )
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


def _store_obstacles(store: ForeignStore, now: Geometry) -> list[Obstacle]:
    """Why the records of a replica cannot be read."""
    if not store.ranks:
        why = (
            f"{store.folder} does not say how its records are ordered. It was written before that "
            "was kept, or imported: an engine with its flags says it at its next start"
        )
        return [Obstacle("geometry", "not described", "described", why)]
    first = store.ranks[0]
    for other in store.ranks[1:]:
        if (other.ranks, other.groups) != (first.ranks, first.groups):
            why = f"ranks {first.rank} and {other.rank} of {store.folder} differ in it"
            return [Obstacle("groups", "not the same on every rank", "the same", why)]
    return obstacles(first, now)


def _field_obstacles(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Obstacle]:
    """Fields of the manifest that no translation can bridge."""
    found = []
    there, here = stored.get("parallel", {}), now.get("parallel", {})
    for name in sorted({*there, *here} - {"tensor"}):
        if there.get(name) != here.get(name):
            why = "only tensor parallel ranks are translated"
            found.append(Obstacle(f"parallel.{name}", there.get(name), here.get(name), why))
    theirs, ours = stored.get("geometry", {}), now.get("geometry", {})
    name = "hash_block_size"
    if theirs.get(name) != ours.get(name):
        why = "keys are hashes of other stretches of the prompt"
        found.append(Obstacle(f"geometry.{name}", theirs.get(name), ours.get(name), why))
    pairs = zip(theirs.get("groups", ()), ours.get("groups", ()), strict=False)
    for number, (group, mine) in enumerate(pairs):
        for name in sorted({*group, *mine} - FREE_FIELDS - LEFT_TO_GEOMETRY):
            if group.get(name) != mine.get(name):
                field = f"geometry.groups[{number}].{name}"
                why = "another kind of KV cache"
                found.append(Obstacle(field, group.get(name), mine.get(name), why))
    return found


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Obstacle]:
    """How two geometries differ, where that alone is reason enough."""
    found = []
    for part in ("parallel", "geometry"):
        there, here = stored.get(part, {}), now.get(part, {})
        for name in sorted({*there, *here} - {"tensors", "groups"}):
            if there.get(name) != here.get(name):
                field = f"{part}.{name}"
                why = '"geometry" is "refuse"'
                found.append(Obstacle(field, there.get(name), here.get(name), why))
    if not found:
        found.append(Obstacle("geometry.groups", "other ones", "these", '"geometry" is "refuse"'))
    return found


def _refusal(name: str, problems: Sequence[Obstacle]) -> str:
    """What is wrong with one namespace."""
    unique = list(dict.fromkeys(problems))
    lines = [f"  namespace {name}:", *(f"    {problem}" for problem in unique)]
    flags = sorted({problem.flags for problem in unique if problem.flags})
    if flags:
        lines.append(f"    (it was written with {', '.join(flags)})")
    return "\n".join(lines)
