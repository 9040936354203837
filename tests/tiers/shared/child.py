"""One of several processes that share a tier. It prints which records it may rely on.

    @<n>   the tier is open, or half of the records have been tried; this process is number n, and
           waits for a byte on its standard input
    +<n>   key n is stored: it must be there, intact, until it is evicted
    W<n>   key n was read with other bytes than its own
    .0     it has stored all its records, and waits for its standard input to close

Not a test itself; run as ``child.py <kind> <folder> <capacity> <size> <number> <count> <fault>``.
``kind`` is ``lmdb`` or ``file``; with the prefix ``half-`` the disk hangs in the middle of a write
after ``count`` records. ``fault`` names a fault of ``processes`` to plant, or none.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tests.tiers.lmdb.shared.inside import index_of
from tests.tiers.shared.processes import make_tier, plant
from tiers.base import Buffer, ReadOutcome, Tier, WriteOutcome
from tiers.files import record_files
from tiers.io.direct_io import DiskIo
from tiers.lmdb.shared import tier as shared_lmdb_tier
from tiers.lmdb.shared import transaction as shared_changes
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import aligned, key_of, payload_of, put

BATCH = 6
RANGE = 10**6


def say(sign: str, numbers: Sequence[int]) -> None:
    sys.stdout.write("".join(f"{sign}{number}\n" for number in numbers))
    sys.stdout.flush()


class HangingIo(DiskIo):
    """Writes one page of a record and then never returns once it ``hangs``; meanwhile another
    thread is in the middle of a lookup in the index, if there is one."""

    hangs = False
    look: Callable[[], object] = staticmethod(lambda: None)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        if self.hangs:
            super().pwritev(fd, [views[0][:4096]], offset)
            self.looking = self.look()
            say(".", [0])
            threading.Event().wait()
        return super().pwritev(fd, views, offset)

    def write_all(self, fd: int, data: Buffer) -> None:
        """The same for a function of the file tier."""
        if self.hangs:
            os.write(fd, data[:4096].data)
            say(".", [0])
            threading.Event().wait()
        write_all(fd, data)


write_all = record_files._write_all


async def look(tier: Tier, rng: random.Random, step: int, size: int) -> None:
    """Read records that this process or another one may have stored by now."""
    numbers = [rng.randrange(4) * RANGE + rng.randrange(step + 1) for _ in range(4)]
    into = [aligned(size) for _ in numbers]
    outcomes = await tier.read([key_of(number) for number in numbers], into)
    for number, outcome, data in zip(numbers, outcomes, into, strict=True):
        if outcome is ReadOutcome.OK and not np.array_equal(data, payload_of(key_of(number), size)):
            say("W", [number])


async def main(kind: str, folder: str, *arguments: str) -> None:
    capacity_bytes, size, number, count = map(int, arguments[:4])
    shared_changes.READER_CHECK_EVERY = (
        4  # so that live processes look for killed ones before they end
    )
    plant(arguments[4])
    shared_lmdb_tier.READ_USE_S = 1e6  # so that the records written first are evicted first
    rng = random.Random(number)
    io = HangingIo()
    record_files._write_all = io.write_all
    tier = make_tier(kind, folder, capacity_bytes, io)
    await tier.open()
    if isinstance(tier, SharedLmdbTier):
        io.look = index_of(tier).env.begin
    say("@", [number])
    await read_byte()
    halfway = -1 if kind.startswith("half") else count // 2 // BATCH * BATCH
    for step in range(0, count, BATCH):
        if step == halfway:
            say("@", [number])
            await read_byte()
        numbers = [number * RANGE + step + n for n in range(BATCH)]
        outcomes = await put(tier, [key_of(n) for n in numbers], size)
        stored = [n for n, o in zip(numbers, outcomes, strict=True) if o is WriteOutcome.OK]
        say("+", stored)
        await look(tier, rng, step, size)
    io.hangs = kind.startswith("half")
    if io.hangs:
        await put(tier, [key_of(number * RANGE + count + n) for n in range(BATCH)], size)
    say(".", [0])
    await read_byte()
    await tier.aclose()


async def read_byte() -> None:
    """Wait for a byte, or for the end of input, on standard input."""
    await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
