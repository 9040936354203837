"""Uses and frees host memory, step by step, until the tiers of later probes fit.

Some virtual machines are given their memory only when it is used, so that it looks small at first.
A tier that is larger than the free memory is refused.
"""

from __future__ import annotations

import mmap
import sys
import time

from common import result

from tiers.slab.host_memory import available_bytes

GIB = 2**30
STEP = 256 << 20
MARGIN = GIB
"""The machine must always keep this much free, or the kernel would end the probe."""
PATIENCE_S = 2.0


def grow(wanted: int) -> int:
    """Use memory until ``wanted`` bytes are used or free. Returns the bytes used."""
    held: list[mmap.mmap] = []
    while len(held) * STEP + free() < wanted:
        end = time.monotonic() + PATIENCE_S
        while free() < MARGIN + STEP and time.monotonic() < end:
            time.sleep(0.01)  # the host may give more memory
        if free() < MARGIN + STEP:
            break
        held.append(memory := mmap.mmap(-1, STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for page in range(0, STEP, mmap.PAGESIZE):
            memory[page] = 1
    return len(held) * STEP


def free() -> int:
    return available_bytes() or 0


def main(wanted_gib: int = 80) -> None:
    before, began = free(), time.monotonic()
    used = grow(wanted_gib * GIB)
    found = {
        "free at first, GiB": round(before / GIB, 1),
        "used, GiB": round(used / GIB, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    result(found | {"free then, GiB": round((used + free()) / GIB, 1)})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
