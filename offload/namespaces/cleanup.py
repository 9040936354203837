"""Compares other namespaces below a tier's path with the server's own, and removes them to free
space.

The configured capacity of a tier covers everything below its path, including data of other models.
A folder is renamed to ``.trash-<hex>`` before it is removed, so no process opens a partly removed
folder. Data that cannot be deleted stays there and counts towards the capacity; the next start or
``clear`` tries again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from offload.errors import NamespaceError
from offload.namespaces.claims import claims_below, entries, holder, locked
from offload.namespaces.manifest import (
    MANIFEST_NAME,
    NAME,
    FieldDifference,
    Namespace,
    UnreadableError,
    differing_fields,
    read_manifest,
)
from offload.sizes import rounded_size
from tiers.folders.folder import sync_folder
from tiers.lmdb.index import LOCK_NAME as READERS_NAME

logger = logging.getLogger(__name__)

OTHER_NAMESPACES_MAX = 256
QUARANTINE = re.compile(r"quarantine-[0-9a-f]{32}-[0-9a-f]{8}", re.ASCII)
TRASH = re.compile(r"\.trash-[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace below a path, or something that was moved aside. ``size_bytes`` is its size on
    disk, ``last_used`` the time of its last use in seconds since 1970."""

    name: str
    size_bytes: int
    last_used: float


class NotDeletedError(Exception):
    """A namespace was removed, but some of its files could not be deleted; the message gives the
    reason."""

    def __init__(self, folder: Path, why: str) -> None:
        self.folder = folder
        self.size_bytes = usage(folder)[0]
        super().__init__(f"{folder} ({rounded_size(self.size_bytes)}) could not be deleted: {why}")


def other_namespaces(root: str | Path, keep: Namespace | None = None) -> list[StoredNamespace]:
    """Every kvtiers entry below ``root`` except ``keep``, least recently used first.

    Includes folders that were moved aside. Links are neither followed nor counted.
    """
    found = []
    for name in entries(Path(root)):
        ours = NAME.fullmatch(name) or QUARANTINE.fullmatch(name)
        real = ours and stat.S_ISDIR(_lstat_mode(Path(root) / name))
        if real and (keep is None or name != keep.name):
            found.append(StoredNamespace(name, *usage(Path(root) / name)))
    return sorted(found, key=lambda stored: (stored.last_used, stored.name))


def remove_namespace(root: str | Path, name: str) -> bool:
    """Delete one entry of ``other_namespaces``; ``False`` if a live process uses it.

    Raises ``NotDeletedError`` if only a part of it could be deleted, ``ValueError`` if ``name`` is
    not a name of kvtiers, and ``OSError``.
    """
    if not (NAME.fullmatch(name) or QUARANTINE.fullmatch(name)):
        raise ValueError(f"not the name of a namespace: {name!r}")
    base = Path(root)
    with locked(base):
        # Claims are taken under the same lock, so no process can begin to use it in between.
        if any(holder(claim) for claim in claims_below(base, name)):
            return False
        trash = base / f".trash-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(base / name, trash)
            sync_folder(base)
    delete_trash(trash)
    return True


def delete_trash(folder: Path) -> None:
    """Delete the remains of a removal, as far as possible. Raises ``NotDeletedError``."""
    why = _delete(folder)
    if why:
        raise NotDeletedError(folder, why)


