"""The jobs of the I/O threads: payloads to and from their places, sealed and verified there.

A job owns its buffers while it runs and never raises. A write job hands its records to the
commit thread; a read job posts itself back to the event loop with an outcome per record.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiers.base import Buffer, Key, ReadOutcome, WriteOutcome
from tiers.commit_thread import Change, Put
from tiers.direct_io import Mover, PayloadFile, Scratch
from tiers.extents import Runs
from tiers.lmdb_index import header_of, pack_value
from tiers.record import Identity, seal, verify

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, eq=False)
class WriteJob:
    """Payloads ``data[i]`` of ``puts[i]``, with their times of use."""

    puts: list[Put]
    data: list[Buffer]
    uses: list[int]
    identity: Identity
    file: PayloadFile
    commit: Callable[[Change], None]
    fail: Callable[[Sequence[Change]], None]

    def run(self, scratch: Scratch) -> None:
        """Seal and write everything; then queue it for the commit, or fail all of it."""
        try:
            self._move(scratch)
        except Exception as error:
            # An exception of any kind must reach the waiting call, not end the thread.
            is_full = isinstance(error, OSError) and error.errno in DISK_FULL
            for put in self.puts:
                put.outcome = WriteOutcome.FULL if is_full else WriteOutcome.FAILED
            self.fail(self.puts)
            return
        for put in self.puts:
            self.commit(put)

    def _move(self, scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=True)
        for put, data, use in zip(self.puts, self.data, self.uses, strict=True):
            header = seal(self.identity, put.key, put.epoch, data, data.nbytes)
            put.value = pack_value(use, header, put.runs)
            mover.add(put.runs, data)
        mover.flush()


@dataclass(slots=True, eq=False)
class ReadItem:
    """One record to read: what the index says of it, and where it goes."""

    key: Key
    value: bytes
    runs: Runs
    into: Buffer
    position: int
    """Index of the key in its call."""
    waiters: list[Any] = field(default_factory=list)
    """Whoever asked for it; the event loop's own."""
    outcome: ReadOutcome = ReadOutcome.CORRUPT


@dataclass(slots=True, eq=False)
class ReadJob:
    """Records read under one epoch. ``io_errors`` counts failed system calls."""

    items: list[ReadItem]
    epoch: int
    identity: Identity
    file: PayloadFile
    post: Callable[[ReadJob], None]
    io_errors: int = 0

    def run(self, scratch: Scratch) -> None:
        """Read and verify everything, then post this job."""
        try:
            self._read_all(scratch)
        except Exception:  # the call must be answered and the thread live on: all are CORRUPT
            self.io_errors += 1
        finally:
            self.post(self)

    def _read_all(self, scratch: Scratch) -> None:
        try:
            self._move(self.items, scratch)
        except OSError:
            self.io_errors += 1
            self._read_each(scratch)
            return
        for item in self.items:
            self._verify(item)

    def _read_each(self, scratch: Scratch) -> None:
        """After a failure: one bad record must not take its neighbours along."""
        for item in self.items:
            try:
                self._move([item], scratch)
            except OSError:
                self.io_errors += 1
            else:
                self._verify(item)

    def _move(self, items: Sequence[ReadItem], scratch: Scratch) -> None:
        mover = Mover(self.file, scratch, writing=False)
        for item in items:
            mover.add(item.runs, item.into)
        mover.flush()

    def _verify(self, item: ReadItem) -> None:
        header = header_of(item.value)
        if verify(header, self.identity, item.key, self.epoch, item.into):
            item.outcome = ReadOutcome.OK
