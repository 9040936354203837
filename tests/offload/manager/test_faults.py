"""Faults of a real disk tier below the in-process API: bytes are right, waits are bounded, and a
breaker opens after at most the configured failures, costs nothing while open and closes again.

Time is virtual except for real work of the disk's threads (``tests.sim.virtual_time``).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload.worker.rank_memory
from offload.errors import TierUnavailableError
from offload.manager import OffloadManager
from offload.planner.circuit_breaker import BreakerState
from offload.planner.tier_health import TierHealth
from tests.offload.small_model import compute, keys, kv_caches, open_manager, wrong_blocks
from tests.sim.real_disk import OnThreads
from tests.sim.virtual_time import run_virtually
from tests.threads import no_thread_is_left
from tiers.adapters.reopening import ReopeningTier
from tiers.adapters.wrapper import TierWrapper
from tiers.base import Buffer, Key, ReadOutcome, Tier
from tiers.lmdb.tier import LmdbTier
from tiers.testing.faults import CountingTier, FailingTier, FullTier, HoldingTier, SlowTier
from tiers.testing.simulated_copy import SimulatedCopyEngine

FAILURES = 3
TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 10.0
CHUNKS = 24
"""Four times the CPU tier of 8 slots, of which 2 are for staging."""


@pytest.fixture(autouse=True)
def _copies_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(registration: Any, slab: Any, _device: torch.device) -> SimulatedCopyEngine:
        blocks = registration.num_blocks
        return SimulatedCopyEngine(registration.groups, slab, num_blocks=blocks, seed=1)

    monkeypatch.setattr(offload.worker.rank_memory, "make_engine", make)


class Trouble:
    """True if the disk is failing now; the ``when`` of the wrappers."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self, _call: int) -> bool:
        return self.now


class ManagerOverFaults:
    """A manager over CountingTier(fault(LmdbTier)), with content in all four corners."""

    def __init__(self, folder: Path, fault: Callable[[Tier, Trouble], Any]) -> None:
        disk = LmdbTier(folder / "tier", 64 << 20, reserve_bytes=0)
        self.trouble = Trouble()
        self.below = CountingTier(OnThreads(disk))
        self.fault = fault(self.below, self.trouble)
        self.tier = CountingTier(self.fault)
        self.caches = kv_caches()
        self.manager: OffloadManager

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ManagerOverFaults]:
        self.manager = await open_manager(
            self.caches,
            [self.tier],
            slots=8,
            load_timeout_s=LOAD_TIMEOUT_S,
            tier_timeout_s=TIMEOUT_S,
            breaker_failures=FAILURES,
        )
        try:
            yield self
        finally:
            await self.manager.aclose(0.5)

    @property
    def health(self) -> TierHealth:
        return self.manager.planner.health[0]

    async def store(self, count: int, first: int = 0, wait: bool = True) -> None:
        """Offload chunks a few at a time."""
        for start in range(first, first + count, 4):
            names = keys(min(4, first + count - start), start)
            compute(self.caches, names, range(len(names)))
            await self.manager.offload(names, range(len(names)))
            if wait:
                await self.manager.flush()

    async def restore(self, count: int, first: int = 0) -> int:
        """Restore a prefix; the chunks reported as restored must be right, and the call must return
        soon."""
        for cache in self.caches.values():
            cache[30:] = 0xEE
        names, blocks = keys(count, first), range(30, 30 + count)
        loop = asyncio.get_running_loop()
        began = loop.time()
        got = await self.manager.restore(names, blocks)
        assert loop.time() - began <= LOAD_TIMEOUT_S + 0.1
        assert wrong_blocks(self.caches, names[:got], blocks[:got]) == []
        self.manager.planner.check()
        return got


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtually(scenario)


def failing(tier: Tier, trouble: Trouble) -> FailingTier:
    return FailingTier(tier, trouble)


def slow(tier: Tier, trouble: Trouble) -> SlowTier:
    return SlowTier(tier, 6.0, when=trouble)


class SlowWritesTier(SlowTier):
    """Reads take no time here."""

    async def read(self, keys: Any, into: Any) -> list[ReadOutcome]:
        return await self.inner.read(keys, into)


