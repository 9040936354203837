"""Copies between KV caches in host memory (vLLM's CPU platform) and the slab.

Compute is synchronous there, so a copy has nothing to wait for, and ``record_event`` returns
``None``. Each lane is one thread: a second thread would gain no memory bandwidth, and a single
thread keeps the order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from tiers.copy.base import (
    CopyBatch,
    CopyEngine,
    Failures,
    FutureTicket,
    GroupRegions,
    Ticket,
    TransferError,
    Work,
)
from tiers.copy.descriptors import DescriptorBuilder
from tiers.copy.host_loop import CopyLoop, copy_loop
from tiers.slab.slab import HostSlab


class Lane:
    """Runs submitted work on one thread, in order.

    The submitting thread writes the lane's queue, and the lane's one thread reads it. Work that
    raises fails its ticket with ``TransferError``, and the lane continues. After ``close`` every
    submission fails at once.
    """

    def __init__(self, name: str, failures: Failures | None = None) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, FutureTicket] | None] = queue.SimpleQueue()
        self._closed = False
        self._failures = failures or Failures()
        self._thread = threading.Thread(target=self._run, name=f"kvtiers-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Ticket:
        """Queue ``work``; the ticket completes when it has run."""
        ticket = FutureTicket()
        if self._closed:
            ticket.finish(TransferError("the copy engine is closed"))
        else:
            self._queue.put((work, ticket))
        return ticket

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            ticket.finish(self._failures.run(work))


class HostCopyEngine(CopyEngine):
    """A ``CopyEngine`` for KV caches that the CPU can address.

    ``groups`` describe the KV caches, ``num_blocks`` bounds their block ids (pass it whenever it is
    known: a block id out of range is then a ``TransferError`` instead of a wild write). A failed
    submission, even one with malformed batches, is reported by its ticket.

    The caller must not change the arrays of a submitted batch, the slots or the blocks until the
    ticket is done. Raises ``ValueError`` when a chunk does not fit a slot.
    """

    def __init__(
        self,
        groups: Sequence[GroupRegions],
        slab: HostSlab,
        *,
        num_blocks: int | None = None,
        loop: CopyLoop | None = None,
    ) -> None:
        self._descriptors = DescriptorBuilder(
            groups,
            slab_address=slab.address,
            slot_stride=slab.slot_stride,
            slot_count=slab.slot_count,
            num_blocks=num_blocks,
        )
        self._loop = loop or copy_loop()
        self._failures = Failures()
        self._store_lane = Lane("store", self._failures)
        self._load_lane = Lane("load", self._failures)

    def record_event(self) -> object | None:
        return None

    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._store_lane.submit(lambda: self._store(batches))

    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._load_lane.submit(lambda: self._load(batches))

    def failures(self) -> dict[str, int]:
        return self._failures.counts()

    def close(self) -> None:
        self._store_lane.close()
        self._load_lane.close()

    def _store(self, batches: Sequence[CopyBatch]) -> None:
        copies = self._descriptors.build(batches)
        self._loop(copies.slots, copies.blocks, copies.sizes)

    def _load(self, batches: Sequence[CopyBatch]) -> None:
        copies = self._descriptors.build(batches)
        self._loop(copies.blocks, copies.slots, copies.sizes)
