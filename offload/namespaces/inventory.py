"""Finds the rank folders below a path for the command line.

It lists the namespaces and their users, and reports what the next server to start would do with
them. ``RankFolder.judge`` calls the functions of a starting server by level: ``judge_namespace``
and ``judge_replica`` for the folders, ``tiers.lmdb.folder`` or ``tiers.files.exclusive_folder`` for
the files, and ``judge_epochs`` for both together.

A folder can be a tier's path (with namespaces, replicas and ranks below it), a namespace, replica
or rank inside such a path, or the folder of a single tier that was opened without vLLM.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import NamespaceError
from offload.namespaces.claims import Owner, engines, entries, holder, members
from offload.namespaces.cleanup import QUARANTINE, TRASH
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.folders import judge_namespace, judge_replica
from offload.namespaces.geometry import GEOMETRY_BYTES_MAX, Geometry
from offload.namespaces.manifest import (
    NAME,
    Namespace,
    NewerFormatError,
    UnreadableError,
    read_manifest,
    read_small_file,
)
from tiers.adapters.reopening import judge_epochs
from tiers.folders.folder import LOCK_NAME as TIER_LOCK_NAME
from tiers.folders.folder import QUARANTINE_PREFIX, FolderUnusableError
from tiers.lmdb.folder import is_lmdb_folder
from tiers.lmdb.index import IndexUnusableError, check_owner
from tiers.offline.file_reader import FileReader, is_file_folder
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import OfflineFolder
from tiers.record import Identity

REPLICA = re.compile(r"replica-([0-9]{1,6})", re.ASCII)
_RANK = re.compile(r"rank-([0-9]{1,6})", re.ASCII)


class Standing(enum.Enum):
    """How the next start treats a rank folder.
    * ``EMPTY``: begin empty, because nothing was stored.
    * ``STALE``: begin empty, because the weights have been replaced since then.
    * ``WHOLE``: use its records.
    * ``DAMAGED``: begin empty because it cannot be trusted, or refuse to start if recovery is
      strict.
    * ``NEWER``: refuse to start, because a newer version wrote the folder.
    * ``UNREADABLE``: refuse to start, because a file that decides this cannot be read now.
    """

    EMPTY = "empty"
    WHOLE = "whole"
    STALE = "stale"
    DAMAGED = "damaged"
    NEWER = "newer"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FolderVerdict:
    """See ``Standing``; ``why`` is empty if there is nothing to explain."""

    standing: Standing
    why: str = ""

    @property
    def problem(self) -> str:
        """The fault that a start would find; empty if there is none."""
        if self.standing is Standing.DAMAGED:
            return f"damaged: {self.why}"
        return self.why if self.standing in (Standing.NEWER, Standing.UNREADABLE) else ""

    @property
    def remark(self) -> str:
        """A remark for the operator about a folder that is not damaged."""
        return self.why if self.standing is Standing.STALE else ""


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of one rank. ``namespace`` is the name of its namespace's folder, empty for a tier
    that was opened without one (``replica`` and ``rank`` are 0 then)."""

    folder: Path
    namespace: str = ""
    replica: int = 0
    rank: int = 0

    @property
    def kind(self) -> str:
        """``lmdb``, ``file``, or ``empty``."""
        if is_lmdb_folder(self.folder):
            return "lmdb"
        return "file" if is_file_folder(self.folder) else "empty"

    @property
    def claim(self) -> Path:
        """The file by which a server claims this rank."""
        return self.folder.with_name(f"{self.folder.name}.claim")

    def owner(self) -> Owner | None:
        """The process that uses the folder at present, or one of the processes that share it."""
        found = holder(self.claim) if self.namespace else None
        return found or next(iter(self.members()), None) or holder(self.folder / TIER_LOCK_NAME)

    def owners(self) -> list[Owner]:
        """Every process that uses it at present."""
        owner = self.owner()
        return self.members() or ([owner] if owner is not None else [])

    def members(self) -> list[Owner]:
        """The processes that share it at present."""
        claims = members(self.claim) if self.namespace else []
        locks = sorted(self.folder.glob("sharer-*.lock"))
        held = [owner for lock in locks if (owner := holder(lock)) is not None]
        return claims or held or engines(self.folder)

    def aside(self) -> list[Path]:
        """Folders of files that its tier moved aside, because they could not be trusted."""
        return sorted(self.folder.glob(f"{QUARANTINE_PREFIX}*"))

    def judge(self, key_file: str = "") -> tuple[FolderVerdict, OfflineFolder | None]:
        """Judge the folder as a starting server would. Returns the verdict, and the folder's
        records if they can be read (the caller closes them). Raises ``OSError`` or
        ``TierError``."""
        has_folders = bool(NAME.fullmatch(self.namespace))
        verdict = self._judge_folders() if has_folders else None
        if self.kind == "empty":
            return verdict or FolderVerdict(Standing.EMPTY), None
        try:
            reader = self.open(key_file)
        except FolderUnusableError as error:
            return verdict or FolderVerdict(Standing.DAMAGED, str(error)), None
        if verdict is None and has_folders:
            verdict = self._judge_records(reader)
        return verdict or FolderVerdict(Standing.WHOLE), reader

    def _judge_folders(self) -> FolderVerdict | None:
        """Judge the folders that contain this one."""
        replica = self.folder.parent
        try:
            trouble = judge_namespace(replica.parent) or judge_replica(replica)
        except NewerFormatError as error:
            return FolderVerdict(Standing.NEWER, str(error))
        except UnreadableError as error:
            return FolderVerdict(Standing.UNREADABLE, str(error))
        return FolderVerdict(Standing.DAMAGED, trouble) if trouble else None

    def _judge_records(self, reader: OfflineFolder) -> FolderVerdict | None:
        """Judge whether the records belong to the folder's namespace, rank and epoch."""
        epoch = reader.epoch
        try:
            # read after the records, because a reset changes the epoch first
            noted = read_epoch(self.folder.parent)
            if reader.owner is not None:
                records_of = self._described() or reader.owner.namespace
                check_owner(reader.owner, Identity(records_of, self.rank))
        except (FolderUnusableError, NamespaceError) as error:
            return FolderVerdict(Standing.DAMAGED, str(error))
        except UnreadableError as error:
            return FolderVerdict(Standing.UNREADABLE, str(error))
        # the engines that share the folder decide about epochs, unless a reset began afterwards
        if reader.is_shared and (self.kind == "file" or epoch >= noted):
            return None
        trouble = judge_epochs(epoch, noted)
        if trouble:
            return FolderVerdict(Standing.DAMAGED, trouble)
        start = noted + noted % 2
        if epoch == start or self.owner() is not None:
            return None
        return FolderVerdict(
            Standing.STALE,
            f"its records are of epoch {epoch}, but the next start begins epoch {start}: the "
            f"weights have been replaced, so none of its records will be used",
        )

    def _described(self) -> bytes:
        """The namespace whose records the last server kept here; empty if it is unknown."""
        path = self.folder.with_name(f"{self.folder.name}.geometry.json")
        try:
            content = read_small_file(path, GEOMETRY_BYTES_MAX)
            return Geometry.load(content, str(path)).records if content is not None else b""
        except (NamespaceError, UnreadableError):
            return b""

    def open(self, key_file: str = "") -> OfflineFolder:
        """Open its records. Raises ``FolderUnusableError``, ``OSError`` or ``TierError``."""
        if self.kind == "file":
            return FileReader(self.folder)
        is_owned = self.owner() is not None
        try:
            return LmdbReader(self.folder, is_owned=is_owned, key_file=key_file)
        except IndexUnusableError:
            # A server that is starting now may have written the files while they were being
            # checked, so check again, as for any live server.
            if is_owned or self.owner() is None:
                raise
            return LmdbReader(self.folder, is_owned=True, key_file=key_file)


