"""Tiers in ordinary memory: for tests and simulations, and as the shortest examples of a tier.

``MemoryTier`` stores sealed copies and verifies them as a disk tier would, so that damage by
wrappers is detected by the same checks. ``SharedMemoryTier`` is the shared form: tiers with the
same ``SharedMemory`` share it as engines share a store. It evicts in the order of writing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    WriteOutcome,
    stored_keys,
)
from tiers.record import (
    NO_NAMESPACE,
    Identity,
    check_identity,
    check_records,
    seal,
    verify,
)

Record = tuple[bytes, Buffer]
"""Header and payload."""


def copied(
    record: Record | None, identity: Identity, key: Key, epoch: int, into: Buffer
) -> ReadOutcome:
    """Fill ``into`` from a record, if that is the requested record and intact."""
    if record is None:
        return ReadOutcome.MISS
    header, payload = record
    if payload.nbytes != into.nbytes:
        return ReadOutcome.CORRUPT
    np.copyto(into, payload)
    good = verify(header, identity, key, epoch, into)
    return ReadOutcome.OK if good else ReadOutcome.CORRUPT


class MemoryTier(Tier):
    """Records in a dict, oldest first. ``aclose`` discards everything."""

    def __init__(
        self, capacity_bytes: int, *, namespace: bytes = NO_NAMESPACE, rank: int = 0, epoch: int = 0
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._epoch = epoch
        self._open = False
        self._used_bytes = 0
        self.records: dict[Key, Record] = {}
        """Records by key, for tests that damage them behind the tier's back."""

    @property
    def epoch(self) -> int:
        """The epoch under which records are written and read now."""
        return self._epoch

    async def open(self) -> TierInfo:
        self._open = True
        return TierInfo("memory", self._capacity_bytes, self._used_bytes, len(self.records), False)

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        self._check_open()
        check_records(keys, buffers)
        return [self._write_one(key, data) for key, data in zip(keys, buffers, strict=True)]

    def _write_one(self, key: Key, data: Buffer) -> WriteOutcome:
        if key in self.records:
            return WriteOutcome.OK
        if self._used_bytes + data.nbytes > self._capacity_bytes:
            return WriteOutcome.FULL
        header = seal(self._identity, key, self._epoch, data, data.nbytes)
        self.records[key] = (header, data.copy())
        self._used_bytes += data.nbytes
        return WriteOutcome.OK

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        return [self._read_one(key, data) for key, data in zip(keys, into, strict=True)]

    def _read_one(self, key: Key, into: Buffer) -> ReadOutcome:
        return copied(self.records.get(key), self._identity, key, self._epoch, into)

    async def delete(self, keys: Sequence[Key]) -> None:
        self._check_open()
        for key in keys:
            record = self.records.pop(key, None)
            if record is not None:
                self._used_bytes -= record[1].nbytes

    async def touch(self, keys: Sequence[Key]) -> None:
        self._check_open()
        for key in keys:
            record = self.records.pop(key, None)
            if record is not None:
                self.records[key] = record

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        found = [(key, data.nbytes) for key, (_, data) in self.records.items()]
        for batch in stored_keys(found):
            yield batch

    async def reset(self, epoch: int) -> None:
        self._check_open()
        self._epoch = max(epoch, self._epoch + 1)
        self.records.clear()
        self._used_bytes = 0

    async def aclose(self) -> None:
        self._open = False
        self.records.clear()
        self._used_bytes = 0

    def _check_open(self) -> None:
        if not self._open:
            raise TierClosedError("the memory tier is not open")


class Address(NamedTuple):
    """The address of a record. It includes the epoch, so no engine finds records of other
    weights."""

    identity: Identity
    epoch: int
    key: Key


class SharedMemory:
    """The records of many engines: header and payload by address, in the order of writing."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.records: dict[Address, Record] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(data.nbytes for _, data in self.records.values())

    def put(self, address: Address, header: bytes, data: Buffer) -> bool:
        """Store a copy. Returns False if the record is larger than the whole memory."""
        if data.nbytes > self.capacity_bytes:
            return False
        while self.used_bytes + data.nbytes > self.capacity_bytes:
            del self.records[next(iter(self.records))]
        self.records[address] = (header, data.copy())
        return True


class SharedMemoryTier(SharedTier):
    """One engine's view of a ``SharedMemory``."""

    def __init__(
        self,
        memory: SharedMemory,
        *,
        namespace: bytes = NO_NAMESPACE,
        rank: int = 0,
        epoch: int = 0,
    ) -> None:
        self.memory = memory
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._epoch = epoch
        self._open = False

    async def open(self) -> TierInfo:
        self._open = True
        memory = self.memory
        return TierInfo(
            "shared memory",
            memory.capacity_bytes,
            memory.used_bytes,
            len(memory.records),
            persistent=True,
            epoch=self._epoch,
            found_epoch=self._epoch,
        )

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        self._check_open()
        check_records(keys, buffers)
        return [self._write_one(key, data) for key, data in zip(keys, buffers, strict=True)]

    def _write_one(self, key: Key, data: Buffer) -> WriteOutcome:
        address = self._address(key)
        if address in self.memory.records:
            return WriteOutcome.OK
        header = seal(self._identity, key, self._epoch, data, data.nbytes)
        return WriteOutcome.OK if self.memory.put(address, header, data) else WriteOutcome.FULL

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        return [self._read_one(key, data) for key, data in zip(keys, into, strict=True)]

    def _read_one(self, key: Key, into: Buffer) -> ReadOutcome:
        record = self.memory.records.get(self._address(key))
        return copied(record, self._identity, key, self._epoch, into)

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [self._address(key) in self.memory.records for key in keys]

    async def delete(self, keys: Sequence[Key]) -> None:
        self._check_open()
        for key in keys:
            self.memory.records.pop(self._address(key), None)

    async def touch(self, keys: Sequence[Key]) -> None:
        self._check_open()

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        mine = [
            (address.key, data.nbytes)
            for address, (_, data) in self.memory.records.items()
            if address == self._address(address.key)
        ]
        for batch in stored_keys(mine):
            yield batch

    async def reset(self, epoch: int) -> None:
        self._check_open()
        self._epoch = max(epoch, self._epoch + 1)

    async def aclose(self) -> None:
        self._open = False

    def _address(self, key: Key) -> Address:
        return Address(self._identity, self._epoch, key)

    def _check_open(self) -> None:
        if not self._open:
            raise TierClosedError("the tier is not open")
