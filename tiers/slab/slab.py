"""The host memory that holds the chunks of the CPU tier: one mapping, cut into equal slots.

It owns the memory: its size, alignment, NUMA node and registration with CUDA, faulting it in, and
excluding it from core dumps and forked children. It knows nothing about keys, copies, or which
slots are in use.

The memory is anonymous and private: it creates no files in /dev/shm or on disk, it does not outlive
the process, and it takes exactly ``slot_count * slot_stride`` bytes.

Ownership: the preparing thread alone writes ``_ready_slots``, ``_pinned_slots``, ``_failure``,
``_registering`` and ``_registered`` until it ends; ``close`` joins it before reading
``_registered``. The condition notifies waiting threads of progress.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import threading
import time

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT
from tiers.slab.host_memory import available_bytes, prefer_node
from tiers.slab.pinning import PinningError, Registrar, pinning_advice

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 8 * 2**20
"""Preparation proceeds in pieces of about this size. Registering memory holds driver locks that any
other CUDA call on the machine may need: about 8 ms for a piece on the slowest machine measured."""

PAUSE_SHARE = 1.0
"""In the background, the thread pauses after each piece, this many times as long as the piece took,
so that others can use the driver."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module. Keeps the content.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class SlabError(Exception):
    """Raised if the memory is not available, or cannot be prepared as configured."""


