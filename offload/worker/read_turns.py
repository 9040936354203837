"""Limits the reads of one tier that are in flight at a time. Reads that requests wait for come
first.

For the worker's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from offload.worker.tier_monitor import CallsInFlight


@dataclass(slots=True, eq=False)
class _Read:
    """A read that waits or has its turn, and the slots that it fills."""

    slots: frozenset[int]
    turn: asyncio.Future[None]
    began: float = 0.0


class ReadTurns:
    """Gives reads their turn, as many at a time as ``CallsInFlight`` allows. A read ahead gets its
    turn only while no other read of this tier is in flight: reads that are in flight together share
    the device's speed, and a read that a request waits for may come at any time. A read that has
    taken longer than ``hung_s`` is assumed to hang, and reads ahead do not wait for it."""

    def __init__(self, count_max: int, hung_s: float = math.inf) -> None:
        self._calls = CallsInFlight(count_max)
        self._hung_s = hung_s
        self._awaited: deque[_Read] = deque()
        self._ahead: deque[_Read] = deque()
        self._running: list[_Read] = []

    @asynccontextmanager
    async def turn(self, slots: Collection[int], *, is_ahead: bool) -> AsyncIterator[None]:
        """Wait for the turn of a read into these slots, and keep it until the context ends."""
        loop = asyncio.get_running_loop()
        read = _Read(frozenset(slots), loop.create_future())
        if is_ahead:  # begin later: reads of the same plan that requests wait for must come first
            self._ahead.append(read)
            loop.call_soon(self._begin)
        else:
            self._awaited.append(read)
            self._begin()
        try:
            await read.turn
            yield
            if read in self._running:  # otherwise it was released, and has read nothing
                self._calls.ended(loop.time() - read.began)
        finally:
            for reads in (self._running, self._awaited, self._ahead):
                if read in reads:
                    reads.remove(read)
                    break
            self._begin()

    def _begin(self) -> None:
        """Give the next reads their turn."""
        while len(self._running) < self._calls.limit and (queue := self._next()):
            read = queue.popleft()
            if not read.turn.done():  # otherwise it was cancelled, and leaves in a moment
                read.began = asyncio.get_running_loop().time()
                self._running.append(read)
                read.turn.set_result(None)

    def _next(self) -> deque[_Read]:
        """The queue whose first read may begin next; an empty queue if no read may begin."""
        if self._awaited:
            return self._awaited
        since = asyncio.get_running_loop().time() - self._hung_s
        is_busy = any(read.began > since for read in self._running)
        return self._awaited if is_busy else self._ahead

    def hurry(self, slot: int) -> None:
        """Give the read ahead that fills this slot the priority of other reads, because a request
        waits for it now."""
        for read in self._ahead:
            if slot in read.slots:
                self._ahead.remove(read)
                self._awaited.append(read)
                self._begin()
                return

    def release_waiting(self, slots: Collection[int]) -> None:
        """Release the reads into these slots that wait for their turn: they are no longer needed
        and will read nothing."""
        for queue in (self._ahead, self._awaited):
            for read in [read for read in queue if not read.slots.isdisjoint(slots)]:
                queue.remove(read)
                if not read.turn.done():
                    read.turn.set_result(None)
