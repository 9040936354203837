"""Uses an LMDB tier while system calls fail under it; not a test itself.

``strace_child.py <folder>`` opens, writes, reads, deletes, resets and closes, twice. It exits with
0 if every outcome was allowed and every byte served was right, whatever the system calls did.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from tiers.base import ReadOutcome, TierError
from tiers.lmdb.tier import LmdbTier
from tiers.testing import fetch, key_of, payload_of, put

SIZE = 20_000


async def use(tier: LmdbTier, first: int) -> None:
    for start in range(first, first + 440, 8):
        keys = [key_of(number) for number in range(start, start + 8)]
        await put(tier, keys, SIZE)
        for key in keys[::3]:
            outcome, data = await fetch(tier, key, SIZE)
            if outcome is ReadOutcome.OK and not np.array_equal(data, payload_of(key, SIZE)):
                raise SystemExit("a wrong byte was served")
        await tier.delete(keys[:4])
        await tier.touch(keys)


async def main(folder: str) -> None:
    for first in (0, 1000):
        tier = LmdbTier(folder, 8 << 20, reserve_bytes=0, grow_bytes=1 << 20)
        try:
            await tier.open()
            await use(tier, first)
            await tier.reset(0)
            await use(tier, first)
        except TierError as error:
            print(f"tier error: {error}")
        finally:
            await tier.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
