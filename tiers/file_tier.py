"""One record per file: for file systems where LMDB must not be used, and to look at by hand.

    <folder>/owner.lock
    <folder>/epoch                       the present epoch, decimal
    <folder>/epoch-<n>/<64 hex>          a record: one page of header and key, then the payload
    <folder>/epoch-<n>/<64 hex>.<n>.tmp  a record being written

A record's name is a digest of its key, so nothing from outside ever becomes part of a path. It
appears by ``rename`` after its bytes are flushed. The time of last use is its modification time.
``reset`` writes the new epoch and leaves the old folder to be removed in the background.

Slower than ``lmdb_tier`` by what file systems charge for creating and removing files.

Ownership: everything belongs to the event loop's thread; file operations run in the loop's
default executor, at most ``depth`` records at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiofiles

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
)
from tiers.calls import settled
from tiers.direct_io import pages_for
from tiers.folder import OwnerLock, prepare, sync_folder
from tiers.record import (
    HEADER_BYTES,
    NO_NAMESPACE,
    Identity,
    RecordError,
    check_identity,
    check_key,
    check_payload,
    parse,
    seal,
    verify,
)

KEYS_PER_BATCH = 1024
EPOCH_NAME = "epoch"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Entry(NamedTuple):
    """A record that is present: its time of last use in ns, and its payload's length."""

    use_ns: int
    payload_bytes: int


def record_name(key: Key) -> str:
    """The file name of a record: 64 hexadecimal digits."""
    return hashlib.blake2b(key, digest_size=32).hexdigest()


