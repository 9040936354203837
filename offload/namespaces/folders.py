"""The folders of namespaces below a tier's path: opening, owners, and clean-up.

    <path>/                              mode 0700
      .kvtiers.lock                      held for the moments in which folders come or go
      <32 hex digits>/                   one namespace
        kvt-manifest.json                its fields
        replica-0/                       one data-parallel replica
          epoch                          weights epoch, bumped by a reset
          rank-0/                        what the tier of this rank keeps
          rank-0.claim                   held (flock) by the process that uses rank-0
      quarantine-<hex>/                  moved aside, because it could not be trusted

This code runs at start-up, at a reset, or on the command line. It blocks on the disk and must not
be called from vLLM's threads while they serve.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from offload.errors import NamespaceError, TierUnavailableError
from offload.namespaces.claims import (
    FolderClaimedError,
    claim,
    claim_shared,
    live_owners,
    locked,
)
from offload.namespaces.epoch_file import (
    EPOCH_NAME,
    find_epoch,
    raise_epoch,
    read_epoch,
    write_epoch,
)
from offload.namespaces.manifest import (
    MANIFEST_NAME,
    NAME,
    Namespace,
    NewerFormatError,
    UnreadableError,
    read_manifest,
    write_manifest,
)
from tiers.folders.folder import FolderError, sync_folder
from tiers.folders.folder import prepare as prepare_folder
from tiers.folders.lock_file import LockFile

logger = logging.getLogger(__name__)


def _warn(line: str) -> None:
    logger.warning("kvtiers: %s", line)


@dataclass(slots=True)
class ClaimedFolder:
    """The folder of one rank, claimed by this process until ``close``. ``epoch`` is that of this
    server's weights, ``noted_epoch`` the one in the epoch file."""

    folder: Path
    epoch: int
    noted_epoch: int
    _claim: LockFile = field(repr=False)

    def close(self) -> None:
        """Release the claim. Idempotent."""
        self._claim.close()

    def __enter__(self) -> ClaimedFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OnDamage:
    """The action for a folder that cannot be trusted: move it aside and pass one line about it to
    ``note``; or, if ``is_strict``, leave it and raise ``NamespaceError``."""

    note: Callable[[str], None] = _warn
    is_strict: bool = False


MOVE_ASIDE = OnDamage()


def open_namespace(
    root: str | Path, namespace: Namespace, on_damage: OnDamage = MOVE_ASIDE
) -> Path:
    """The folder of ``namespace`` below ``root``: created or validated, and marked as in use now.

    A folder that ``judge_namespace`` rejects is moved aside, and an empty one takes its place. In
    the following cases nothing is changed: raises ``NamespaceError`` if the manifest has a newer
    format, ``UnreadableError`` if a file cannot be read, ``FolderClaimedError`` if a process uses a
    rejected folder, ``TierUnavailableError`` if others hold the lock of ``root`` for too long, and
    ``OSError``.
    """
    base = _prepare_root(root)
    with locked(base):
        return _open_locked(base, namespace, on_damage)


def claim_rank_folder(
    root: str | Path,
    namespace: Namespace,
    *,
    replica: int,
    rank: int,
    engine: str,
    epoch_min: int = 0,
    starts: bool = False,
    on_damage: OnDamage = MOVE_ASIDE,
) -> ClaimedFolder:
    """Claim the folder of one rank of one data-parallel replica, and read its epoch.

    The epoch is raised to ``epoch_min``, for a server that has already reached a higher one.
    ``starts``: the weights come from the model's files, unlike those of an odd epoch (see
    ``bump_epoch``). ``engine`` names this server in messages to others.

    If the epoch file is damaged, the replica's folder is moved aside, because it could contain
    valid-looking records of an older epoch. Raises the errors of ``open_namespace``, and
    ``FolderClaimedError`` if another process holds the claim, or uses a folder with such a file.
    """
    base = _prepare_root(root)
    with locked(base):
        replica_dir = _open_locked(base, namespace, on_damage) / f"replica-{replica}"
        epoch = _prepare_replica(base, replica_dir, on_damage)
        wanted = epoch + epoch % 2 if starts else epoch_min
        if epoch < wanted:
            epoch = raise_epoch(replica_dir, wanted)
        folder = replica_dir / f"rank-{rank}"
        folder.mkdir(mode=0o700, exist_ok=True)
        held = claim(replica_dir / f"rank-{rank}.claim", engine)
    return ClaimedFolder(folder, epoch, epoch, held)


def share_rank_folder(
    root: str | Path,
    namespace: Namespace,
    *,
    rank: int,
    engine: str,
    on_damage: OnDamage = MOVE_ASIDE,
) -> ClaimedFolder:
    """Claim the folder of one rank that others share: all replicas of all servers with this
    namespace.

    The epoch of a server that starts is that of the model's files, 0, whatever the epoch file says;
    the tier itself carries out a reset (docs/decisions/0081). The epoch file shows whether a server
    that did not share the folder was reset. If its content is damaged and no process uses the
    folder, the replica's folder is moved aside. A damaged folder that others use is joined as it
    is, unless ``on_damage`` is strict. Raises the errors of ``open_namespace``, and
    ``TierUnavailableError`` if a process that does not share has the folder.
    """
    base = _prepare_root(root)
    with locked(base, may_lack_locks=True):
        replica_dir = replica_folder(base, namespace)
        if on_damage.is_strict or not _is_joined_damaged(replica_dir):
            _open_locked(base, namespace, on_damage)
        noted_epoch = _noted_epoch(base, replica_dir, on_damage)
        replica_dir.mkdir(mode=0o700, exist_ok=True)
        if not (replica_dir / EPOCH_NAME).exists():  # for a later server that does not share
            write_epoch(replica_dir, 0)
        # written last, because ranks without an epoch file count as damaged
        folder = replica_dir / f"rank-{rank}"
        folder.mkdir(mode=0o700, exist_ok=True)
        held = claim_shared(replica_dir / f"rank-{rank}.claim", engine)
    return ClaimedFolder(folder, 0, noted_epoch, held)


