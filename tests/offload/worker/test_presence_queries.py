"""Queries to shared tiers on one rank: they get a reply whatever the tier does, and failures are
reported."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from offload.messages.plan import PresenceQuery
from offload.messages.report import Observed, PresenceReply
from offload.worker.presence_queries import IN_FLIGHT, QUERY_LATE_S, PresenceQueries
from tests.sim.virtual_time import run_virtually
from tiers.base import Tier
from tiers.testing import key_of, put
from tiers.testing.faults import FailingSharedTier, HoldingSharedTier
from tiers.testing.memory_tier import SharedMemory, SharedMemoryTier

KEYS = [key_of(n) for n in range(4)]
QUERY = PresenceQuery(1, 0, KEYS)


class Writer:
    """The part of a tier's writer that the queries use."""

    def __init__(self, is_behind: bool = False) -> None:
        self.is_behind = is_behind

    async def caught_up(self, timeout_s: float) -> bool:
        return not self.is_behind


async def held() -> SharedMemoryTier:
    tier = SharedMemoryTier(SharedMemory(1 << 20))
    await tier.open()
    await put(tier, KEYS[::2], 100)
    return tier


def queries_of(tiers: list[Tier], writers: list[Writer], seen: list[Observed]) -> PresenceQueries:
    return PresenceQueries(tiers, cast("Any", writers), lambda _tier, what: seen.append(what))


async def test_the_tiers_reply_is_the_answer() -> None:
    seen: list[Observed] = []
    queries = queries_of([await held()], [Writer()], seen)
    assert await queries.answer(QUERY) == PresenceReply(b"\1\0\1\0")
    assert seen == []


async def test_a_tier_of_a_past_epoch_is_not_queried() -> None:
    queries = queries_of([await held()], [Writer(is_behind=True)], [])
    assert await queries.answer(QUERY) == PresenceReply(None)


def test_failures_and_lateness_are_reported_and_answered() -> None:
    run_virtually(fail_and_be_late())


async def fail_and_be_late() -> None:
    seen: list[Observed] = []
    failing = FailingSharedTier(await held(), methods={"present"})
    slow = HoldingSharedTier(await held(), methods={"present"})
    tiers = [failing, slow]
    queries = queries_of(tiers, [Writer(), Writer()], seen)
    assert await queries.answer(QUERY) == PresenceReply(None)
    assert seen == [Observed(reads_failed=1)]
    asking = [
        asyncio.create_task(queries.answer(PresenceQuery(n, 1, KEYS))) for n in range(IN_FLIGHT + 2)
    ]
    await asyncio.sleep(1.5 * QUERY_LATE_S)
    assert seen == [Observed(reads_failed=1)] * (1 + IN_FLIGHT)
    assert slow.met == IN_FLIGHT, "the others wait for their turn"
    slow.release()
    assert set(await asyncio.gather(*asking)) == {PresenceReply(b"\1\0\1\0")}
