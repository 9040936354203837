"""``kvtiers export``: writes the records of a namespace to one file.

A server may write to the same folder meanwhile: records that the server evicts are left out, and
every record is verified before it is written. Records are ordered by their last use, oldest first,
so that a tier filled from the file has the same order.

The export writes to a part file, which it renames when it is complete. A kernel lock on the part
file ensures that only one process at a time writes, removes or renames it. The lock ends with its
process: the next export overwrites the part file of a killed one. After taking the lock, the export
checks that the locked file still has the part file's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiofiles

from offload.admin.verify import RateLimit
from offload.errors import NamespaceError, OffloadError
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.inventory import NamespaceFolder, RankFolder
from tiers.base import Key
from tiers.folders.folder import sync_folder, try_flock
from tiers.folders.lock_file import LockFile
from tiers.io.threads import DaemonExecutor
from tiers.offline.archive import MAGIC, Record, about_frame, record_frame
from tiers.offline.interrupts import run_until_interrupted
from tiers.offline.offline_folder import Checker, OfflineFolder, RecordHealth

EXPORT_FORMAT = 1
_RESET = "{} was reset during the export"


class ExportFileError(OffloadError):
    """An export cannot be written to this file now."""


@contextlib.contextmanager
def export_file(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Create a file, readable only by its owner, and rename it durably at the end of the block.

    If the block raises, the file is removed. Raises ``ExportFileError`` and ``OSError``.
    """
    part = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.closing(LockFile(part)) as lock:
        _take(lock, part)
        try:
            # opened again: a forked child keeps a copy of this file and must not hold the lock
            with open(part, "wb", opener=lambda name, _: os.open(name, flags)) as file:
                # another export may have created the file before this one took the lock
                if not overwrite and os.path.lexists(path):
                    raise ExportFileError(
                        f"{path} was created in the meantime. Name another file, or give "
                        "--overwrite"
                    )
                os.fchmod(file.fileno(), 0o600)
                file.truncate(0)
                yield file
                with _names(part):
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:  # Ctrl-C as well leaves no partial file
            part.unlink(missing_ok=True)
            raise
    sync_folder(path.absolute().parent)


@contextlib.contextmanager
def _names(path: object) -> Iterator[None]:
    """Add the file's name to the ``OSError`` of a write, which does not know it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _take(lock: LockFile, part: Path) -> None:
    """Lock a part file. Raises ``ExportFileError`` if another export has it."""
    found = os.fstat(lock.fd)
    if not stat.S_ISREG(found.st_mode):
        raise ExportFileError(f"{part} is not a regular file. Remove it, or name another file")
    try:
        is_mine = try_flock(lock.fd, fcntl.LOCK_EX)
        is_named = is_mine and os.path.samestat(found, os.lstat(part))
    except FileNotFoundError:
        is_named = False
    if not is_named:  # locked by another export, or renamed by one that has ended since ``open``
        raise ExportFileError(
            f"another export is writing {part}. Wait until it ends, or name another file"
        )


def weights_problem(rank_folder: RankFolder, reader: OfflineFolder) -> str:
    """Return the reason why no import may use the records of a rank; empty if there is none.

    The common epoch of engines that share a folder stands for the weights of the model's files,
    whatever its number is. In a folder of one engine, an odd epoch stands for weights that may be
    in no file. Raises ``NamespaceError``.
    """
    noted = read_epoch(rank_folder.folder.parent)
    if reader.is_shared and reader.epoch > noted:  # such engines do not change the epoch file
        return ""
    if noted == reader.epoch and noted % 2 == 0:
        return ""
    return (
        f"its server was reset (epoch {max(noted, reader.epoch)}), so its records may have been "
        "computed with weights that are in no file. Start the server again, and export what it "
        "stores from then on"
    )


@dataclass(slots=True)
class Exported:
    """Counts of one rank's records. Three kinds of records were left out: ``damaged`` ones,
    ``unread`` ones (encrypted, no key), and ones that were ``gone`` before the export could read
    them."""

    replica: int
    rank: int
    records: int = 0
    payload_bytes: int = 0
    gone: int = 0
    damaged: int = 0
    unread: int = 0


def export_namespace(
    namespace: NamespaceFolder,
    rank_folders: Sequence[tuple[RankFolder, OfflineFolder]],
    file: IO[bytes],
    *,
    rate_limit: RateLimit,
    advance: Callable[[int], None],
) -> list[Exported]:
    """Write the complete export of folders without a ``weights_problem``. Raises
    ``FolderChangedError``, ``NamespaceError`` and ``OSError``, after which the file is useless."""
    return run_until_interrupted(_export(namespace, rank_folders, file, rate_limit, advance))


class _ArchiveFile:
    """Writes frames in a daemon thread, one at a time, while the caller prepares the next one."""

    def __init__(self, file: Any, executor: DaemonExecutor, path: object) -> None:
        """``file`` is an ``aiofiles`` file that uses the executor; ``path`` is for messages."""
        self._file, self._executor, self._path = file, executor, path
        self._writing: asyncio.Task[None] | None = None

    async def write(self, *parts: bytes | memoryview) -> None:
        """Begin to write. The parts must not change until the next call returns, which raises the
        ``OSError`` of this one."""
        await self.flush()
        self._writing = asyncio.create_task(self._file.writelines(parts))
        await asyncio.sleep(0)  # the task passes its work to the thread

    async def flush(self) -> None:
        """Wait until everything is written. Raises ``OSError``."""
        if self._writing is not None:
            with _names(self._path):
                await self._writing

    async def aclose(self) -> None:
        """Close the file when no write is in progress."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        with _names(self._path):
            await self._file.close()
        self._executor.shutdown(wait=False)


