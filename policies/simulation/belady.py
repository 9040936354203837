"""Upper bounds for every policy: Belady's optimum with bypass, and the infinite cache.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966. With bypass, a block is not stored at all if its next use is later than those of
all cached blocks.

A request that uses a block also uses all blocks before it, so a block's next use is never later
than those of its descendants. If ties are broken deepest-first, the optimal cache therefore stays
prefix-closed, block hits equal prefix hits, and only the *number* of cached blocks per next use
matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from policies.simulation.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NEVER = -1


def next_uses(trace: Trace) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """For each request, return the requests that use its blocks next: their distinct indices, and
    how many of its blocks each of them uses. Blocks that are never used again are left out."""
    import numpy as np  # this import would take a third of the command's start-up time

    following: dict[int, int] = {}
    found = []
    for index in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[index].blocks()
        ahead = np.fromiter((following.get(b, NEVER) for b in blocks), np.int64, len(blocks))
        found.append(np.unique(ahead[ahead != NEVER], return_counts=True))
        following.update(dict.fromkeys(blocks, index))
    found.reverse()
    return found


def infinite_hits(trace: Trace) -> Iterator[int]:
    """Per request: the number of leading blocks that hit in an infinite cache."""
    seen: set[int] = set()
    for request in trace.requests:
        blocks = request.blocks()
        hits = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        yield hits


def optimum_hits(
    trace: Trace,
    capacity: int,
    uses: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] | None = None,
) -> Iterator[int]:
    """Per request: the number of leading blocks that hit in the optimal cache of ``capacity``
    blocks.

    ``uses`` is ``next_uses(trace)``, computed once for several capacities.
    """
    cached: dict[int, int] = {}
    latest: list[int] = []
    total = 0
    for index, (ahead, counts) in enumerate(uses if uses is not None else next_uses(trace)):
        hits = cached.pop(index, 0)
        total -= hits
        yield hits
        for when, count in zip(ahead.tolist(), counts.tolist(), strict=True):
            if when in cached:
                cached[when] += count
            else:
                cached[when] = count
                heappush(latest, -when)
            total += count
        while total > capacity:
            worst = -latest[0]
            gone = min(cached.get(worst, 0), total - capacity)
            total -= gone
            if gone == cached.get(worst, 0):
                cached.pop(worst, None)
                heappop(latest)
            else:
                cached[worst] -= gone