class HostSlab:
    """``slot_count`` slots of ``slot_bytes`` bytes, each starting on a page boundary.

    ``slot_stride`` is ``slot_bytes`` rounded up to ``ALIGNMENT``. Slot ``i`` lies at
    ``address + i * slot_stride``.

    A background thread faults the pages in (and, with ``pin``, registers them with CUDA) from slot
    0 upwards; with ``background=False`` this happens before the constructor returns. The CPU may
    use any slot immediately. ``pinned_slots`` is the number of registered slots, ``usable_slots``
    the number of slots that copies may use, and ``wait_ready`` waits for preparation. Pieces are
    whole pages of ``page_bytes``, by default the machine's page size.

    ``pin_fallback``: if a registration fails (memlock limit), a warning is logged and the other
    slots stay unregistered, instead of a ``SlabError`` in ``wait_ready``. ``numa_node``: prefer
    memory on that node. ``registrar`` replaces CUDA's registration, for tests; the slab closes it.

    Raises ``ValueError`` for sizes below 1, and ``SlabError`` if the memory cannot be allocated.
    """

    def __init__(
        self,
        slot_bytes: int,
        slot_count: int,
        *,
        pin: bool = False,
        pin_fallback: bool = False,
        numa_node: int | None = None,
        background: bool = True,
        registrar: Registrar | None = None,
        piece_bytes: int = PIECE_BYTES,
        page_bytes: int = mmap.PAGESIZE,
    ) -> None:
        if slot_bytes < 1 or slot_count < 1:
            raise ValueError(f"a slab needs slots: got {slot_count} slots of {slot_bytes} bytes")
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.slot_stride = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        self.size_bytes = self.slot_stride * slot_count
        self._pin_fallback = pin_fallback
        self._registering = pin
        self._registered: dict[int, int] = {}  # address -> bytes
        self._page_bytes = page_bytes
        self._piece_slots = _piece_slots(self.slot_stride, piece_bytes, page_bytes)
        self._pauses = background
        self._condition = threading.Condition()
        self._ready_slots = 0
        self._pinned_slots = 0
        self._failure: SlabError | None = None
        self._stopping = False
        self._closed = False

        self._map = _map_memory(_rounded_up(self.size_bytes, page_bytes), page_bytes)
        mapped = np.frombuffer(self._map, dtype=np.uint8)
        start = -int(mapped.ctypes.data) % page_bytes
        self._bytes: Bytes | None = mapped[start : start + self.size_bytes]
        self.address: int = int(self._bytes.ctypes.data)
        if numa_node is not None:
            prefer_node(self.address, self.size_bytes, numa_node)
        self._registrar = (registrar or _cuda_registrar()) if pin else None
        # Uses a thread even if the caller waits, because a failed CUDA call leaves an error in its
        # thread.
        self._thread = threading.Thread(target=self._prepare, name="kvtiers-slab", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no more threads: nothing has been registered yet
            self._close_registrar()
            raise
        if not background:
            self._wait_or_close()

    def __repr__(self) -> str:
        pinned = ", pinned" if self._registering else ""
        return f"HostSlab({self.slot_count} x {self.slot_bytes} bytes{pinned})"

    def slot(self, slot: int) -> Bytes:
        """The whole slot, ``slot_stride`` bytes, without a copy."""
        return self.slot_view(slot, self.slot_stride)

    def slot_view(self, slot: int, nbytes: int) -> Bytes:
        """The first ``nbytes`` bytes of a slot, without a copy."""
        if self._bytes is None:
            raise SlabError("the slab is closed")
        if not 0 <= slot < self.slot_count or not 0 <= nbytes <= self.slot_stride:
            raise IndexError(
                f"slot {slot} with {nbytes} bytes: the slab has {self.slot_count} slots "
                f"of {self.slot_stride} bytes"
            )
        start = slot * self.slot_stride
        return self._bytes[start : start + nbytes]

    def slot_address(self, slot: int) -> int:
        """The address of slot ``slot`` in this process."""
        return self.address + slot * self.slot_stride

    @property
    def pinned(self) -> bool:
        """True if CUDA registration was requested and has not failed so far."""
        return self._registering

    @property
    def ready_slots(self) -> int:
        """Slots ``[0, ready_slots)`` are faulted in (and registered, if requested)."""
        with self._condition:
            return self._ready_slots

    @property
    def pinned_slots(self) -> int:
        """Slots ``[0, pinned_slots)`` are registered with CUDA. Only grows."""
        with self._condition:
            return self._pinned_slots

    @property
    def usable_slots(self) -> int:
        """Slots ``[0, usable_slots)`` may be used for copies. Only grows. With ``pin`` these are
        the registered slots, because copies of the others are slow and delay their lane. Without
        ``pin``, or if pinning failed (``pin_fallback``), these are all slots."""
        with self._condition:
            if self._registrar is not None and self._failure is not None:
                return self._ready_slots
            return self._pinned_slots if self._registering else self.slot_count

    @property
    def failure(self) -> SlabError | None:
        """The reason why slots from ``ready_slots`` on are not available as requested, or
        ``None``."""
        with self._condition:
            return self._failure

    def wait_ready(self, slot_count: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait until slots ``[0, slot_count)`` are prepared (all of them for ``None``).

        Returns False on timeout; raises ``SlabError`` when preparation failed or was stopped.
        """
        wanted = self.slot_count if slot_count is None else min(slot_count, self.slot_count)

        def settled() -> bool:
            return self._ready_slots >= wanted or self._failure is not None or self._stopping

        with self._condition:
            if not self._condition.wait_for(settled, timeout_s):
                return False
            if self._ready_slots >= wanted:
                return True
            raise self._failure or SlabError("the slab was closed while it was being prepared")

    def stop_preparing(self) -> None:
        """Stop preparing after the current piece, without waiting for it. Prepared slots stay
        usable; ``wait_ready`` for the others raises."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()

    def close(self) -> None:
        """Unregister and release the memory. Idempotent. No copy may be in progress.

        The mapping itself is released with the last view of a slot, so that a leaked view reads old
        bytes instead of crashing the process.
        """
        if self._closed:
            return
        self._closed = True
        self.stop_preparing()
        self._thread.join()
        if self._registrar is not None:
            for address in self._registered:
                _unregister(self._registrar, address)
            self._registered.clear()
        self._close_registrar()
        self._bytes = None
        try:
            self._map.close()
        except BufferError:
            logger.debug(
                "kvtiers: %r: views of slots are still held; the last one releases the memory", self
            )

    def _close_registrar(self) -> None:
        if self._registrar is None:
            return
        try:
            self._registrar.close()
        except PinningError as error:  # the context stays until the process ends
            logger.warning("kvtiers: the CUDA device could not be released: %s", error)

    def _wait_or_close(self) -> None:
        try:
            self.wait_ready()
        except BaseException:  # unmap the memory even on Ctrl-C
            self.close()
            raise

    def _prepare(self) -> None:
        """Fault in and register the pieces one by one, on the preparing thread."""
        try:
            for first in range(0, self.slot_count, self._piece_slots):
                with self._condition:
                    if self._stopping:
                        return
                end = min(first + self._piece_slots, self.slot_count)
                busy_s = self._prepare_piece(first, end)
                with self._condition:
                    self._ready_slots = end
                    if self._registering:
                        self._pinned_slots = end
                    self._condition.notify_all()
                if end < self.slot_count:
                    self._pause(busy_s * PAUSE_SHARE)
        except SlabError as failure:
            logger.error("kvtiers: %s", failure)
            self._fail(failure)
        except Exception as failure:
            # the thread must not die silently: waiting threads need the cause
            logger.exception("kvtiers: preparing the slab failed")
            self._fail(SlabError(f"preparing the slab failed: {failure}"))

    def _pause(self, seconds: float) -> None:
        """Let others use the driver for a while, unless a thread waits for the whole slab or closes
        it."""
        if self._pauses and seconds > 0.0:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping, seconds)

    def _fail(self, failure: SlabError) -> None:
        with self._condition:
            self._failure = failure
            self._condition.notify_all()

    def _prepare_piece(self, first: int, end: int) -> float:
        """Prepare slots ``[first, end)``. A piece consists of whole pages and whole slots, so that
        no copy of a slot crosses two registrations. Returns how many seconds the driver was
        busy."""
        address = self.slot_address(first)
        nbytes = _rounded_up((end - first) * self.slot_stride, self._page_bytes)
        _populate(address, nbytes)
        if self._registrar is None or not self._registering:
            return 0.0
        began = time.monotonic()
        try:
            self._registrar.register(address, nbytes)
        except PinningError as error:
            self._registering = False
            text = pinning_advice(error, self.size_bytes, sum(self._registered.values()))
            if not self._pin_fallback:
                raise SlabError(text) from error
            logger.warning(
                "kvtiers: %s These slots use pageable memory instead, so copies are slow.",
                text,
            )
        else:
            self._registered[address] = nbytes
        return time.monotonic() - began


def _cuda_registrar() -> Registrar:
    from tiers.slab.cuda_registrar import CudaRegistrar

    try:
        return CudaRegistrar()
    except PinningError as error:
        raise SlabError(str(error)) from error


def _unregister(registrar: Registrar, address: int) -> None:
    """Unregister memory. A failure is only logged: the memory then stays pinned until the process
    ends."""
    try:
        registrar.unregister(address)
    except PinningError as error:
        logger.warning("kvtiers: unpinning memory failed: %s", error)


def _rounded_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _piece_slots(stride: int, piece_bytes: int, page_bytes: int) -> int:
    """The number of slots of a piece of about ``piece_bytes``, such that the piece consists of
    whole pages."""
    unit = page_bytes // math.gcd(stride, page_bytes)
    return max(1, piece_bytes // (unit * stride)) * unit


def _map_memory(nbytes: int, page_bytes: int) -> mmap.mmap:
    """Map ``nbytes`` of zeroed private memory, aligned to ``page_bytes``. If that is larger than
    the machine's page size, the mapping includes unused address space before the memory.

    It checks the free memory first because Linux overcommits memory: otherwise the process would be
    killed later, while the pages are faulted in.
    """
    free = available_bytes()
    if free is not None and nbytes > free:
        raise SlabError(
            f"the CPU tier needs {nbytes:,} bytes of memory and {free:,} are available on this "
            f"machine (or in this container). Make the CPU tier smaller."
        )
    try:
        before = 0 if mmap.PAGESIZE % page_bytes == 0 else page_bytes
        memory = mmap.mmap(-1, nbytes + before, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SlabError(
            f"the CPU tier needs {nbytes:,} bytes of memory and the kernel refused: {error}. "
            f"Make the CPU tier smaller or raise the limit ('ulimit -v', the container's memory)."
        ) from error
    # Huge pages reduce TLB misses. A core dump must not contain users' data or take hours. A forked
    # child must not get copy-on-write pages of memory that a device reads and writes.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
        try:
            memory.madvise(advice)
        except OSError as error:  # a kernel without huge pages: everything still works
            logger.debug("kvtiers: madvise(%d): %s", advice, error)
    return memory


def _populate(address: int, nbytes: int) -> None:
    """Fault in pages for writing. Their contents are kept, because a slot may already be in use.

    Raises ``SlabError`` if there is no memory for them. A kernel before 5.14 cannot do this; there,
    each page is faulted in at its first use.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        logger.debug("kvtiers: this kernel cannot fault in memory ahead of use")
        return
    raise SlabError(
        f"no memory for {nbytes:,} more bytes of the CPU tier: {os.strerror(code)}. "
        f"Make the CPU tier smaller."
    )
