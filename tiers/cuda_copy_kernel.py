"""A Triton kernel that performs a list of copies between the GPU and registered host memory.

For pages so small that the copy engine spends more time on a descriptor than on its bytes. A few
thread blocks keep enough bytes in flight for the bus, so the model loses a few of its
multiprocessors, and only while a copy runs.

Importing this module needs torch and Triton, so the engine imports it only when a group asks for
the kernel. Compiled for Hopper and run in Triton's interpreter by the tests; not yet run on a GPU.
"""

from __future__ import annotations

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


class CopyKernel:
    """Launches the kernel on one device. Compiles at construction, so that no copy waits for a
    compiler; raises whatever torch or Triton raise where they cannot be used."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        nothing = np.empty(0, dtype=np.int64)
        stream = torch.cuda.Stream(self._device)
        self.launch(nothing, nothing, nothing, stream.cuda_stream)
        stream.synchronize()

    def launch(self, to: Addresses, source: Addresses, sizes: Addresses, stream: int) -> object:
        """Submit all copies to ``stream``. Shapes ``[n]``. Keep the result until they have run."""
        host = torch.from_numpy(np.stack([to, source, sizes])).pin_memory()
        external = torch.cuda.ExternalStream(stream, device=self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(external):
            lists: Any = host.to(self._device, non_blocking=True)
            copy_list_kernel[(PROGRAMS,)](lists, len(sizes), WORDS=WORDS, num_warps=WARPS)
        return host, lists
