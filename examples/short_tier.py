"""A tier in 60 lines: keeps records in memory, compressed with zlib.

It fulfils the contract of ``tiers/testing/__init__.py``. ``custom_tier.py`` has a tier on a disk,
which also has to wait in a thread and to survive a restart.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from tiers.authoring import (
    Buffer,
    Identity,
    Key,
    ReadOutcome,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    WriteOutcome,
    check_key,
    check_payload,
    seal,
    stored_keys,
    verify,
)


class CompressedTier(Tier):
    def __init__(self, capacity_bytes: int, identity: Identity | None = None) -> None:
        self._capacity_bytes, self._identity = capacity_bytes, identity or Identity()
        self._records: dict[Key, tuple[bytes, bytes, int]] = {}  # least recently used first
        self._epoch = self._used_bytes = 0
        self._is_open = False

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes + payload_bytes // 1000 + 64  # of data that zlib cannot compress

    async def open(self) -> TierInfo:
        self._is_open = True
        return TierInfo("compressed", self._capacity_bytes, 0, 0, persistent=False)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        for key, data in zip(keys, buffers, strict=True):
            check_key(key)
            check_payload(data.nbytes)
        return [self._write(key, data) for key, data in zip(keys, buffers, strict=True)]

    def _write(self, key: Key, data: Buffer) -> WriteOutcome:
        if key in self._opened():
            return WriteOutcome.OK
        if self._used_bytes + self.footprint_bytes(data.nbytes) > self._capacity_bytes:
            return WriteOutcome.FULL
        self._used_bytes += self.footprint_bytes(data.nbytes)
        header = seal(self._identity, key, self._epoch, data, data.nbytes)
        self._records[key] = header, zlib.compress(data.data, level=1), data.nbytes
        return WriteOutcome.OK

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        return [self._read(key, data) for key, data in zip(keys, into, strict=True)]

    def _read(self, key: Key, into: Buffer) -> ReadOutcome:
        if key not in self._opened():
            return ReadOutcome.MISS
        header, packed, size = self._records[key]
        if size != into.nbytes:
            return ReadOutcome.CORRUPT
        np.copyto(into, np.frombuffer(zlib.decompress(packed), np.uint8))
        good = verify(header, self._identity, key, self._epoch, into)  # after the last copy
        return ReadOutcome.OK if good else ReadOutcome.CORRUPT

    async def delete(self, keys: Sequence[Key]) -> None:
        for key in self._opened().keys() & set(keys):
            *_, size = self._records.pop(key)
            self._used_bytes -= self.footprint_bytes(size)

    async def touch(self, keys: Sequence[Key]) -> None:
        for key in filter(self._opened().__contains__, keys):
            self._records[key] = self._records.pop(key)

    async def keys(self) -> AsyncIterator[StoredKeys]:
        for batch in stored_keys([(key, size) for key, (*_, size) in self._opened().items()]):
            yield batch

    async def reset(self, epoch: int) -> None:
        self._opened().clear()
        self._used_bytes = 0
        self._epoch = max(epoch, self._epoch + 1)

    async def aclose(self) -> None:
        self._is_open = False
        self._records.clear()
        self._used_bytes = 0

    def _opened(self) -> dict[Key, tuple[bytes, bytes, int]]:
        if not self._is_open:
            raise TierClosedError("the compressed tier is not open")
        return self._records
