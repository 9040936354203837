"""The jobs of the I/O threads and the records that they move.

One kind of job seals and writes payloads, the other reads and verifies them.

A job owns its buffers while it runs and never raises. A write job passes its records to the commit
thread. The read jobs of one call report to the event loop together, with an outcome per record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiers.base import Buffer, Key, ReadOutcome, WriteOutcome
from tiers.folders.folder import DISK_FULL
from tiers.io.codec import Codec
from tiers.io.direct_io import Mover, PayloadFile, Scratch, pages_for
from tiers.io.extents import Extents, clip
from tiers.lmdb.index import header_of, pack_value
from tiers.lmdb.options import LmdbOptions
from tiers.record import flags_of, stored_bytes_of

JOB_BYTES_MIN = 1 << 20
"""Smaller jobs would cost more CPU time without keeping the device busier."""


def job_bytes(options: LmdbOptions, queued_bytes: int) -> int:
    """Return the size of one job, given the bytes of all reads (or writes) in progress: small
    enough that every thread gets a share, large enough to combine small records."""
    share = queued_bytes // options.io_threads
    return min(options.job_bytes, max(JOB_BYTES_MIN, share))


@dataclass(slots=True, eq=False)
class Put:
    """A record that is being written. It belongs to one thread at a time: first the event loop's,
    then an I/O thread, then the commit thread, then the event loop's again."""

    key: Key
    value: bytes
    epoch: int
    payload_bytes: int
    extents: Extents
    stored_pages: int = 0
    """The number of pages that the encoded record takes."""
    outcome: WriteOutcome = WriteOutcome.FAILED
    is_named: bool = False
    """True if a committed transaction refers to its allocation."""
    waiters: list[Any] = field(default_factory=list)
    """The calls that wait for this record; only the event loop uses them."""

    def allocate(self, extents: Extents, epoch: int) -> None:
        """Set the extents for its payload, and the epoch with which to seal it."""
        self.extents, self.epoch = extents, epoch

    def encode(self, stored_bytes: int) -> Extents:
        """Set the length of the encoded payload. Returns the extents that it needs."""
        self.stored_pages = pages_for(stored_bytes)
        return clip(self.extents, self.stored_pages)[0]

    def seal(self, value: bytes) -> None:
        """Set the record's entry in the index."""
        self.value = value

    def commit(self) -> None:
        """Record that a committed transaction contains the entry."""
        self.is_named = True
        self.outcome = WriteOutcome.OK

    def end(self, outcome: WriteOutcome) -> None:
        """Set its outcome."""
        self.outcome = outcome


@dataclass(slots=True, eq=False)
class WriteJob:
    """Writes the payloads ``data[i]`` of ``puts[i]``, with their times of use."""

    puts: list[Put]
    data: list[Buffer]
    uses: list[int]
    codec: Codec
    file: PayloadFile
    commit: Callable[[Sequence[Put]], None]
    fail: Callable[[Sequence[Put]], None]
    is_written: bool = False

    def run(self, scratch: Scratch) -> None:
        """Seal and write all records, or fail all of them."""
        try:
            self._move(scratch)
        except Exception as error:
            # The waiting call must get any exception, and the thread must not end.
            is_full = isinstance(error, OSError) and error.errno in DISK_FULL
            for put in self.puts:
                put.end(WriteOutcome.FULL if is_full else WriteOutcome.FAILED)
        else:
            self.is_written = True

    def notify(self) -> None:
        """Queue written records for the commit, or report that nothing was written."""
        (self.commit if self.is_written else self.fail)(self.puts)

    def _move(self, scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=True)
        buffers = CodecScratch(self.codec, scratch, [] if self.codec.is_plain else self.data)
        for put, data, use in zip(self.puts, self.data, self.uses, strict=True):
            encoded = buffers.take(data.nbytes)
            header, stored = self.codec.encode(put.key, put.epoch, data, encoded)
            extents = put.encode(stored.nbytes)
            put.seal(pack_value(use, header, extents))
            mover.add(extents, stored)
        mover.flush()


@dataclass(slots=True, eq=False)
class ReadItem:
    """One record to read: its entry in the index, and its buffer."""

    key: Key
    value: bytes
    extents: Extents
    into: Buffer
    position: int
    """The key's position in its call."""
    outcome: ReadOutcome = ReadOutcome.CORRUPT

    def end(self, outcome: ReadOutcome) -> None:
        """Set its outcome."""
        self.outcome = outcome


def _ignore(_job: ReadJob) -> None:
    """The default report: a caller that runs the job itself needs none."""


@dataclass(slots=True, eq=False)
class ReadJob:
    """Reads records of one epoch. ``io_errors`` counts failed system calls."""

    items: list[ReadItem]
    epoch: int
    codec: Codec
    file: PayloadFile
    report: Callable[[ReadJob], None] = _ignore
    io_errors: int = 0

    @property
    def records(self) -> int:
        """The number of its records."""
        return len(self.items)

    def notify(self) -> None:
        """Report the end."""
        self.report(self)

    def run(self, scratch: Scratch) -> None:
        """Read and verify all records."""
        try:
            self._read_all(scratch)
        except Exception:
            # the call needs an answer and the thread must continue: all records count as CORRUPT
            self.io_errors += 1

    def _read_all(self, scratch: Scratch) -> None:
        try:
            self._move(self.items, scratch)
        except OSError:
            self.io_errors += 1
            self._read_each(scratch)

    def _read_each(self, scratch: Scratch) -> None:
        """Read the records one by one after a failure, so that one bad record does not fail the
        rest of its job."""
        for item in self.items:
            try:
                self._move([item], scratch)
            except OSError:
                self.io_errors += 1

    def _move(self, items: Sequence[ReadItem], scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=False)
        coded = [item.into for item in items if flags_of(header_of(item.value))]
        buffers = CodecScratch(self.codec, scratch, coded)
        found = []
        for item in items:
            header = header_of(item.value)
            encoded = buffers.take(item.into.nbytes) if flags_of(header) else item.into
            mover.add(item.extents, encoded[: min(stored_bytes_of(header), item.into.nbytes)])
            found.append((item, header, encoded))
        mover.flush()
        for item, header, encoded in found:
            if self.codec.decode(header, item.key, self.epoch, encoded, item.into):
                item.end(ReadOutcome.OK)


class CodecScratch:
    """Scratch memory for encoded payloads, one part per payload."""

    def __init__(self, codec: Codec, scratch: Scratch, payloads: Sequence[Buffer]) -> None:
        total = sum(codec.scratch_bytes(data.nbytes) for data in payloads)
        self._codec = codec
        self._left = scratch.codec(total) if total else scratch.data[:0]

    def take(self, payload_bytes: int) -> Buffer:
        size = self._codec.scratch_bytes(payload_bytes)
        taken, self._left = self._left[:size], self._left[size:]
        return taken
