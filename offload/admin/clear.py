"""The work of ``kvtiers clear``.

It removes whole namespaces, records that have not been used for a long time, and folders that were
moved aside. It leaves alone everything that a live server uses.

Data that cannot be deleted is reported, stays visible to ``kvtiers inspect``, and is tried again by
every later ``clear`` of the path, whatever its options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.admin.offline_edits import RankFolderInUseError, is_older, remove_unused
from offload.namespaces.claims import Owner
from offload.namespaces.cleanup import NotDeletedError, delete_trash, remove_namespace, usage
from offload.namespaces.inventory import NamespaceFolder, RankFolder
from tiers.folders.folder import prepare
from tiers.offline.offline_folder import FolderChangedError


@dataclass(frozen=True, slots=True)
class RemovalFilter:
    """The conditions for a removal; all conditions that are given must be met. Data matches
    ``before_ns`` if its last use was before that time."""

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    before_ns: int = 0
    set_aside: bool = False

    def matches(self, namespace: NamespaceFolder) -> bool:
        """Return True if a namespace, or something in it, can match, regardless of age."""
        return (not self.names or namespace.name.startswith(tuple(self.names))) and (
            not self.models or namespace.model in self.models
        )


@dataclass(slots=True)
class Removal:
    """The removal of a namespace, or of a part of it.

    A part is the old records, whose number ``old`` gives by rank folder, or the folders that a tier
    moved ``aside``. ``removed_records`` is the number of old records that were removed: if a server
    started meanwhile, only some were. ``left_bytes`` is the size of what could not be deleted, and
    ``problem`` is the reason.
    """

    namespace: NamespaceFolder
    size_bytes: int
    last_used_s: float
    old: dict[RankFolder, int] = field(default_factory=dict)
    aside: list[Path] = field(default_factory=list)
    removed_records: int = 0
    done: bool = False
    owners: list[Owner] = field(default_factory=list)
    left_bytes: int = 0
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """True if the namespace itself is removed."""
        return not (self.old or self.aside)

    def to_json(self) -> dict[str, Any]:
        """The removal as plain values."""
        return {
            "namespace": self.namespace.name,
            "model": self.namespace.model,
            "whole": self.is_whole,
            "records": sum(self.old.values()) if self.old else None,
            "removed_records": self.removed_records if self.old else None,
            "bytes": self.size_bytes,
            "last_used_s": self.last_used_s,
            "removed": self.done,
            "left_bytes": self.left_bytes,
            "problem": self.problem,
            "in_use_by": sorted({owner.pid for owner in self.owners}),
        }


def find_removals(namespaces: Sequence[NamespaceFolder], wanted: RemovalFilter) -> list[Removal]:
    """List the matching data, and what earlier removals left behind. Raises whatever opening a
    folder raises."""
    found = []
    for namespace in namespaces:
        size, last_used = usage(namespace.folder)
        removal = Removal(namespace, size, last_used)
        if namespace.is_trash:
            found.append(removal)
        elif wanted.matches(namespace):
            removal.owners = namespace.owners()
            if _find(removal, wanted):
                found.append(removal)
    return found


def _find(removal: Removal, wanted: RemovalFilter) -> bool:
    """Record the parts of a namespace to remove; returns whether there are any."""
    namespace = removal.namespace

    def is_unused(last_used_s: float) -> bool:
        return not wanted.before_ns or last_used_s * 1e9 < wanted.before_ns

    if wanted.set_aside and not namespace.is_aside:
        sizes = {
            path: usage(path)
            for rank_folder in namespace.rank_folders
            for path in rank_folder.aside()
        }
        removal.aside = [path for path, (_, last_used_s) in sizes.items() if is_unused(last_used_s)]
        removal.size_bytes = sum(sizes[path][0] for path in removal.aside)
        removal.owners = []  # no server looks at it again
        return bool(removal.aside)
    return bool(namespace.name and is_unused(removal.last_used_s)) or (
        bool(wanted.before_ns) and _find_old(removal, wanted.before_ns)
    )


def _find_old(removal: Removal, before_ns: int) -> bool:
    """Count the records that were last used before ``before_ns``; return whether there are any."""
    removal.size_bytes = 0
    for rank_folder in removal.namespace.rank_folders:
        if rank_folder.kind == "empty":
            continue
        reader = rank_folder.open()
        try:
            sizes = [
                record.stored_bytes
                for batch in reader.batches()
                for record in batch
                if is_older(record, before_ns)
            ]
        finally:
            reader.close()
        if sizes:
            removal.old[rank_folder] = len(sizes)
            removal.size_bytes += sum(sizes)
    return bool(removal.old)


def remove(removals: Sequence[Removal], before_ns: int, advance: Callable[[int], None]) -> None:
    """Carry out all removals, and call ``advance`` after each.

    Modifies ``removals``. Raises the errors of ``exclusive_access``.
    """
    for removal in removals:
        try:
            removal.done = _remove(removal, before_ns)
        except RankFolderInUseError as error:
            removal.owners = [error.owner]
        except NotDeletedError as error:
            removal.problem, removal.left_bytes = str(error), error.size_bytes
        if not (removal.done or removal.problem):
            removal.owners = removal.namespace.owners() or removal.owners
        advance(1)


def _remove(removal: Removal, before_ns: int) -> bool:
    """Carry out one removal; return False if a server uses the data.

    Raises ``RankFolderInUseError`` and ``NotDeletedError``.
    """
    namespace = removal.namespace
    if namespace.is_trash:
        delete_trash(namespace.folder)
        return True
    if removal.aside:
        for path in removal.aside:
            delete_trash(path)
        return True
    if removal.is_whole:
        prepare(namespace.folder.parent, allow_network=True)
        return remove_namespace(namespace.folder.parent, namespace.name)

    def note(removed: int) -> None:
        removal.removed_records += removed

    for rank_folder in removal.old:
        before = removal.removed_records
        try:
            remove_unused(rank_folder, before_ns, note)
        except FolderChangedError:
            if rank_folder.folder.is_dir():
                raise  # otherwise somebody has removed the whole folder in the meantime
        removal.old[rank_folder] = removal.removed_records - before
    return True