@dataclass(slots=True)
class NamespaceFolder:
    """A namespace below a path, or a folder that was moved aside. ``problem`` says what is wrong
    with its manifest."""

    name: str
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    rank_folders: list[RankFolder] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model's name; empty if unknown."""
        return model_of(self.fields)

    @property
    def is_aside(self) -> bool:
        """True if it was moved aside because it could not be trusted."""
        return bool(QUARANTINE.fullmatch(self.name))

    @property
    def is_trash(self) -> bool:
        """True if it was removed but could not be deleted completely."""
        return bool(TRASH.fullmatch(self.name))

    @property
    def is_served(self) -> bool:
        """True if a start may use this data, so that damage in it matters."""
        return not (self.is_aside or self.is_trash)

    def owners(self) -> list[Owner]:
        """The owners that use any of its ranks at present."""
        return [owner for rank_folder in self.rank_folders for owner in rank_folder.owners()]


def model_of(fields: dict[str, Any]) -> str:
    """The model's name in the fields of a namespace."""
    model = fields.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return name if isinstance(name, str) else ""


def find_namespaces(folder: Path) -> list[NamespaceFolder]:
    """Find all kvtiers data at or below ``folder``.

    Namespaces come first, by name, then folders that were moved aside and remains of removed ones.
    If ``folder`` is that of a single tier, the result is one nameless namespace. Raises
    ``NotADirectoryError``.
    """
    if not folder.is_dir():
        raise NotADirectoryError(str(folder))
    inside = _inside_a_namespace(folder)
    if inside is not None:
        return [inside]
    names = entries(folder)
    namespaces = [_namespace_in(folder / name) for name in names if NAME.fullmatch(name)]
    aside = [folder / name for name in names if QUARANTINE.fullmatch(name)]
    namespaces += [_namespace_in(path) for path in aside if _is_real(path)]
    trash = [folder / name for name in names if TRASH.fullmatch(name)]
    namespaces += [
        NamespaceFolder(path.name, path, problem="could not be deleted") for path in trash
    ]
    if not namespaces and (is_lmdb_folder(folder) or is_file_folder(folder)):
        namespaces = [NamespaceFolder("", folder, rank_folders=[RankFolder(folder)])]
    return namespaces


