"""The jobs of the I/O threads and the records that they move.

One kind of job seals and writes payloads, the other reads and verifies them.

A job owns its buffers while it runs and never raises. A write job passes its records to the commit
thread. The read jobs of one call report to the event loop together, with a result per record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiers.base import Buffer, Key, WriteOutcome
from tiers.folders.folder import DISK_FULL
from tiers.io.codec import Codec, CodecScratch
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
    epoch: int
    payload_bytes: int
    extents: Extents
    value: bytes = b""
    """The record's entry in the index, once it is encoded."""
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

    def encode(
        self, codec: Codec, payload: Buffer, use: int, into: Buffer
    ) -> tuple[Extents, Buffer]:
        """Encode the payload, in ``into`` if it changes, and make the record's entry with this time
        of use. Returns the extents that the encoded payload needs, and the encoded payload."""
        header, stored = codec.encode(self.key, self.epoch, payload, into)
        self.stored_pages = pages_for(stored.nbytes)
        extents, _ = clip(self.extents, self.stored_pages)
        self.value = pack_value(use, header, extents)
        return extents, stored

    def note_committed(self) -> None:
        """Record that a committed transaction contains the entry."""
        self.is_named = True
        self.outcome = WriteOutcome.OK

    def note_outcome(self, outcome: WriteOutcome) -> None:
        """Record the outcome. It may still be downgraded until the waiting calls get it."""
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
                put.note_outcome(WriteOutcome.FULL if is_full else WriteOutcome.FAILED)
        else:
            self.is_written = True

    def notify(self) -> None:
        """Queue written records for the commit, or report that nothing was written."""
        (self.commit if self.is_written else self.fail)(self.puts)

    def _move(self, scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=True)
        buffers = CodecScratch(self.codec, scratch, [] if self.codec.is_plain else self.data)
        for put, data, use in zip(self.puts, self.data, self.uses, strict=True):
            mover.add(*put.encode(self.codec, data, use, buffers.take(data.nbytes)))
        mover.flush()


class ReadItem(NamedTuple):
    """One record to read: its entry in the index, its extents, its buffer, and the key's position
    in its call."""

    key: Key
    value: bytes
    extents: Extents
    into: Buffer
    position: int


def _ignore(_job: ReadJob) -> None:
    """The default report: a caller that runs the job itself needs none."""


@dataclass(slots=True, eq=False)
class ReadJob:
    """Reads records of one epoch. ``io_errors`` counts failed system calls."""

    items: Sequence[ReadItem]
    epoch: int
    codec: Codec
    file: PayloadFile
    report: Callable[[ReadJob], None] = _ignore
    io_errors: int = 0
    _is_intact: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._is_intact = [False] * len(self.items)

    @property
    def records(self) -> int:
        """The number of its records."""
        return len(self.items)

    def results(self) -> Iterator[tuple[ReadItem, bool]]:
        """Return every record, with True if its payload was read and matches its entry."""
        return zip(self.items, self._is_intact, strict=True)

    def notify(self) -> None:
        """Report the end."""
        self.report(self)

    def run(self, scratch: Scratch) -> None:
        """Read and verify all records."""
        try:
            self._read_all(scratch)
        except Exception:
            # the call needs an answer and the thread must continue: the other records count as
            # damaged
            self.io_errors += 1

    def _read_all(self, scratch: Scratch) -> None:
        try:
            self._move(0, len(self.items), scratch)
        except OSError:
            self.io_errors += 1
            self._read_each(scratch)

    def _read_each(self, scratch: Scratch) -> None:
        """Read the records one by one after a failure, so that one bad record does not fail the
        rest of its job."""
        for number in range(len(self.items)):
            try:
                self._move(number, number + 1, scratch)
            except OSError:
                self.io_errors += 1

    def _move(self, start: int, stop: int, scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=False)
        items = self.items[start:stop]
        coded = [item.into for item in items if flags_of(header_of(item.value))]
        buffers = CodecScratch(self.codec, scratch, coded)
        found = []
        for item in items:
            header = header_of(item.value)
            encoded = buffers.take(item.into.nbytes) if flags_of(header) else item.into
            mover.add(item.extents, encoded[: min(stored_bytes_of(header), item.into.nbytes)])
            found.append((item, header, encoded))
        mover.flush()
        for number, (item, header, encoded) in enumerate(found, start):
            self._is_intact[number] = self.codec.decode(
                header, item.key, self.epoch, encoded, item.into
            )