def _is_joined_damaged(replica_dir: Path) -> bool:
    """True if the namespace of ``replica_dir`` is damaged and processes use ``replica_dir``.

    They have decided already whether they trust its records, each of which names the namespace. An
    engine that joins them relies on that: otherwise no engine could be added to a group before all
    of its engines had ended.
    """
    folder = replica_dir.parent
    trouble = judge_namespace(folder)
    if not trouble or _is_something_else(folder) or not live_owners(replica_dir):
        return False
    _warn(f"{folder} cannot be trusted ({trouble}), but stays where it is while others use it")
    return True


def _noted_epoch(base: Path, replica_dir: Path, on_damage: OnDamage) -> int:
    """The epoch in the epoch file of a folder that is shared; 0 if the file is damaged."""
    try:
        return read_epoch(replica_dir)
    except NamespaceError:
        if live_owners(replica_dir):  # they have decided already whether they trust the records
            return 0
    try:
        # Where nothing is locked, another process may have replaced the folder in the meantime.
        return read_epoch(replica_dir)
    except NamespaceError as error:
        _set_aside(base, replica_dir, str(error), on_damage)
        return 0


def replica_folder(root: str | Path, namespace: Namespace, replica: int = 0) -> Path:
    """The folder with a replica's epoch, for ``read_epoch`` and ``bump_epoch``. Accesses no
    file."""
    return Path(root) / namespace.name / f"replica-{replica}"


def _prepare_root(root: str | Path) -> Path:
    base = Path(root)
    try:
        prepare_folder(base, allow_network=True)
    except FolderError as error:
        raise TierUnavailableError(str(error)) from error
    return base


def judge_namespace(folder: Path) -> str:
    """The reason why the folder of a namespace cannot be used; empty if it can, or if it does not
    exist yet.

    Used at start and by the command line. Raises ``NewerFormatError``, and ``UnreadableError`` if
    the reason cannot be known now.
    """
    if _is_something_else(folder):
        return "is not a folder"
    try:
        found = read_manifest(folder)
    except NewerFormatError:
        raise
    except NamespaceError as error:
        return str(error)
    if found is None:
        content = [name for name in _names_in(folder) if not name.startswith(".")]
        return "has no manifest" if content else ""
    return "" if found.name == folder.name else "contains the manifest of another namespace"


def judge_replica(replica_dir: Path) -> str:
    """The reason why the records of a replica's ranks cannot be used; empty if they can.

    Otherwise like ``judge_namespace``.
    """
    if _is_something_else(replica_dir):
        return "is not a folder"
    try:
        is_missing = find_epoch(replica_dir) is None
    except NamespaceError as error:
        return str(error)
    if is_missing and any(name.startswith("rank-") for name in _names_in(replica_dir)):
        return "its epoch file is missing"
    return ""


def _is_something_else(folder: Path) -> bool:
    try:
        return not stat.S_ISDIR(os.lstat(folder).st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnreadableError(folder, error) from error


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableError(folder, error) from error


def _open_locked(base: Path, namespace: Namespace, on_damage: OnDamage) -> Path:
    folder = base / namespace.name
    _set_aside_if_damaged(base, folder, judge_namespace, on_damage)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / MANIFEST_NAME).exists():
        write_manifest(folder, namespace)
        sync_folder(base)
    os.utime(folder / MANIFEST_NAME)
    return folder


def _prepare_replica(base: Path, replica_dir: Path, on_damage: OnDamage) -> int:
    """Create a replica's folder with its epoch file, or read the epoch of an existing one."""
    _set_aside_if_damaged(base, replica_dir, judge_replica, on_damage)
    replica_dir.mkdir(mode=0o700, exist_ok=True)
    epoch = find_epoch(replica_dir)
    if epoch is None:
        epoch = 0
        write_epoch(replica_dir, epoch)
        sync_folder(replica_dir.parent)
    return epoch


def _set_aside_if_damaged(
    base: Path, folder: Path, judge: Callable[[Path], str], on_damage: OnDamage
) -> None:
    """Move a folder aside that ``judge`` rejects.

    Raises ``FolderClaimedError`` if a process uses it, because that process would lose its records.
    A user who starts a server on a path in use gets that error for a whole folder, too, and the
    server waits in the same way for one that is about to end.
    """
    why = judge(folder)
    if not why:
        return
    for owner in live_owners(folder):
        engine = f" (engine {owner.engine})" if owner.engine else ""
        raise FolderClaimedError(
            f"{folder} cannot be trusted ({why}), but it is in use by pid {owner.pid}{engine} and "
            "perhaps others, so it was left as it is",
            "Stop them, or give this server another path.",
        )
    # Where nothing is locked, another process may have replaced the folder in the meantime.
    if why := judge(folder):
        _set_aside(base, folder, why, on_damage)


def _set_aside(base: Path, folder: Path, why: str, on_damage: OnDamage) -> None:
    if on_damage.is_strict:
        raise NamespaceError(
            f"{folder} cannot be trusted ({why}) and was left as it is. To begin empty use "
            'recovery "quiet", or remove it with kvtiers clear'
        )
    label = NAME.search(folder.name) or NAME.search(folder.parent.name)
    assert label is not None, folder
    aside = base / f"quarantine-{label[0]}-{secrets.token_hex(4)}"
    os.rename(folder, aside)
    sync_folder(base)
    on_damage.note(f"{folder} cannot be trusted ({why}): moved to {aside.name}, starting empty")