def slow_writes(tier: Tier, trouble: Trouble) -> SlowWritesTier:
    return SlowWritesTier(tier, 6.0, when=trouble)


class ReleasedTier(HoldingTier):
    """A disk that hangs during a fault, and continues afterwards."""

    def __init__(self, inner: Tier, trouble: Trouble) -> None:
        super().__init__(inner, trouble)

    def over(self) -> None:
        self._released.set()
        self._released = asyncio.Event()


def hanging(tier: Tier, trouble: Trouble) -> ReleasedTier:
    return ReleasedTier(tier, trouble)


class BusyTier(TierWrapper):
    """A disk that is too busy for any read during a fault."""

    def __init__(self, inner: Tier, trouble: Trouble) -> None:
        super().__init__(inner)
        self.trouble = trouble
        self.met = 0

    async def read(self, keys: Any, into: Any) -> list[ReadOutcome]:
        if not self.trouble.now:
            return await self.inner.read(keys, into)
        self.met += 1
        return [ReadOutcome.BUSY] * len(keys)


KINDS = [failing, slow, hanging, BusyTier]


def fair_again(world: ManagerOverFaults) -> None:
    world.trouble.now = False
    if isinstance(world.fault, ReleasedTier):
        world.fault.over()


async def store_until_writes_are_closed(world: ManagerOverFaults) -> None:
    """Offer new blocks until a probe has closed the breaker of writes."""
    first = 200
    while not world.health.writes.closed:
        await world.store(2, first, wait=False)
        await asyncio.sleep(6.0)
        first += 2
        assert first < 260