async def _export(
    namespace: NamespaceFolder,
    rank_folders: Sequence[tuple[RankFolder, OfflineFolder]],
    file: IO[bytes],
    rate_limit: RateLimit,
    advance: Callable[[int], None],
) -> list[Exported]:
    executor = DaemonExecutor("kvtiers-export")
    opened = await aiofiles.open(file.fileno(), "wb", closefd=False, executor=executor)
    async with contextlib.aclosing(_ArchiveFile(opened, executor, file.name)) as out:
        about = {"format": EXPORT_FORMAT, "namespace": namespace.name, "fields": namespace.fields}
        await out.write(MAGIC, *about_frame("M", about))
        found = [
            await _export_folder(one, reader, out, rate_limit, advance)
            for one, reader in rank_folders
        ]
        await out.write(*about_frame("E", {"records": sum(one.records for one in found)}))
        await out.flush()
    return found


async def _export_folder(
    rank_folder: RankFolder,
    reader: OfflineFolder,
    out: _ArchiveFile,
    rate_limit: RateLimit,
    advance: Callable[[int], None],
) -> Exported:
    counts = Exported(rank_folder.replica, rank_folder.rank)
    checker, other, epoch = Checker(reader), Checker(reader), reader.epoch
    found: list[tuple[int, Key, int]] = []
    for batch in reader.batches():
        found += [(record.use_ns, record.key, record.payload_bytes) for record in batch]
        await asyncio.sleep(0)  # Ctrl-C takes effect here; listing many files takes minutes
    record_bytes = min((size for _, _, size in found), default=0)
    await out.write(*about_frame("S", _about(rank_folder, reader, record_bytes)))
    order = sorted((use_ns, key) for use_ns, key, _ in found)
    for use_ns, key in order:
        record = reader.find(key)
        _check_epoch(rank_folder, reader, epoch)  # after a reset, a shared folder finds nothing
        if record is None:
            counts.gone += 1
            continue
        await asyncio.sleep(rate_limit.delay_s(record.stored_bytes))
        health, payload = checker.check(record)
        _check_epoch(rank_folder, reader, epoch)
        if health is RecordHealth.GOOD:
            await out.write(*record_frame(Record(key, use_ns, payload)))
            checker, other = other, checker  # the payload must not change until it is written
            counts.records += 1
            counts.payload_bytes += payload.nbytes
        counts.gone += health is RecordHealth.GONE
        counts.damaged += health is RecordHealth.DAMAGED
        counts.unread += health is RecordHealth.SEALED
        advance(record.stored_bytes)
    if order:
        reader.find(order[-1][1])  # reads the epoch again
    _check_epoch(rank_folder, reader, epoch)
    if weights_problem(rank_folder, reader):  # the epoch file changes before the tier is reset
        raise NamespaceError(_RESET.format(rank_folder.folder))
    return counts


def _check_epoch(rank_folder: RankFolder, reader: OfflineFolder, epoch: int) -> None:
    """Raise ``NamespaceError`` if the reader has read another epoch than this one."""
    if reader.epoch != epoch:
        raise NamespaceError(_RESET.format(rank_folder.folder))


def _about(rank_folder: RankFolder, reader: OfflineFolder, record_bytes: int) -> dict[str, Any]:
    """Describe one rank's records for the import. ``record_bytes`` is the smallest payload."""
    owner = reader.owner
    return {
        "replica": rank_folder.replica,
        "rank": rank_folder.rank,
        "kind": reader.kind,
        "is_shared": reader.is_shared,
        "epoch": reader.epoch,
        "records_of": owner.namespace.hex() if owner else "",
        "record_bytes": record_bytes,
    }
