"""Reads that requests wait for get their turn before reads ahead."""

from __future__ import annotations

import asyncio

import pytest

from offload.worker.read_turns import ReadTurns


async def turned() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Reads:
    """Reads that continue until the test ends them; ``order`` is the order of their turns."""

    def __init__(self, count: int = 1) -> None:
        self.turns = ReadTurns(count)
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, slot: int, *, is_ahead: bool) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self.read(name, slot, is_ahead=is_ahead))
        await turned()

    async def read(self, name: str, slot: int, *, is_ahead: bool) -> None:
        async with self.turns.turn([slot], is_ahead=is_ahead):
            self.order.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await turned()


@pytest.mark.parametrize("count", [1, 4])
async def test_reads_that_requests_wait_for_go_first(count: int) -> None:
    reads = Reads(count)
    await reads.begin("first", 0, is_ahead=True)
    await reads.begin("ahead", 1, is_ahead=True)
    await reads.begin("awaited", 2, is_ahead=False)
    for name in ("first", "awaited", "ahead"):
        await reads.end(name)
    assert reads.order == ["first", "awaited", "ahead"]


async def test_a_read_ahead_does_not_begin_beside_a_read_that_a_request_waits_for() -> None:
    """The read ahead would take part of the device's speed from the other read."""
    reads = Reads(4)
    for number in range(2):
        await reads.begin(f"awaited{number}", number, is_ahead=False)
    for number in range(2, 4):
        await reads.begin(f"ahead{number}", number, is_ahead=True)
    await reads.end("awaited0")
    assert reads.order == ["awaited0", "awaited1"]
    await reads.end("awaited1")
    assert reads.order == ["awaited0", "awaited1", "ahead2"]
    await reads.begin("comes late", 4, is_ahead=False)
    assert reads.order[-1] == "comes late"
    for name in ("ahead2", "comes late", "ahead3"):
        await reads.end(name)
    assert reads.order[-1] == "ahead3"


async def test_within_a_plan_the_read_that_a_request_waits_for_begins_first() -> None:
    """Reads ahead come first in a plan, so that its loads can join them."""
    reads = Reads()
    for name, slot in (("ahead", 0), ("joined", 1), ("awaited", 2)):
        reads.ends[name] = asyncio.Event()
        is_ahead = name != "awaited"
        reads.tasks[name] = asyncio.ensure_future(reads.read(name, slot, is_ahead=is_ahead))
    await asyncio.sleep(0)
    reads.turns.hurry(1)
    for name in ("awaited", "joined", "ahead"):
        await turned()
        await reads.end(name)
    assert reads.order == ["awaited", "joined", "ahead"]


async def test_a_read_ahead_that_a_request_joins_goes_with_the_others() -> None:
    reads = Reads()
    await reads.begin("first", 0, is_ahead=False)
    await reads.begin("ahead", 1, is_ahead=True)
    await reads.begin("joined", 2, is_ahead=True)
    reads.turns.hurry(2)
    for name in ("first", "joined", "ahead"):
        await reads.end(name)
    assert reads.order == ["first", "joined", "ahead"]


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_cancelled_read_gives_its_turn_back(is_ahead: bool) -> None:
    reads = Reads(1)
    for slot, name in enumerate(("one", "waits", "two", "three")):
        await reads.begin(name, slot, is_ahead=is_ahead)
    reads.tasks["waits"].cancel()
    reads.tasks["one"].cancel()
    await turned()
    assert reads.order == ["one", "two"]
    await reads.end("two")
    assert reads.order == ["one", "two", "three"]
    await reads.end("three")