class FileTier(Tier):
    """See the module. ``path`` is this rank's own folder."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        namespace: bytes = NO_NAMESPACE,
        rank: int = 0,
        epoch: int = 0,
        depth: int = 16,
    ) -> None:
        self._folder = Path(path)
        self._capacity_bytes = capacity_bytes
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._wanted_epoch = epoch
        self._depth = depth
        self._lock: OwnerLock | None = None
        self._counts: dict[str, int] = {}

    async def open(self) -> TierInfo:
        if self._lock is not None:
            raise TierIoError(f"the tier in {self._folder} is open already")
        try:
            found, dropped = await settled(
                asyncio.ensure_future(asyncio.to_thread(self._open_folder))
            )
        except OSError as error:
            raise TierIoError(f"cannot open the tier in {self._folder}: {error}") from error
        self._entries = dict(sorted(found.items(), key=lambda item: item[1]))
        self._used_bytes = sum(self.footprint_bytes(e.payload_bytes) for e in found.values())
        self._last_use_ns = max((entry.use_ns for entry in found.values()), default=0)
        self._filling: dict[Key, asyncio.Task[WriteOutcome]] = {}
        self._working: set[asyncio.Future[Any]] = set()
        self._reclaiming: asyncio.Future[None] | None = None
        self._slots = asyncio.Semaphore(self._depth)
        self._serial = 0
        self._pid = os.getpid()
        self._counts = dict.fromkeys(("written", "read_ok", "read_miss", "read_corrupt"), 0)
        self._counts["dropped_at_open"] = dropped
        self._reclaim()
        return TierInfo("file", self._capacity_bytes, self._used_bytes, len(found), True)

    # -- blocking parts of opening ---------------------------------------------------------

    def _open_folder(self) -> tuple[dict[Key, _Entry], int]:
        """Check, lock, and read every header; what is present and how many were not whole."""
        prepare(self._folder, allow_network=True)
        self._lock = OwnerLock(self._folder)
        try:
            stored = self._stored_epoch()
            self._epoch = max(stored, self._wanted_epoch)
            if self._epoch != stored or not (self._folder / EPOCH_NAME).exists():
                self._store_epoch(self._epoch)
            self._records.mkdir(mode=0o700, exist_ok=True)
            return self._scan()
        except BaseException:
            self._lock.release()
            self._lock = None
            raise

    @property
    def _records(self) -> Path:
        return self._folder / f"epoch-{self._epoch}"

    def _stored_epoch(self) -> int:
        """The epoch on disk. An unreadable one counts as beyond all folders there are."""
        path = self._folder / EPOCH_NAME
        try:
            return int(path.read_text(encoding="ascii"))
        except FileNotFoundError:
            known = [int(found.name[6:]) for found in self._folder.glob("epoch-[0-9]*")]
            return max(known) + 1 if known else 0
        except ValueError:
            known = [int(found.name[6:]) for found in self._folder.glob("epoch-[0-9]*")]
            return max(known, default=0) + 1

    def _store_epoch(self, epoch: int) -> None:
        temporary = self._folder / f"{EPOCH_NAME}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, str(epoch).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, self._folder / EPOCH_NAME)
        sync_folder(self._folder)

    def _scan(self) -> tuple[dict[Key, _Entry], int]:
        found: dict[Key, _Entry] = {}
        dropped = 0
        with os.scandir(self._records) as files:
            for file in files:
                entry = _read_entry(Path(file.path), self._identity, self._epoch)
                if entry is None:
                    dropped += 1
                    os.unlink(file.path)
                else:
                    found[entry[0]] = entry[1]
        return found, dropped

    # -- what it says of itself ------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under which records are written and read now."""
        return self._epoch

    def footprint_bytes(self, payload_bytes: int) -> int:
        return (1 + pages_for(payload_bytes)) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        found = sorted(self._entries.items(), key=lambda item: item[1])
        for start in range(0, len(found), KEYS_PER_BATCH):
            batch = found[start : start + KEYS_PER_BATCH]
            sizes = [entry.payload_bytes for _, entry in batch]
            yield StoredKeys([key for key, _ in batch], sizes)

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = dict(self._counts)
        if self._lock is not None:
            counts |= {"records": len(self._entries), "used_bytes": self._used_bytes}
        return counts

    def _check_open(self) -> None:
        if self._lock is None:
            raise TierClosedError(f"the tier in {self._folder} is not open")
        if os.getpid() != self._pid:
            raise TierIoError(f"opened by process {self._pid}, used in process {os.getpid()}")

    async def _finish(self, tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
        """Results of all tasks, waited for also when cancelled."""
        done = asyncio.gather(*tasks)
        self._working.add(done)
        try:
            return await settled(done)
        finally:
            self._working.discard(done)

    # -- writing ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        self._check_open()
        for key, data in zip(keys, buffers, strict=True):
            check_key(key)
            check_payload(data.nbytes)
        tasks = []
        for key, data in zip(keys, buffers, strict=True):
            task = self._filling.get(key)
            if task is None:
                self._next_use_ns()
                coroutine = self._write_one(key, data, self._epoch, self._last_use_ns)
                task = self._filling[key] = asyncio.create_task(coroutine)
            tasks.append(task)
        if not tasks:
            return []
        outcomes = await self._finish(tasks)
        return [WriteOutcome(outcome) for outcome in outcomes]

    def _next_use_ns(self) -> int:
        self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
        return self._last_use_ns

    async def _write_one(self, key: Key, data: Buffer, epoch: int, use_ns: int) -> WriteOutcome:
        try:
            if key in self._entries:
                return WriteOutcome.OK
            size = self.footprint_bytes(data.nbytes)
            if self._used_bytes + size > self._capacity_bytes and self._reclaiming is not None:
                await asyncio.wait([self._reclaiming])
            if self._used_bytes + size > self._capacity_bytes:
                return WriteOutcome.FULL
            self._used_bytes += size
            async with self._slots:
                outcome = await self._write_file(key, data, epoch, use_ns)
            if outcome is WriteOutcome.OK and epoch == self._epoch:
                self._entries[key] = _Entry(use_ns, data.nbytes)
                self._counts["written"] += 1
                return outcome
            if epoch == self._epoch:
                self._used_bytes -= size
            return WriteOutcome.FAILED if outcome is WriteOutcome.OK else outcome
        finally:
            if self._filling.get(key) is asyncio.current_task():
                del self._filling[key]

    async def _write_file(self, key: Key, data: Buffer, epoch: int, use_ns: int) -> WriteOutcome:
        path = self._folder / f"epoch-{epoch}" / record_name(key)
        self._serial += 1
        temporary = path.with_name(f"{path.name}.{self._serial}.tmp")
        try:
            header = await asyncio.to_thread(seal, self._identity, key, epoch, data, data.nbytes)
            async with aiofiles.open(temporary, "xb", buffering=0) as file:
                await file.write((header + key).ljust(ALIGNMENT, b"\0"))
                await _write_all(file, data)
                await asyncio.to_thread(_publish, file.fileno(), temporary, path, use_ns)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            return WriteOutcome.FULL if error.errno in DISK_FULL else WriteOutcome.FAILED
        return WriteOutcome.OK

    # -- reading ---------------------------------------------------------------------------

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        tasks = [
            asyncio.create_task(self._read_one(key, data))
            for key, data in zip(keys, into, strict=True)
        ]
        outcomes = [ReadOutcome(got) for got in await self._finish(tasks)] if tasks else []
        for outcome in outcomes:
            self._counts[f"read_{outcome.value}"] += 1
        return outcomes

    async def _read_one(self, key: Key, into: Buffer) -> ReadOutcome:
        entry, epoch = self._entries.get(key), self._epoch
        if entry is None:
            return ReadOutcome.MISS
        if entry.payload_bytes != into.nbytes:
            return ReadOutcome.CORRUPT
        async with self._slots:
            is_good = await self._read_file(key, into, epoch)
        if epoch != self._epoch or (not is_good and key not in self._entries):
            return ReadOutcome.MISS
        if not is_good:
            self._forget(key)
        return ReadOutcome.OK if is_good else ReadOutcome.CORRUPT

    async def _read_file(self, key: Key, into: Buffer, epoch: int) -> bool:
        path = self._folder / f"epoch-{epoch}" / record_name(key)
        try:
            async with aiofiles.open(path, "rb", buffering=0) as file:
                page = await file.read(ALIGNMENT)
                done = 0
                while done < into.nbytes:
                    count = await file.readinto(into[done:].data)
                    if not count:
                        return False
                    done += count
        except OSError:
            return False
        header = page[:HEADER_BYTES]
        return await asyncio.to_thread(verify, header, self._identity, key, epoch, into)

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        self._check_open()
        filling = [task for key in keys if (task := self._filling.get(key)) is not None]
        if filling:
            await self._finish(filling)
        gone = [self._records / record_name(key) for key in keys if self._forget(key, unlink=False)]
        if gone:
            await self._finish([asyncio.create_task(_unlink_all(gone))])

    def _forget(self, key: Key, *, unlink: bool = True) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._used_bytes -= self.footprint_bytes(entry.payload_bytes)
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self._records / record_name(key))
        return True

    async def touch(self, keys: Sequence[Key]) -> None:
        self._check_open()
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                use_ns = self._next_use_ns()
                self._entries[key] = entry._replace(use_ns=use_ns)
                with contextlib.suppress(OSError):  # recency is best effort
                    os.utime(self._records / record_name(key), ns=(use_ns, use_ns))

    async def reset(self, epoch: int) -> None:
        self._check_open()
        self._epoch = max(epoch, self._epoch + 1)
        self._entries = {}
        self._filling = {}
        try:
            await self._finish([asyncio.create_task(self._begin_epoch(self._epoch))])
        except OSError as error:
            raise TierIoError(f"cannot store the epoch in {self._folder}: {error}") from error
        self._reclaim()

    async def _begin_epoch(self, epoch: int) -> None:
        (self._folder / f"epoch-{epoch}").mkdir(mode=0o700, exist_ok=True)
        await asyncio.to_thread(self._store_epoch, epoch)

    def _reclaim(self) -> None:
        """Remove folders of other epochs in the background, then count what is left."""
        before = self._reclaiming
        self._reclaiming = asyncio.ensure_future(self._remove_old(before))

    async def _remove_old(self, before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        old = [path for path in self._folder.glob("epoch-*") if path != self._records]
        for path in old:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        sizes = (self.footprint_bytes(entry.payload_bytes) for entry in self._entries.values())
        self._used_bytes = sum(sizes)

    async def aclose(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        while self._working:
            await asyncio.wait(list(self._working))
        if self._reclaiming is not None:
            await asyncio.wait([self._reclaiming])
        lock.release()


async def _write_all(file: Any, data: Buffer) -> None:
    done = 0
    while done < data.nbytes:
        done += await file.write(data[done:].data)


def _publish(fd: int, temporary: Path, path: Path, use_ns: int) -> None:
    """Make a record durable and give it its name, durable as well. Blocks."""
    os.utime(fd, ns=(use_ns, use_ns))
    os.fchmod(fd, 0o600)
    os.fsync(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)


async def _unlink_all(paths: Sequence[Path]) -> None:
    def unlink() -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    await asyncio.to_thread(unlink)


def _read_entry(path: Path, identity: Identity, epoch: int) -> tuple[Key, _Entry] | None:
    """What a file says it is; ``None`` unless it is a whole record of this tier by its name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        page = os.read(fd, ALIGNMENT)
        found = os.fstat(fd)
        header = parse(page[:HEADER_BYTES])
    except (OSError, RecordError):
        return None
    finally:
        os.close(fd)
    key = page[HEADER_BYTES : HEADER_BYTES + header.key_bytes]
    is_ours = (header.namespace, header.rank, header.epoch) == (*identity, epoch)
    is_whole = found.st_size == ALIGNMENT + header.stored_bytes and path.name == record_name(key)
    if not is_ours or not is_whole:
        return None
    return key, _Entry(found.st_mtime_ns, header.payload_bytes)
