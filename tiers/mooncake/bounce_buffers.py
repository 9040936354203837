"""Memory for calls of a Mooncake store: what is read goes there before it is copied to where it is
used, and headers lie there.

Mooncake gives up a transfer after half a minute or a minute and does not end it: when its other end
goes on, bytes are still moved, long after everything was verified and perhaps after the place was
given to something else. So they go into rooms, which are registered once and used again and again,
but for those of a call that may go on: they are never used again.

Any thread may call; a room belongs to the thread that has it lent.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tiers.base import Buffer, TierIoError

BUFFER_BYTES = 32 << 20
"""Payloads of one call together, or one that is larger."""
GIVEN_UP_AFTER_S = 10.0
"""Over TCP what has failed sooner has ended."""
GIVEN_UP_MAX = 1 << 30
"""Bytes that may be set aside because something may still be written there; with more of it nothing
is read any more."""


@dataclass(slots=True)
class Lent:
    """Places. ``is_over``: nothing will be moved to or from there any more."""

    parts: list[Buffer]
    is_over: bool = False
    since: float = field(default_factory=time.monotonic)


class BounceBuffers:
    """``register(address, bytes)`` and ``unregister(address)`` tell the store of memory. A room has
    ``room_bytes``, or more if somebody needs more at once."""

    def __init__(
        self,
        protocol: str,
        register: Callable[[int, int], object],
        unregister: Callable[[int], object],
        buffer_bytes: int,
    ) -> None:
        self._buffer_bytes = buffer_bytes
        self._ends_what_fails = protocol == "tcp"
        self._register = register
        self._unregister = unregister
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self.given_up: list[Buffer] = []

    @contextmanager
    def lend(self, sizes: Sequence[int]) -> Iterator[Lent]:
        """Places of these sizes, in a room that is used again if they are ``over`` at the end, or
        never were of use. Raises ``TierIoError``."""
        if not sizes:
            yield Lent([])
            return
        if sum(buffer.nbytes for buffer in self.given_up) > GIVEN_UP_MAX:
            raise TierIoError("too many transfers were given up; restart the server to go on")
        buffer = self._buffer(sum(sizes))
        starts = np.cumsum([0, *sizes])
        lent = Lent([buffer[at : at + size] for at, size in zip(starts, sizes, strict=False)])
        try:
            yield lent
        finally:
            if lent.is_over:
                self._free.put(buffer)
            else:
                self.given_up.append(buffer)
                self._unregister(buffer.ctypes.data)

    def ended(self, lent: Lent, codes: Sequence[int], untouched: Sequence[int]) -> None:
        """The call has ended with these codes, negative for what has failed; ``untouched`` are
        those that say so before anything is transferred."""
        is_late = time.monotonic() - lent.since >= GIVEN_UP_AFTER_S
        if self._ends_what_fails and not is_late:
            lent.is_over = True
        else:
            lent.is_over = not any(c < 0 and (is_late or c not in untouched) for c in codes)

    def _buffer(self, nbytes: int) -> Buffer:
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            return self._new(nbytes)
        if buffer.nbytes >= nbytes:
            return buffer
        self._unregister(buffer.ctypes.data)
        return self._new(nbytes)

    def _new(self, nbytes: int) -> Buffer:
        buffer = np.empty(max(self._buffer_bytes, nbytes), np.uint8)
        self._register(buffer.ctypes.data, buffer.nbytes)
        return buffer


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours that go into a call together."""
    first = held = 0
    for n, size in enumerate(sizes):
        if n > first and held + size > BUFFER_BYTES:
            yield slice(first, n)
            first = n
            held = 0
        held += size
    if first < len(sizes):
        yield slice(first, len(sizes))
