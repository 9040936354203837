"""A custom tier: keeps records in a SQLite file, below the CPU tier.

Run: ``python examples/custom_tier.py``. It offloads ten blocks to a CPU tier that holds six, with
this tier below it. Then it forgets the blocks and restores all ten, and restores them again after a
restart.

It fulfils the contract of ``tiers/testing/__init__.py`` in a hundred lines, with one thread and one
transaction per call. It is an example, not a fast tier: SQLite copies every payload twice and syncs
every write.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from offload import OffloadManager, SimpleConfig, SimpleGroup, SimpleSpec
from tiers.authoring import (
    Buffer,
    DaemonThreads,
    Identity,
    Key,
    ReadOutcome,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
    check_key,
    check_payload,
    seal,
    settled,
    stored_keys,
    verify,
)

T = TypeVar("T")
BATCH = 1 << 14
TABLES = """
CREATE TABLE IF NOT EXISTS record
    (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, header BLOB, payload BLOB);
CREATE TABLE IF NOT EXISTS epoch (number INTEGER);
INSERT INTO epoch SELECT 0 WHERE NOT EXISTS (SELECT * FROM epoch);
"""


class SqliteTier(Tier):
    """Records in ``folder/records.db``, least recently used first by their row number.

    The file belongs to one thread, which serializes the calls. A caller that is cancelled waits
    until its call has ended (``settled``), because the thread may still use the caller's buffers.
    """

    def __init__(self, folder: Path, capacity_bytes: int, identity: Identity | None = None) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._identity = identity or Identity()
        self._file: sqlite3.Connection | None = None
        self._thread: DaemonThreads | None = None
        self._epoch = self._used_bytes = 0

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes + 1024  # the header, the key and the row number

    async def open(self) -> TierInfo:
        self._thread = DaemonThreads("sqlite-tier", 1)
        return await self._call(self._open)

    def _open(self) -> TierInfo:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "records.db"
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.executescript("PRAGMA synchronous = FULL;" + TABLES)
        [(self._epoch,)] = self._file.execute("SELECT number FROM epoch")
        sizes = [size for (size,) in self._file.execute("SELECT length(payload) FROM record")]
        self._used_bytes = sum(map(self.footprint_bytes, sizes))
        return TierInfo("sqlite", self._capacity_bytes, self._used_bytes, len(sizes), True)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        for key, data in zip(keys, buffers, strict=True):
            check_key(key)
            check_payload(data.nbytes)
        return await self._call(lambda: list(map(self._write_one, keys, buffers)))

    def _write_one(self, key: Key, data: Buffer) -> WriteOutcome:
        if self._run("SELECT 1 FROM record WHERE key = ?", key):
            return WriteOutcome.OK
        size = self.footprint_bytes(data.nbytes)
        if self._used_bytes + size > self._capacity_bytes:
            return WriteOutcome.FULL
        header = seal(self._identity, key, self._epoch, data, data.nbytes)
        self._run(
            "INSERT INTO record (key, header, payload) VALUES (?, ?, ?)", key, header, data.data
        )
        self._used_bytes += size
        return WriteOutcome.OK

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        return await self._call(lambda: list(map(self._read_one, keys, into)))

    def _read_one(self, key: Key, into: Buffer) -> ReadOutcome:
        found = self._run("SELECT header, payload FROM record WHERE key = ?", key)
        if not found:
            return ReadOutcome.MISS
        [(header, payload)] = found
        if len(payload) != into.nbytes:
            return ReadOutcome.CORRUPT
        np.copyto(into, np.frombuffer(payload, np.uint8))
        # Verify the bytes in the buffer where they will be used, after the last copy.
        good = verify(header, self._identity, key, self._epoch, into)
        return ReadOutcome.OK if good else ReadOutcome.CORRUPT

    async def delete(self, keys: Sequence[Key]) -> None:
        await self._call(lambda: list(map(self._delete_one, keys)))

    def _delete_one(self, key: Key) -> None:
        for (size,) in self._run("SELECT length(payload) FROM record WHERE key = ?", key):
            self._run("DELETE FROM record WHERE key = ?", key)
            self._used_bytes -= self.footprint_bytes(size)

    async def touch(self, keys: Sequence[Key]) -> None:
        last = "(SELECT max(number) + 1 FROM record)"
        use = f"UPDATE record SET number = {last} WHERE key = ?"
        await self._call(lambda: [self._run(use, key) for key in keys])

    async def keys(self) -> AsyncIterator[StoredKeys]:
        ask = "SELECT number, key, length(payload) FROM record WHERE number > ? ORDER BY number"
        last, rows = -1, [(0, b"", 0)]
        while rows:
            rows = await self._call(partial(self._run, f"{ask} LIMIT {BATCH}", last))
            for batch in stored_keys([(bytes(key), size) for _, key, size in rows]):
                yield batch
            last = rows[-1][0] if rows else last

    async def reset(self, epoch: int) -> None:
        await self._call(lambda: self._reset(epoch))

    def _reset(self, epoch: int) -> None:
        epoch = max(epoch, self._epoch + 1)
        self._run("DELETE FROM record")
        self._run("UPDATE epoch SET number = ?", epoch)
        self._epoch, self._used_bytes = epoch, 0

    async def aclose(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await settled(thread.run(self._close))
            thread.stop()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        assert self._file is not None
        return self._file.execute(statement, values).fetchall()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the thread and in a transaction. If the file fails, the tier raises
        an error."""
        if self._thread is None:
            raise TierClosedError("the SQLite tier is not open")
        return await settled(self._thread.run(self._in_transaction, function))

    def _in_transaction(self, function: Callable[[], T]) -> T:
        try:
            if self._file is None:
                return function()  # open
            before = self._epoch, self._used_bytes
            try:
                self._file.execute("BEGIN IMMEDIATE")
                result = function()
                self._file.execute("COMMIT")
            except BaseException:  # a cancelled transaction is rolled back, too
                self._epoch, self._used_bytes = before
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise
            return result
        except (OSError, sqlite3.Error) as error:
            raise TierIoError(f"{self._folder}: {error}") from error


BLOCKS, PAGE_BYTES = 32, 8192


async def main(folder: Path) -> bool:
    """Offload, forget and restore, twice. Returns True if every byte was restored."""
    caches = {"layers.0": torch.empty((BLOCKS, PAGE_BYTES), dtype=torch.uint8)}
    layout = SimpleConfig(BLOCKS, (SimpleGroup(("layers.0",), SimpleSpec(16, PAGE_BYTES)),))
    config = {"cpu": {"capacity": 8 * PAGE_BYTES, "policy": "lru"}, "staging": 2 * PAGE_BYTES}
    keys = [f"prefix-{n}".encode() for n in range(10)]
    caches["layers.0"].random_(0, 255)
    before = caches["layers.0"][:10].clone()
    for start in ("first start", "after a restart"):
        tier = SqliteTier(folder, 64 << 20)
        async with await OffloadManager.open(layout, caches, config, tiers=[tier]) as manager:
            if start == "first start":
                for n in range(0, 10, 5):
                    await manager.offload(keys[n : n + 5], range(n, n + 5))
                    await manager.flush()
            caches["layers.0"].zero_()
            restored = await manager.restore(keys, range(20, 30))
        equal = torch.equal(caches["layers.0"][20:30], before)
        print(f"{start}: restored {restored} of {len(keys)} blocks, bytes equal: {equal}")
        if restored != len(keys) or not equal:
            return False
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        raise SystemExit(0 if asyncio.run(main(Path(place))) else 1)
