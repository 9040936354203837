"""The copy kernel: performs a list of copies between the GPU and registered host memory.

The kernel is for pages so small that the copy engine spends more time on a descriptor than on its
bytes. A few thread blocks keep enough bytes in flight to saturate the bus, so the model loses only
a few multiprocessors, and only while a copy runs.

Its source is ``copy_list.cu``. The driver loads ``copy_list.ptx``, which is compiled from it, so
neither Triton nor a compiler is needed. The tests run the source on the host and assemble the PTX
for four generations of GPUs; it has not yet run on a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from tiers.copy.cuda_lanes import CudaEvent, EventPool
from tiers.cuda_driver import Addresses, Driver
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

PTX = Path(__file__).with_name("copy_list.ptx")
NAME = b"kvtiers_copy_list"

BLOCKS = 16
"""Thread blocks per launch. Each of their 128 warps has 2 KiB in flight: the total of 256 KiB is
more than the bus's rate times its latency (50 GB/s x 1 to 2 us), and takes an eighth of an H100's
multiprocessors."""

THREADS = 256

LIST_COPIES = 8192
"""Maximum number of copies in one launch: 192 KiB of list."""

LISTS = 8
"""Maximum number of launches of one stream that may wait to run; the next one waits for the oldest
of them."""

_COPY_BYTES: Final = 3 * 8  # target, source, size


class CopyKernel:
    """Launches the kernel on one device. It loads, allocates and pins at construction and in
    ``attach``, so that later no copy waits for a compiler, and no allocation makes the GPU's
    streams wait for each other. Raises ``DriverError`` or ``SlabError`` if it cannot be used.

    The context must be current in every call. Call ``close`` only when every stream has run
    everything that was launched on it.

    Ownership: each attached stream has one launching thread.
    """

    def __init__(self, driver: Driver, events: EventPool, device: int) -> None:
        self._driver = driver
        self._events = events
        self._device = device
        self._lists: dict[int, _Lists] = {}
        with ExitStack() as undo:
            module = driver.load_module(PTX.read_bytes())
            undo.callback(driver.unload_module, module)
            self._kernel = driver.find_kernel(module, NAME)
            self._undo = undo.pop_all()

    def attach(self, stream: int) -> None:
        """Prepare launches on ``stream``, and launch once, because a kernel may be loaded only at
        its first launch."""
        lists = _Lists(self._driver, self._events, self._device)
        self._undo.callback(lists.close)
        self._lists[stream] = lists
        nothing = np.empty(0, dtype=np.int64)
        self._launch(nothing, nothing, nothing, stream)
        self._driver.synchronize_stream(stream)

    def launch(self, to: Addresses, source: Addresses, sizes: Addresses, stream: int) -> None:
        """Submit all copies to ``stream``. Shapes ``[n]``. Waits for the oldest launch if too many
        launches of this stream have not run."""
        for start in range(0, len(sizes), LIST_COPIES):
            part = slice(start, start + LIST_COPIES)
            self._launch(to[part], source[part], sizes[part], stream)

    def close(self) -> None:
        """Free the memory that the launches read."""
        self._lists.clear()
        self._undo.close()

    def _launch(self, to: Addresses, source: Addresses, sizes: Addresses, stream: int) -> None:
        count = len(sizes)
        lists = self._lists[stream]
        host, on_host, on_device = lists.take(stream)
        np.concatenate([to, source, sizes], out=host[: 3 * count])
        if count:
            self._driver.copy_one(on_device, on_host, count * _COPY_BYTES, stream)
        self._driver.launch(self._kernel, BLOCKS, THREADS, stream, (on_device, count))
        lists.launched(stream)


class _Lists:
    """Memory for the lists of one stream, registered and on the device. The lists are used in turn;
    each is written again only when the launch that read it last has run."""

    def __init__(self, driver: Driver, events: EventPool, device: int) -> None:
        self._driver = driver
        self._events = events
        self._next = 0
        # A list in use is busy until its event; without an event, until its stream has run
        # everything.
        self._busy: list[CudaEvent | int | None] = [None] * LISTS
        nbytes = LIST_COPIES * _COPY_BYTES
        with ExitStack() as undo:
            self._device = driver.allocate(LISTS * nbytes)
            undo.callback(driver.free, self._device)
            registrar = CudaRegistrar(device, driver)
            self._slab = HostSlab(nbytes, LISTS, pin=True, registrar=registrar, background=False)
            undo.callback(self._slab.close)
            self._undo = undo.pop_all()

    def take(self, stream: int) -> tuple[Addresses, int, int]:
        """The next list: its memory, its address on the host and on the device."""
        busy = self._busy[self._next]
        if isinstance(busy, CudaEvent):
            self._driver.synchronize_event(busy.handle)
        elif busy is not None:
            self._driver.synchronize_stream(busy)
        self._busy[self._next] = stream
        device = self._device + self._next * self._slab.slot_bytes
        host = self._slab.slot_view(self._next, self._slab.slot_bytes).view(np.int64)
        return host, self._slab.slot_address(self._next), device

    def launched(self, stream: int) -> None:
        """Record that the launch that reads the list taken last is on its stream."""
        at, self._next = self._next, (self._next + 1) % LISTS
        self._busy[at] = self._events.record(stream)

    def close(self) -> None:
        self._busy.clear()
        self._undo.close()
