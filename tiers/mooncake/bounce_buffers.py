"""Bounce buffers for calls of a Mooncake store: payloads are read through them, and headers are
read and written through them.

Mooncake abandons a transfer after half a minute or a minute without cancelling it: when the peer
continues, bytes still arrive, long after the payload was verified and perhaps after its memory was
reused. So transfers use bounce buffers, which are registered once and reused. The buffers of a call
that may continue are never used again; new ones are registered when a call needs them.

Any thread may call. A buffer belongs to the thread that borrowed it.
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
"""Maximum total size of the payloads of one call. A single larger payload gets a separate call."""
GIVEN_UP_AFTER_S = 10.0
"""Over TCP, a call that fails within this time no longer moves bytes."""
GIVEN_UP_MAX = 1 << 30
"""Maximum size of buffers that are abandoned because Mooncake may still write to them. Above this,
all reads fail."""


@dataclass(slots=True)
class LentBuffer:
    """Parts of one buffer. ``is_over`` is True once no more bytes will move to or from them."""

    parts: list[Buffer]
    is_over: bool = False
    since: float = field(default_factory=time.monotonic)


class BounceBuffers:
    """``register(address, bytes)`` and ``unregister(address)`` register memory with the store. A
    buffer has ``buffer_bytes``, or more if one call needs more."""

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
        self._free: queue.LifoQueue[Buffer] = queue.LifoQueue()
        self.given_up: list[Buffer] = []

    def reserve(self, register: Callable[[int, int], object]) -> None:
        """Make one more buffer, registered by ``register``, so that one more call at a time needs
        no registration. Raises the errors of ``register``."""
        self._free.put(self._new(self._buffer_bytes, register))

    @contextmanager
    def lend(self, sizes: Sequence[int]) -> Iterator[LentBuffer]:
        """Lend parts of these sizes in one buffer. The buffer is reused if ``is_over`` is True at
        the end. Raises ``TierIoError``."""
        if not sizes:
            yield LentBuffer([])
            return
        if sum(buffer.nbytes for buffer in self.given_up) > GIVEN_UP_MAX:
            raise TierIoError("too many transfers were abandoned; restart the server to continue")
        buffer = self._buffer(sum(sizes))
        starts = np.cumsum([0, *sizes])
        lent = LentBuffer([buffer[at : at + size] for at, size in zip(starts, sizes, strict=False)])
        try:
            yield lent
        finally:
            if lent.is_over:
                self._free.put(buffer)
            else:
                self.given_up.append(buffer)
                self._unregister(buffer.ctypes.data)

    def note_ended(self, lent: LentBuffer, codes: Sequence[int], untouched: Sequence[int]) -> None:
        """Record that the call has ended with these codes, negative for failures. ``untouched`` are
        the codes of errors that occur before anything is transferred."""
        is_late = time.monotonic() - lent.since >= GIVEN_UP_AFTER_S
        if self._ends_what_fails and not is_late:
            lent.is_over = True
        else:
            lent.is_over = not any(c < 0 and (is_late or c not in untouched) for c in codes)

    def _buffer(self, nbytes: int) -> Buffer:
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            return self._new(nbytes, self._register)
        if buffer.nbytes >= nbytes:
            return buffer
        self._unregister(buffer.ctypes.data)
        return self._new(nbytes, self._register)

    def _new(self, nbytes: int, register: Callable[[int, int], object]) -> Buffer:
        buffer = np.empty(max(self._buffer_bytes, nbytes), np.uint8)
        register(buffer.ctypes.data, buffer.nbytes)
        return buffer


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Group consecutive payloads that fit into one call."""
    first = held = 0
    for n, size in enumerate(sizes):
        if n > first and held + size > BUFFER_BYTES:
            yield slice(first, n)
            first = n
            held = 0
        held += size
    if first < len(sizes):
        yield slice(first, len(sizes))
