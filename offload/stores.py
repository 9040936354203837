"""Finds the stores below a folder, for the command line: whose they are, and who uses them.

A folder may be a tier's path (with namespaces, replicas and ranks below), one of these inside it,
or the folder of a single tier that was opened without vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.claims import Owner, entries, holder, sharers
from offload.errors import NamespaceError
from offload.namespace import NAME, Namespace, read_manifest
from tiers.file_reader import FileReader, is_file_store
from tiers.folder import LOCK_NAME as TIER_LOCK_NAME
from tiers.lmdb_index import IndexUnusableError, index_exists
from tiers.lmdb_reader import LmdbReader
from tiers.outside import OutsideStore

QUARANTINE = re.compile(r"quarantine-[0-9a-f]{32}-[0-9a-f]{8}", re.ASCII)
_REPLICA = re.compile(r"replica-([0-9]{1,6})", re.ASCII)
_RANK = re.compile(r"rank-([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one rank. ``namespace`` is the name of its namespace's folder, empty for a tier
    that was opened without one (``replica`` and ``rank`` are 0 then)."""

    folder: Path
    namespace: str = ""
    replica: int = 0
    rank: int = 0

    @property
    def kind(self) -> str:
        """``lmdb``, ``file``, or ``empty``."""
        if index_exists(self.folder):
            return "lmdb"
        return "file" if is_file_store(self.folder) else "empty"

    @property
    def claim(self) -> Path:
        """The file by which a server claims this rank."""
        return self.folder.with_name(f"{self.folder.name}.claim")

    def owner(self) -> Owner | None:
        """The process that uses it now, or one of those that share it."""
        found = holder(self.claim) if self.namespace else None
        return found or next(iter(self.sharers()), None) or holder(self.folder / TIER_LOCK_NAME)

    def owners(self) -> list[Owner]:
        """Every process that uses it now."""
        owner = self.owner()
        return self.sharers() or ([owner] if owner is not None else [])

    def sharers(self) -> list[Owner]:
        """The processes that share it now."""
        claims = sharers(self.claim) if self.namespace else []
        locks = sorted(self.folder.glob("sharer-*.lock"))
        return claims or [owner for lock in locks if (owner := holder(lock)) is not None]

    def open(self, key_file: str = "") -> OutsideStore:
        """Look at its records. Raises ``IndexUnusableError``, ``OSError`` or ``TierError``."""
        if self.kind == "file":
            return FileReader(self.folder)
        is_owned = self.owner() is not None
        try:
            return LmdbReader(self.folder, is_owned=is_owned, key_file=key_file)
        except IndexUnusableError:
            # A server that starts now writes what was being checked: look again as at any live one.
            if is_owned or self.owner() is None:
                raise
            return LmdbReader(self.folder, is_owned=True, key_file=key_file)


@dataclass(slots=True)
class Home:
    """A namespace below a path, or something that was moved aside. ``problem`` says what is wrong
    with its manifest."""

    name: str
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    stores: list[Store] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model's name, empty if it is not known."""
        return model_of(self.fields)

    def owners(self) -> list[Owner]:
        """Who uses any of its ranks now."""
        return [owner for store in self.stores for owner in store.owners()]


def model_of(fields: dict[str, Any]) -> str:
    """The model's name in the fields of a namespace."""
    model = fields.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return name if isinstance(name, str) else ""


def find_homes(folder: Path) -> list[Home]:
    """Everything of ours at or below ``folder``: namespaces by name, then what was moved aside, or
    one nameless home with the single tier that lies here. Raises ``NotADirectoryError``."""
    if not folder.is_dir():
        raise NotADirectoryError(str(folder))
    inside = _inside_a_namespace(folder)
    if inside is not None:
        return [inside]
    names = [name for name in entries(folder) if NAME.fullmatch(name)]
    names += [name for name in entries(folder) if QUARANTINE.fullmatch(name)]
    homes = [_home(folder / name) for name in names if _is_real(folder / name)]
    if not homes and (index_exists(folder) or is_file_store(folder)):
        homes = [Home("", folder, stores=[Store(folder)])]
    return homes


def _inside_a_namespace(folder: Path) -> Home | None:
    """The namespace that ``folder`` is, or lies in, with only the stores at or below it."""
    for parent in (folder.absolute(), *folder.absolute().parents[:2]):
        if NAME.fullmatch(parent.name) or QUARANTINE.fullmatch(parent.name):
            home = _home(parent)
            home.stores = [s for s in home.stores if s.folder.is_relative_to(folder.absolute())]
            return home
    return None


def _home(folder: Path) -> Home:
    found = Home(folder.name, folder, stores=list(_stores(folder)))
    try:
        namespace: Namespace | None = read_manifest(folder)
    except NamespaceError as error:
        found.problem = str(error)
    else:
        found.fields = namespace.fields if namespace else {}
        found.problem = "" if namespace else "has no manifest"
        if namespace and NAME.fullmatch(folder.name) and namespace.name != folder.name:
            found.problem = "holds the manifest of another namespace"
    return found


def _stores(home: Path) -> Iterator[Store]:
    for replica in entries(home):
        if (number := _REPLICA.fullmatch(replica)) is None or not _is_real(home / replica):
            continue
        for rank in entries(home / replica):
            folder = home / replica / rank
            if (which := _RANK.fullmatch(rank)) is not None and _is_real(folder):
                yield Store(folder, home.name, int(number[1]), int(which[1]))


def _is_real(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()
