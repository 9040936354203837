"""One rank's simulated GPU: memory, a late compute stream, and two copy lanes in virtual time.

A copy moves half of its pages when it begins and the other half when it ends, so that an early
overwrite of its source or target is detected. It waits for the event that it was given.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sim.content import JUNK, LAYERS, PAGE_BYTES, REGIONS, SLOT_BYTES
from tiers.copy.base import CopyBatch, CopyEngine, FutureTicket, Ticket, TransferError
from tiers.slab.slab import HostSlab

KERNEL_S = 0.004
COPY_S = 0.006


@dataclass(slots=True)
class _Copy:
    """Pairs of (target, source), the event to wait for, and the ticket."""

    moves: list[tuple[memoryview, memoryview]]
    after: int
    ticket: FutureTicket
    fails: bool


class Device(CopyEngine):
    """Memory by layer, and the engine that copies between it and a slab."""

    def __init__(self, rng: random.Random, slab: HostSlab, blocks: int, failure_rate: float):
        self._rng = rng
        self._failure_rate = failure_rate
        self._memory = {
            layer: memoryview(bytearray([JUNK]) * (size * blocks))
            for layer, size in PAGE_BYTES.items()
        }
        self._slots = [
            memoryview(slab.slot_view(slot, SLOT_BYTES)) for slot in range(slab.slot_count)
        ]
        self._regions = {regions.group: regions for regions in REGIONS}
        self._kernels: deque[Callable[[], None]] = deque()
        self.launched = self._done = 0
        self._lanes: dict[str, deque[_Copy]] = {"store": deque(), "load": deque()}
        self._moving: dict[str, bool] = {"store": False, "load": False}

    # -- memory ------------------------------------------------------------------------------

    def page(self, layer: str, block: int) -> memoryview:
        """One page of device memory."""
        size = PAGE_BYTES[layer]
        return self._memory[layer][block * size : (block + 1) * size]

    def slot_bytes(self, slot: int, count: int) -> bytes:
        """The content of a slot, read directly."""
        return bytes(self._slots[slot][:count])

    # -- compute -----------------------------------------------------------------------------

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a kernel after the previous ones, a little later."""
        self._kernels.append(kernel)
        self.launched += 1
        if len(self._kernels) == 1:
            self._later(KERNEL_S, self._run_kernel)

    def _run_kernel(self) -> None:
        if not self._kernels:
            return  # the process has ended
        self._kernels[0]()
        self._kernels.popleft()
        self._done += 1
        if self._kernels:
            self._later(KERNEL_S, self._run_kernel)
        for lane in self._lanes:
            self._move(lane)

    def record_event(self) -> object | None:
        return self.launched

    # -- copies ------------------------------------------------------------------------------

    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit("store", batches, after)

    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit("load", batches, after)

    def _submit(self, lane: str, batches: Sequence[CopyBatch], after: object | None) -> Ticket:
        moves = [move for batch in batches for move in self._moves(lane, batch)]
        self._rng.shuffle(moves)
        assert after is None or isinstance(after, int)
        ticket = FutureTicket()
        fails = self._rng.random() < self._failure_rate
        self._lanes[lane].append(_Copy(moves, after or 0, ticket, fails))
        self._move(lane)
        return ticket

    def _moves(self, lane: str, batch: CopyBatch) -> list[tuple[memoryview, memoryview]]:
        moves = []
        layers = LAYERS[batch.group]
        for blocks, slot in zip(batch.blocks.tolist(), batch.slots.tolist(), strict=True):
            at = 0
            for block in blocks:
                for layer in layers:
                    size = PAGE_BYTES[layer]
                    here, there = self.page(layer, block), self._slots[slot][at : at + size]
                    at += size
                    if block >= 0:
                        moves.append((there, here) if lane == "store" else (here, there))
        return moves

    def _move(self, lane: str) -> None:
        """Begin the lane's oldest copy if it may begin."""
        queue = self._lanes[lane]
        if self._moving[lane] or not queue or queue[0].after > self._done:
            return
        self._moving[lane] = True
        copy = queue[0]
        for target, source in copy.moves[::2]:
            target[:] = source
        self._later(COPY_S, lambda: self._moved(lane))

    def _moved(self, lane: str) -> None:
        if not self._lanes[lane]:
            return  # the process has ended
        copy = self._lanes[lane].popleft()
        for target, source in copy.moves[1::2]:
            target[:] = bytes([JUNK]) * len(target) if copy.fails else source
        self._moving[lane] = False
        copy.ticket.finish(TransferError("injected") if copy.fails else None)
        self._move(lane)

    def _later(self, most_s: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self._rng.random() * most_s, call)

    @property
    def idle(self) -> bool:
        """True if nothing is queued or under way."""
        return not (self._kernels or self._lanes["store"] or self._lanes["load"])

    def close(self) -> None:
        """End all copies, because the process has ended."""
        self._kernels.clear()
        for queue in self._lanes.values():
            while queue:
                queue.popleft().ticket.finish(TransferError("the process has ended"))