def _inside_a_namespace(folder: Path) -> NamespaceFolder | None:
    """The namespace at or above ``folder``, with only the rank folders at or below it."""
    for parent in (folder.absolute(), *folder.absolute().parents[:2]):
        if NAME.fullmatch(parent.name) or QUARANTINE.fullmatch(parent.name):
            return _namespace_in(parent, folder.absolute())
    return None


def _namespace_in(folder: Path, below: Path | None = None) -> NamespaceFolder:
    """The namespace in ``folder``, with all its rank folders or only those below ``below``."""
    found = NamespaceFolder(folder.name, folder)
    try:
        if NAME.fullmatch(folder.name):
            found.problem = _problem_of(folder)
        if _is_real(folder):
            ranks = _rank_folders(folder)
            found.rank_folders = [
                one for one in ranks if one.folder.is_relative_to(below or folder)
            ]
            namespace: Namespace | None = read_manifest(folder)
            found.fields = namespace.fields if namespace else {}
    except (NamespaceError, UnreadableError) as error:
        found.problem = str(error)
    return found


def _problem_of(namespace: Path) -> str:
    """The reason why the next start would not use a namespace. Raises ``NewerFormatError``."""
    try:
        return judge_namespace(namespace)
    except UnreadableError as error:
        return str(error)


def _rank_folders(namespace: Path) -> Iterator[RankFolder]:
    for replica in entries(namespace):
        if (number := REPLICA.fullmatch(replica)) is None or not _is_real(namespace / replica):
            continue
        for rank in entries(namespace / replica):
            folder = namespace / replica / rank
            if (which := _RANK.fullmatch(rank)) is not None and _is_real(folder):
                yield RankFolder(folder, namespace.name, int(number[1]), int(which[1]))


def _is_real(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()