@pytest.mark.parametrize("fault", KINDS)
def test_reads_of_a_failing_disk(tmp_path: Path, fault: Callable[[Tier, Trouble], Any]) -> None:
    async def scenario() -> None:
        async with ManagerOverFaults(tmp_path, fault).opened() as world:
            await world.store(CHUNKS)
            assert await world.restore(CHUNKS) == CHUNKS
            world.trouble.now = True
            tried = 0
            while world.health.reads.closed:
                assert await world.restore(CHUNKS) < CHUNKS
                await asyncio.sleep(0.1)
                tried += 1
                assert tried <= FAILURES
            asked = world.tier.calls["read"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(20):
                held = await world.restore(CHUNKS)
                assert held < CHUNKS
            assert world.tier.calls["read"] == asked, (
                "the tier must not be used while its breaker is open"
            )
            assert loop.time() - began < 0.1, "an open breaker must cost no time"
            assert world.fault.met > 0
            fair_again(world)
            await until(lambda: world.health.reads.closed, world)
            assert await world.restore(CHUNKS) > held

    run(scenario())


@pytest.mark.parametrize("fault", [failing, slow_writes, hanging, FullTier])
def test_writes_to_a_failing_disk(tmp_path: Path, fault: Callable[[Tier, Trouble], Any]) -> None:
    async def scenario() -> None:
        async with ManagerOverFaults(tmp_path, fault).opened() as world:
            world.trouble.now = True
            first = 0
            while world.health.writes.state is not BreakerState.OPEN:
                await world.store(4, first, wait=False)
                # chunks that wait to be written are pinned until the breaker opens
                await world.restore(4, first)
                for _ in range(60):  # six seconds: longer than an operation may take
                    if world.health.writes.closed:
                        await asyncio.sleep(0.1)
                first += 4
                assert first < 40
            asked = world.tier.calls["write"]
            assert asked <= FAILURES + 1, "the last operation was already in progress"
            for first in range(100, 140, 4):
                await world.store(4, first, wait=False)
                assert await world.restore(4, first) == 4, "the CPU tier must continue"
            assert world.tier.calls["write"] == asked, (
                "nothing must be written while the breaker is open"
            )
            assert world.fault.met > 0
            fair_again(world)
            await store_until_writes_are_closed(world)
            await world.store(CHUNKS, 300)
            assert await world.restore(CHUNKS, 300) == CHUNKS

    run(scenario())


async def until(reached: Callable[[], bool], world: ManagerOverFaults) -> None:
    """Requests arrive occasionally; a breaker waits at most a minute between two attempts."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 200.0
    while not reached():
        assert loop.time() < end, (world.health.reads.state, world.health.probe)
        await world.restore(CHUNKS)
        await asyncio.sleep(1.0)


def test_a_disk_that_hangs_permanently_stays_unused_and_closing_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with ManagerOverFaults(tmp_path, hanging).opened() as world:
            await world.store(CHUNKS)
            world.trouble.now = True
            waited = 0
            for _ in range(300):
                began = loop.time()
                await world.restore(CHUNKS)
                waited += loop.time() - began > 1.0
                await asyncio.sleep(3.0)
            assert waited <= 2, "at most two requests may wait for it in a quarter of an hour"
            await world.store(2, CHUNKS, wait=False)
            began = loop.time()
            with pytest.raises(TimeoutError):
                await world.manager.flush(7.0)
            with pytest.raises(TierUnavailableError, match="durably"):
                await world.manager.reset(7.0)
            assert loop.time() - began < 14.5
            assert world.manager.lookup(keys(CHUNKS)) == 0
            began = loop.time()
        assert loop.time() - began < 3.0

    run(scenario())


@pytest.mark.parametrize("comes_back", ["as it was", "empty"])
def test_an_unplugged_disk_is_used_again_when_it_is_back(tmp_path: Path, comes_back: str) -> None:
    """The folder disappears under the open tier. The CPU tier continues to work; the disk becomes
    unavailable, and is opened again when the folder is back."""
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"

    def make(_epoch: int = 0) -> Tier:
        if not mount.exists():
            raise FileNotFoundError(mount)
        return LmdbTier(mount / "tier", 64 << 20, reserve_bytes=0)

    async def scenario() -> None:
        mount.mkdir()
        disk = OnThreads(ReopeningTier(make(), make))
        async with ManagerOverFaults(mount, lambda *_: disk).opened() as world:
            planner = world.manager.planner
            await world.store(CHUNKS)
            mount.rename(elsewhere)
            first = 100
            while world.health.writes.closed:
                await world.store(2, first, wait=False)
                assert await world.restore(2, first) == 2
                await asyncio.sleep(1.0)
                first += 2
                assert first < 140
            if comes_back == "empty":
                shutil.rmtree(elsewhere)
                mount.mkdir()
            else:
                elsewhere.rename(mount)
            await store_until_writes_are_closed(world)
            await until(lambda: world.health.reads.closed, world)
            # Forgotten at once, not through one failed load after the other.
            held = CHUNKS if comes_back == "as it was" else 0
            assert sum(key + bytes(4) in planner.lower[0] for key in keys(CHUNKS)) == held
            assert await world.restore(CHUNKS) == held
            await world.store(CHUNKS, 300)
            await world.manager.flush()
            assert await world.restore(CHUNKS, 300) == CHUNKS

    run(scenario())


def test_a_prefix_four_times_the_cpu_tier_is_read_from_the_disk_exactly_once(
    tmp_path: Path,
) -> None:
    """After a restart nothing is in the CPU tier: every byte comes from the disk, each once."""

    class Bytes(TierWrapper):
        """Counts the bytes that are read, by key."""

        def __init__(self, inner: Tier) -> None:
            super().__init__(inner)
            self.seen: dict[Key, int] = {}

        async def read(self, names: Any, into: list[Buffer]) -> list[ReadOutcome]:
            for name, data in zip(names, into, strict=True):
                self.seen[name] = self.seen.get(name, 0) + data.nbytes
            return await super().read(names, into)

    async def scenario() -> None:
        async with ManagerOverFaults(tmp_path, lambda tier, _: Bytes(tier)).opened() as world:
            await world.store(CHUNKS)
        again = ManagerOverFaults(tmp_path, lambda tier, _: Bytes(tier))
        async with again.opened():
            assert len(again.manager.planner.cpu) == 0
            assert 4 * again.manager.planner.cpu.space.capacity == CHUNKS
            assert await again.restore(CHUNKS) == CHUNKS
            names = {key + bytes(4) for key in keys(CHUNKS)}
            assert set(again.fault.seen) == names
            assert set(again.fault.seen.values()) == {8192}, "each byte must be read once"

    run(scenario())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield
