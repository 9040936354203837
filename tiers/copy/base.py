"""Copies between KV caches ("GPU blocks", on any torch device) and the slots of a slab.

Layers are described by bytes alone (`PageRegion`), never by tensor shape: a page is the bytes of
one layer for one block. In a slot the pages of a chunk lie block by block, and within a block in
the order of the group's regions.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT
from tiers.io.threads import from_threads
from tiers.tally import Tally

logger = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int64]
SlotIds = npt.NDArray[np.int64]
Work: TypeAlias = Callable[[], None]


def padded(chunk_bytes: int) -> int:
    """Bytes of a chunk's record in a tier: the chunk, padded to whole pages so that a tier can use
    direct I/O on the slot itself."""
    return -(-chunk_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PageRegion:
    """The location of one layer's pages: the page of block ``b`` is ``page_bytes`` bytes at
    ``address + b * block_stride`` (bytes). ``page_bytes`` excludes padding."""

    layer: str
    address: int
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """All regions of one KV cache group, and the number of blocks in a chunk."""

    group: int
    chunk_blocks: int
    regions: tuple[PageRegion, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the sum of its layers' pages."""
        return sum(region.page_bytes for region in self.regions)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in a slot."""
        return self.chunk_blocks * self.block_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a chunk's record in a tier: see ``padded``."""
        return padded(self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Chunks of one group to move: ``blocks[i, j]`` is block ``j`` of the chunk in ``slots[i]``.

    Shapes: ``blocks`` ``[n, chunk_blocks]``, ``slots`` ``[n]``. Block ids below 0 are skipped
    (these parts of the chunk are not wanted).
    """

    group: int
    blocks: BlockIds
    slots: SlotIds


class TransferError(Exception):
    """Raised if a copy failed. The bytes at its target must not be used."""


class Ticket(ABC):
    """One submitted copy. It completes exactly once, in submission order within its lane."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the copy has ended, successfully or not."""

    @abstractmethod
    async def completed(self) -> None:
        """Wait for the end; raises ``TransferError`` if the copy failed. Cancelling the wait
        does not cancel the copy."""

    @abstractmethod
    def on_done(self, call: Callable[[TransferError | None], object]) -> None:
        """Run ``call`` on the running loop after the end, with the reason if the copy failed. No
        task is involved, so no cancellation can prevent the call."""

    @property
    def submitted(self) -> Future[object] | None:
        """A future that completes when the copy has been passed to the device. Its result is the
        event that marks the end of the copy there, for ``CopyEngine.hold_compute``. Without such an
        event it never completes. ``None`` if compute is synchronous: callers then wait for the end
        of the copy."""
        return None

    async def ended(self) -> None:
        """Like ``completed``, for the owner of the memory: a cancelled wait continues until the
        copy has ended, however often it is cancelled, and only then raises ``CancelledError``."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self.completed()
            except asyncio.CancelledError as error:
                cancelled = error
                continue
            except TransferError:
                if cancelled is None:
                    raise
            break
        if cancelled is not None:
            raise cancelled


class FutureTicket(Ticket):
    """A ticket that a worker thread completes with ``finish``."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        # A running future cannot be cancelled, so an abandoned wait does not affect the copy.
        self._future.set_running_or_notify_cancel()

    def done(self) -> bool:
        return self._future.done()

    async def completed(self) -> None:
        await asyncio.wrap_future(self._future)

    def on_done(self, call: Callable[[TransferError | None], object]) -> None:
        post = from_threads(call)

        def notify(future: Future[None]) -> None:
            error = future.exception()
            post(error if isinstance(error, TransferError) else None)

        self._future.add_done_callback(notify)

    def finish(self, error: TransferError | None) -> None:
        """End the ticket, once, from the worker thread."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


class EventTicket(FutureTicket):
    """A ticket of copies that end with an event, so that the model's stream can wait for them."""

    __slots__ = ("_submitted",)

    def __init__(self) -> None:
        super().__init__()
        self._submitted: Future[object] = Future()

    @property
    def submitted(self) -> Future[object] | None:
        return self._submitted

    def ends_at(self, event: object) -> None:
        """Record that everything of this copy precedes ``event`` on its stream."""
        self._submitted.set_result(event)


@dataclass(frozen=True, slots=True)
class CopyPathInfo:
    """One path on which an engine can copy a group in one direction (``store`` or ``load``): its
    name, whether the engine uses it, and the bytes per second that it reached, if measured."""

    group: int
    direction: str
    name: str
    is_used: bool
    bytes_per_second: float | None = None


class CopyEngine(ABC):
    """Copies in two FIFO lanes that are independent of each other: store (GPU to slab) and load
    (slab to GPU).

    ``after`` is the event that the copy must wait for on the compute stream (recorded by
    ``record_event``); ``None`` means that the data is ready now. Submitting never blocks on a copy.
    The model-runner thread calls ``record_event`` and ``hold_compute``; only the offload loop's
    thread calls the other methods.
    """

    @abstractmethod
    def record_event(self) -> object | None:
        """Mark the current end of the compute stream; returns ``None`` if compute is
        synchronous."""

    def hold_compute(self, event: object) -> None:
        """Make all work that is launched on the compute stream from now on wait for the end of a
        copy. ``event`` comes from ``Ticket.submitted``. Called from the model-runner thread; does
        not block."""
        raise TypeError(f"compute does not wait for events with this engine: {event!r}")

    @abstractmethod
    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        """Copy blocks into slots."""

    @abstractmethod
    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        """Copy slots into blocks."""

    def path_infos(self) -> tuple[CopyPathInfo, ...]:
        """Return the paths that were compared or are used; empty if there is only one."""
        return ()

    def failures(self) -> dict[str, int]:
        """Count the unexpected failures so far by kind; ``Failures`` logs them. Callable
        from any thread."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies in flight, then release threads and streams. Idempotent."""


def type_name(error: Exception) -> str:
    """Return the default kind of a failure: the name of its exception."""
    return type(error).__name__


class Failures:
    """Runs work and counts unexpected failures. ``kind_of`` names the kind of an exception:
    failures of one kind share a count and a log line."""

    def __init__(self, kind_of: Callable[[Exception], str] = type_name) -> None:
        self._tally = Tally()
        self._kind_of = kind_of
        self._has_failed = False

    def run(self, work: Work) -> TransferError | None:
        """Run ``work`` and return how it failed, if it did. A ``TransferError`` rejects a wrong
        request and is raised only to its caller; any other exception is counted and logged too."""
        try:
            work()
        except TransferError as error:
            return error
        except Exception as error:
            # fail only this copy: if the lane's thread died, every later copy would hang
            self._note(error)
            return TransferError(f"the copy failed: {type(error).__name__}: {error}")
        return None

    def counts(self) -> dict[str, int]:
        """Return the count of each kind: a driver function with its error code, or an exception."""
        return self._tally.counts() if self._has_failed else {}

    def _note(self, error: Exception) -> None:
        count = self._tally.add(self._kind_of(error))
        self._has_failed = True
        if count == 1:
            logger.error("kvtiers: a copy failed unexpectedly (%s)", error, exc_info=error)
        elif count:
            logger.error("kvtiers: %d copies have failed like this so far: %s", count, error)
