"""A Triton kernel that performs a list of copies between the GPU and registered host memory.

For pages so small that the copy engine spends more time on a descriptor than on its bytes. A few
thread blocks keep enough bytes in flight for the bus, so the model loses a few of its
multiprocessors, and only while a copy runs.

Importing this module needs torch and Triton, so the engine imports it only when a group asks for
the kernel. Compiled for Hopper and run in Triton's interpreter by the tests; not yet run on a GPU.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Addresses = npt.NDArray[np.int64]

PROGRAMS = 16
"""Thread blocks per launch. 16 x 8 KiB in flight cover the bus's latency times its rate (50 GB/s
x 1 to 2 us) with an eighth of an H100's multiprocessors. Not measured."""

WORDS = 1024
"""8-byte words that one thread block moves per step."""

WARPS = 8

LIST_COPIES = 8192
"""Copies of one launch at most: 192 KiB of list."""

PREPARED_LISTS = 8


# Not specialized on the count: every length of list is then one compiled kernel.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def copy_list_kernel(lists, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # ditto
    """``lists`` is ``[3, count]`` int64: targets, sources, sizes in bytes; every number a multiple
    of 16, which lets a thread move 16 bytes at once. Each program takes every n-th copy."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        to = tl.load(lists + i).to(tl.pointer_type(tl.int64))
        source = tl.load(lists + count + i).to(tl.pointer_type(tl.int64))
        words = tl.load(lists + 2 * count + i) // 8
        to = tl.multiple_of(to, 16)
        source = tl.multiple_of(source, 16)
        words = tl.multiple_of(words, 2)
        for start in range(0, words, WORDS):
            at = start + tl.arange(0, WORDS)
            inside = at < words
            values = tl.load(source + at, mask=inside)
            tl.store(to + at, values, mask=inside)


class _Lists:
    """Memory for one launch's list, pinned and on the device. It returns to the pool when it is no
    longer referenced; the launcher holds it until the launch has run."""

    def __init__(self, host: Any, device: Any, pool: deque[tuple[Any, Any]]) -> None:
        self.host = host
        self.device = device
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append((self.host, self.device))


class CopyKernel:
    """Launches the kernel on one device. It compiles and allocates at construction, so that later
    no copy waits for a compiler, and no allocation makes the GPU's streams wait for each other.
    Raises whatever torch or Triton raise where they cannot be used.

    Ownership: any thread may launch; the pool is a deque, whose ``append`` and ``pop`` are atomic.
    """

    list_copies = LIST_COPIES

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._pool: deque[tuple[Any, Any]] = deque(self._allocate() for _ in range(PREPARED_LISTS))
        self._warm_up()

    def launch(
        self, to: Addresses, source: Addresses, sizes: Addresses, stream: int, kept: list[object]
    ) -> None:
        """Submit all copies to ``stream``. Shapes ``[n]``. Everything that the GPU reads for them
        is appended to ``kept``: hold it until they have run, also when this raises, since the first
        of several launches may be in progress."""
        for start in range(0, len(sizes), self.list_copies):
            part = slice(start, start + self.list_copies)
            self._launch_one(to[part], source[part], sizes[part], stream, kept)

    def _launch_one(
        self, to: Addresses, source: Addresses, sizes: Addresses, stream: int, kept: list[object]
    ) -> None:
        count = len(sizes)
        try:
            host, device = self._pool.pop()
        except IndexError:
            host, device = self._allocate()
        kept.append(_Lists(host, device, self._pool))
        np.concatenate([to, source, sizes], out=host.numpy()[: 3 * count])
        self._submit(host, device, count, stream)

    # The three functions below are all that needs a GPU.

    def _submit(self, host: Any, device: Any, count: int, stream: int) -> None:
        external = torch.cuda.ExternalStream(stream, device=self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(external):
            device[: 3 * count].copy_(host[: 3 * count], non_blocking=True)
            copy_list_kernel[(PROGRAMS,)](device, count, WORDS=WORDS, num_warps=WARPS)

    def _allocate(self) -> tuple[Any, Any]:
        host = torch.empty(3 * LIST_COPIES, dtype=torch.int64, pin_memory=True)
        return host, torch.empty(3 * LIST_COPIES, dtype=torch.int64, device=self._device)

    def _warm_up(self) -> None:
        nothing = np.empty(0, dtype=np.int64)
        stream = torch.cuda.Stream(self._device)
        kept: list[object] = []
        self._launch_one(nothing, nothing, nothing, stream.cuda_stream, kept)
        stream.synchronize()
