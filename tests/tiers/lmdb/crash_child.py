"""Writes to an LMDB tier until it is killed, and prints which records it may rely on.

    +<n>   key n is stored: it must be there after a restart, intact
    -<n>   key n is about to be deleted: it may or may not be there
    !<e>   everything is about to be forgotten
    =<e>   that is durable

Not a test itself; test_crash.py runs ``crash_child.py <folder> <capacity> <size> <first>``.
"""

from __future__ import annotations

import asyncio
import sys

from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, key_of, put

BATCH = 6


def say(sign: str, numbers: list[int]) -> None:
    sys.stdout.write("".join(f"{sign}{number}\n" for number in numbers))
    sys.stdout.flush()


async def main(folder: str, capacity_bytes: int, size: int, first: int) -> None:
    tier = LmdbTier(folder, capacity_bytes, reserve_bytes=0, grow_bytes=4 << 20)
    await tier.open()
    live = [int.from_bytes(stored.key[:32], "big") for stored in await all_keys(tier)]
    say("@", [len(live)])
    for start in range(first, first + 10**6, BATCH):
        numbers = list(range(start, start + BATCH))
        while len(live) > 40:
            victims, live = live[:BATCH], live[BATCH:]
            say("-", victims)
            await tier.delete([key_of(number) for number in victims])
        if start % (BATCH * 97) == 0:
            say("!", [0])
            await tier.reset(0)
            say("=", [0])
            live = []
        half = [key_of(number) for number in numbers[: BATCH // 2]]
        rest = [key_of(number) for number in numbers[BATCH // 2 :]]
        outcomes = await asyncio.gather(put(tier, half, size), put(tier, rest, size))
        flat = [outcome.value for part in outcomes for outcome in part]
        if flat != ["ok"] * BATCH:
            raise SystemExit(f"unexpected outcomes {flat}")
        say("+", numbers)
        live += numbers
        await tier.touch([key_of(number) for number in live[::3]])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
