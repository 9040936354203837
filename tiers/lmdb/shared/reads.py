"""Reads of a shared LMDB tier, whose extents other processes may reuse at any moment.

A read looks up the key, reads the payload into the caller's buffer without any lock, and verifies
the checksum, which covers key, epoch and owner. If it does not match, either the record was removed
meanwhile (and its extents may have been reused), or it is damaged, so the key is looked up again.
If its entry is unchanged, the record is read once more; if that fails too, it is damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiers.base import Buffer, Key, ReadOutcome
from tiers.io.codec import Codec
from tiers.io.direct_io import PayloadFile, Scratch
from tiers.lmdb.index import extents_of, payload_bytes_of
from tiers.lmdb.io_jobs import ReadItem, ReadJob
from tiers.lmdb.records.record_table import USE_BYTES
from tiers.lmdb.shared.index import SharedIndex

READ_ATTEMPTS = 5
"""Maximum number of lookups of a record that changes during the read."""


@dataclass(slots=True)
class SharedReadJob:
    """Reads records of one epoch (``None``: the common one). ``outcomes`` and ``uses`` (times of
    last use in ns, 0 unless read) have one item per key; ``damaged`` are records to remove."""

    keys: Sequence[Key]
    into: Sequence[Buffer]
    first: int
    """The position of the job's first key in the call."""
    own_epoch: int | None
    index: SharedIndex
    codec: Codec
    file: PayloadFile
    ended: asyncio.Future[None]
    """Completed on the event loop when the job has run."""
    post: Callable[..., None]
    """Calls a function on the event loop, from any thread."""
    outcomes: list[ReadOutcome] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    damaged: list[tuple[Key, bytes]] = field(default_factory=list)
    io_errors: int = 0
    failure: Exception | None = None

    def run(self, scratch: Scratch) -> None:
        """Read and verify all records."""
        self.outcomes = [ReadOutcome.MISS] * len(self.keys)
        self.uses = [0] * len(self.keys)
        try:
            self._read(scratch)
        except Exception as error:  # the call needs an answer, and the thread must continue
            self.failure = error

    def notify(self) -> None:
        """Complete ``ended``."""
        self.post(self.ended.set_result, None)

    def _read(self, scratch: Scratch) -> None:
        left = list(range(len(self.keys)))
        failed: dict[int, bytes] = {}
        for _attempt in range(READ_ATTEMPTS):
            epoch, values = self.index.find([self.keys[n] for n in left], self.own_epoch)
            items = []
            for number, value in zip(left, values, strict=True):
                if value is not None and self._fits(number, value):
                    into = self.into[number]
                    items.append(
                        ReadItem(self.keys[number], value, extents_of(value), into, number)
                    )
            left = self._read_once(items, epoch, failed, scratch)
            if not left:
                return

    def _fits(self, number: int, value: bytes) -> bool:
        if payload_bytes_of(value) == self.into[number].nbytes:
            return True
        self.outcomes[number] = ReadOutcome.CORRUPT
        return False

    def _read_once(
        self, items: list[ReadItem], epoch: int, failed: dict[int, bytes], scratch: Scratch
    ) -> list[int]:
        """Return the records to look up again: neither read nor known to be damaged."""
        items.sort(key=lambda item: item.extents[0].start)
        job = ReadJob(items, epoch, self.codec, self.file)
        job.run(scratch)
        self.io_errors += job.io_errors
        again = []
        for item, is_intact in job.results():
            number, mark = item.position, item.value[USE_BYTES:]
            if is_intact:
                self.outcomes[number] = ReadOutcome.OK
                self.uses[number] = int.from_bytes(item.value[:USE_BYTES], "big")
            elif failed.get(number) == mark:
                self.outcomes[number] = ReadOutcome.CORRUPT
                self.damaged.append((item.key, item.value))
            else:
                self.outcomes[number] = ReadOutcome.MISS  # may change after another lookup
                failed[number] = mark
                again.append(number)
        return again