def make_space(
    root: str | Path,
    keep: Namespace,
    capacity: int,
    others_share: float = 0.5,
    note: Callable[[str], None] | None = None,
    wanted: Collection[str] = (),
) -> int:
    """Remove the least recently used other namespaces until they take at most ``others_share`` of
    ``capacity``, and return the bytes that are left for ``keep``.

    The configured capacity covers everything below the path, so the result (divided by the ranks)
    is the capacity with which a tier is opened. Namespaces in use and ``wanted`` ones are left
    alone. The call is idempotent, so every rank can make it and gets the same answer. Data that
    cannot be deleted causes a warning, and counts towards ``capacity``.
    """
    base = Path(root)
    trash = [base / name for name in entries(base) if TRASH.fullmatch(name)]
    stuck = sum(map(_delete_or_warn, trash))
    others = other_namespaces(root, keep)
    total = sum(stored.size_bytes for stored in others)
    for stored in others:
        if total <= capacity * others_share:
            break
        if stored.name in wanted:
            continue
        try:
            is_gone = remove_namespace(root, stored.name)
        except NotDeletedError as error:
            logger.warning("kvtiers: %s", error)
            is_gone, stuck = True, stuck + error.size_bytes
        if is_gone:
            total -= stored.size_bytes
            if note:
                note(f"removed {stored.name} ({rounded_size(stored.size_bytes)}) to free space")
    return max(0, capacity - total - stuck)


def _delete_or_warn(trash: Path) -> int:
    """Delete trash; return how many bytes of it are left."""
    try:
        delete_trash(trash)
    except NotDeletedError as error:
        logger.warning("kvtiers: %s", error)
        return error.size_bytes
    return 0


def describe_nearest_namespace(
    root: str | Path, namespace: Namespace, known: Collection[str] = ()
) -> list[str]:
    """Explain why no stored data below ``root`` belongs to ``namespace``.

    Returns one line per differing field of the nearest other namespace, with both values; returns
    nothing if all others are ``known``.
    """
    base = Path(root)
    names = [name for name in entries(base) if NAME.fullmatch(name) and name not in known]
    names.sort(key=lambda name: -_mtime(base / name / MANIFEST_NAME))
    nearest: tuple[str, list[FieldDifference]] | None = None
    for name in names[:OTHER_NAMESPACES_MAX]:
        try:
            other = read_manifest(base / name)
        except (NamespaceError, UnreadableError):
            continue  # the process that opens it reports the problem
        differences = differing_fields(other, namespace) if other else []
        if differences and (nearest is None or len(differences) < len(nearest[1])):
            nearest = name, differences
    if nearest is None:
        return []
    return [
        f"stored blocks of namespace {nearest[0]} are not used, because {path} differs: "
        f"{_cut(stored)} stored, {_cut(now)} now"
        for path, stored, now in nearest[1]
    ]


def _delete(path: Path) -> str:
    """Delete a folder, a file or a link as far as possible; returns the first error.

    Other processes may do the same at the same time.
    """
    troubles: list[str] = []

    def tried(remove: Callable[[str | Path], None], what: str | Path) -> None:
        try:
            remove(what)
        except FileNotFoundError:
            pass
        except OSError as error:
            troubles.append(f"{what}: {error.strerror}")

    if not stat.S_ISDIR(_lstat_mode(path)):
        tried(os.unlink, path)
        return "".join(troubles[:1])
    for parent, folders, files in os.walk(path, topdown=False):
        for name in files:
            tried(os.unlink, os.path.join(parent, name))
        for name in folders:  # these include links to folders, which are not followed
            inner = os.path.join(parent, name)
            tried(os.unlink if os.path.islink(inner) else os.rmdir, inner)
    tried(os.rmdir, path)
    return "".join(troubles[:1])


def usage(folder: Path) -> tuple[int, float]:
    """Disk bytes of everything in ``folder`` and the newest modification time. Links are neither
    followed nor counted.

    LMDB's table of readers does not count as use, because processes that only read change it.
    """
    total, newest = 0, _mtime(folder)
    stack = [folder] if stat.S_ISDIR(_lstat_mode(folder)) else []
    while stack:
        with contextlib.suppress(OSError), os.scandir(stack.pop()) as inside:
            for entry in inside:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_blocks * 512
                    if entry.name != READERS_NAME:
                        newest = max(newest, found.st_mtime)
                    if stat.S_ISDIR(found.st_mode):
                        stack.append(Path(entry.path))
    return total, newest


def _lstat_mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _cut(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
