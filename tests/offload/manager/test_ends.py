"""Calls of the in-process API that are cancelled, or during which the manager is closed: none ends
while a copy may still touch its blocks, and none waits forever.

Time is virtual, and copies advance only when a test lets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ManagerClosedError
from offload.manager import OffloadManager
from tests.offload.small_model import (
    compute,
    keys,
    kv_caches,
    open_manager,
    simulated_engines,
)
from tests.patience import turns
from tests.sim.real_disk import OnThreads
from tests.sim.virtual_time import run_virtually
from tests.threads import no_thread_is_left
from tiers.adapters.wrapper import TierWrapper
from tiers.lmdb.tier import LmdbTier
from tiers.testing.faults import HoldingTier
from tiers.testing.memory_tier import MemoryTier
from tiers.testing.simulated_copy import SimulatedCopyEngine

SOON_S = 1.0
"""Virtual seconds: no operation takes any time except those that a test lets wait."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.fixture(autouse=True)
def _copies_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_engines(monkeypatch, automatic=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], SimulatedCopyEngine]:
    """The copy engine of the manager that was opened last; it copies on command."""
    made = simulated_engines(monkeypatch, automatic=False)
    return lambda: made[-1]


async def copies(engine: SimulatedCopyEngine) -> None:
    """Let all submitted copies run, and let the manager process their end."""
    engine.run_all()
    await turns()


async def stored(manager: OffloadManager, engine: SimulatedCopyEngine, count: int = 1) -> None:
    storing = asyncio.ensure_future(manager.offload(keys(count), range(count)))
    await turns()
    await copies(engine)
    assert await storing == count


async def below(manager: OffloadManager, engine: SimulatedCopyEngine, count: int) -> list[bytes]:
    """Keys that only the lower tier holds, out of this many that were stored."""
    for start in range(0, count, 4):
        storing = asyncio.ensure_future(manager.offload(keys(4, start), range(start, start + 4)))
        await turns()
        await copies(engine)
        await storing
        await manager.flush()
    return [key for key in keys(count) if key + bytes(4) not in manager.planner.cpu]


def cancel_twice(call: asyncio.Task[Any]) -> None:
    """Cancels as a timeout inside a task group does when it ends."""
    call.cancel()
    call.get_loop().call_soon(call.cancel)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(scenario())


# -- cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["offload", "restore"])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_repeatedly_cancelled_call_ends_after_its_copy(
    engine: Callable[[], SimulatedCopyEngine], which: str, times: int
) -> None:
    async def scenario() -> None:
        caches = kv_caches()
        compute(caches, keys(1), [0])
        async with await open_manager(caches) as manager:
            if which == "restore":
                await stored(manager, engine())
            method = getattr(manager, which)
            call = asyncio.ensure_future(method(keys(1), [0 if which == "offload" else 7]))
            await turns()
            for _ in range(times):
                call.cancel()
                await turns(3)
                assert not call.done(), "a copy still uses its block"
            await copies(engine())
            with pytest.raises(asyncio.CancelledError):
                await call
            assert engine().idle
            if which == "offload":
                assert manager.lookup(keys(1)) == 1

    run(scenario)


@pytest.mark.parametrize("which", ["offload", "restore"])
def test_a_call_ends_after_its_copy_when_the_loop_ends(
    engine: Callable[[], SimulatedCopyEngine], which: str
) -> None:
    """``asyncio.run`` cancels all tasks, including ours, perhaps before they have begun."""
    copied_at: list[bool] = []
    kept: list[Any] = []

    async def call(manager: OffloadManager) -> None:
        try:
            await getattr(manager, which)(keys(1), [0])
        finally:
            copied_at.append(engine().idle)

    async def scenario(wait: int) -> None:
        caches = kv_caches()
        compute(caches, keys(1), [0])
        manager = await open_manager(caches)
        if which == "restore":
            await stored(manager, engine())
        asyncio.get_running_loop().call_later(SOON_S, engine().run_all)
        calling = asyncio.ensure_future(call(manager))
        await turns(wait)
        kept[:] = calling, manager  # otherwise it would be collected

    for wait in range(1, 8):
        run_virtually(scenario(wait))
        manager = kept[1]
        engine().close()
        manager._slab.close()
    assert copied_at == [True] * 7


def test_a_cancelled_restore_does_not_wait_for_a_read_that_hangs(
    engine: Callable[[], SimulatedCopyEngine],
) -> None:
    async def scenario() -> None:
        tier = HoldingTier(MemoryTier(1 << 22), methods={"read"})
        caches = kv_caches()
        loop = asyncio.get_running_loop()
        async with await open_manager(caches, [tier], slots=8) as manager:
            missing = await below(manager, engine(), 16)
            call = asyncio.ensure_future(manager.restore(missing[:2], [40, 41]))
            await tier.waiting()
            began = loop.time()
            cancel_twice(call)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert loop.time() - began < SOON_S
            caches["layers.0"][40:42] = 0xEE
            tier.release()
            await manager.flush()
            await copies(engine())
            assert (caches["layers.0"][40:42] == 0xEE).all(), "the blocks already have a new owner"
            manager.planner.check()

    run(scenario)


def test_an_offload_does_not_wait_for_another_calls_read(
    engine: Callable[[], SimulatedCopyEngine],
) -> None:
    """A tier that hangs holds the chunk, so ``offload`` need not store it."""

    async def scenario() -> None:
        tier = HoldingTier(MemoryTier(1 << 22), methods={"read"})
        loop = asyncio.get_running_loop()
        async with await open_manager(kv_caches(), [tier], slots=8) as manager:
            missing = await below(manager, engine(), 16)
            reading = asyncio.ensure_future(manager.restore(missing[:1], [40]))
            await tier.waiting()
            began = loop.time()
            assert await manager.offload(missing[:1], [41]) == 1
            assert loop.time() - began < SOON_S
            tier.release()
            await turns()
            await copies(engine())
            assert await reading == 1

    run(scenario)


def test_an_offload_during_a_reset_ends_after_its_copy(
    engine: Callable[[], SimulatedCopyEngine],
) -> None:
    async def scenario() -> None:
        caches = kv_caches()
        tier = HoldingTier(MemoryTier(1 << 22), methods={"write"})
        async with await open_manager(caches, [tier]) as manager:
            await stored(manager, engine())
            await tier.waiting()
            compute(caches, keys(1, 1), [1])
            call = asyncio.ensure_future(manager.offload(keys(1, 1), [1]))
            await turns()
            resetting = asyncio.ensure_future(manager.reset())
            await turns()
            tier.release()  # operations that end now have nothing to do with this call
            await resetting
            await turns()
            assert not call.done(), "the copy still reads block 1"
            await copies(engine())
            assert await call == 0

    run(scenario)


# -- closing ---------------------------------------------------------------------------------


def test_use_of_a_closed_manager_is_one_clear_error_at_once() -> None:
    async def scenario() -> None:
        manager = await open_manager(kv_caches(), [MemoryTier(1 << 22)])
        await manager.aclose()
        await manager.aclose()
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: manager.offload(keys(1), [0]),
            lambda: manager.restore(keys(1), [0]),
            manager.flush,
            manager.reset,
        ]
        for use in uses:
            with pytest.raises(ManagerClosedError, match="closed"):
                await use()
        with pytest.raises(ManagerClosedError, match="closed"):
            manager.lookup(keys(1))
        assert asyncio.get_running_loop().time() < SOON_S

    run(scenario)


def test_operations_under_way_end_with_the_manager(
    engine: Callable[[], SimulatedCopyEngine],
) -> None:
    """A read hangs, a copy has not begun, and a flush waits for both."""

    async def scenario() -> None:
        tier = HoldingTier(MemoryTier(1 << 22), methods={"read", "reset"})
        loop = asyncio.get_running_loop()
        manager = await open_manager(kv_caches(), [tier], slots=8)
        missing = await below(manager, engine(), 16)
        calls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(manager.restore(missing[:2], [40, 41])),
            asyncio.ensure_future(manager.offload(keys(1, 90), [3])),
            asyncio.ensure_future(manager.offload(keys(1, 90), [4])),
            asyncio.ensure_future(manager.flush(1e6)),
            asyncio.ensure_future(manager.reset(1e6)),
        ]
        await turns()
        closing = asyncio.ensure_future(manager.aclose(2.0))
        await turns()
        with pytest.raises(ManagerClosedError):
            await manager.offload(keys(1, 91), [5])
        await closing
        began = loop.time()
        await asyncio.wait(calls, timeout=SOON_S)
        assert loop.time() == began, "the operations must have ended"
        for call in calls:
            assert isinstance(call.exception(), ManagerClosedError), call
        assert engine().idle
        tier.release()

    run(scenario)


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_cancelled_close_releases_everything(
    tmp_path: Path, engine: Callable[[], SimulatedCopyEngine], after: int, times: int
) -> None:
    """Threads (counted by the fixture), memory and the folder are released."""

    async def scenario() -> None:
        disk = OnThreads(LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0))
        tier = HoldingTier(disk, methods={"write"})
        manager = await open_manager(kv_caches(), [tier], slots=8)
        await stored(manager, engine(), 2)
        closing = asyncio.ensure_future(manager.aclose(1e6))
        await turns(after)
        for _ in range(times):
            closing.cancel()
            await turns(2)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert asyncio.get_running_loop().time() < 1e3, "the flush must have ended"
        with pytest.raises(ManagerClosedError):
            await manager.flush()
        again = OnThreads(LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0))
        await again.open()  # the folder is free
        await again.aclose()
        tier.release()

    run(scenario)


def test_a_close_at_the_end_of_the_loop_releases_everything(
    tmp_path: Path, engine: Callable[[], SimulatedCopyEngine]
) -> None:
    kept: list[Any] = []

    async def scenario(wait: int) -> None:
        disk = OnThreads(LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0))
        tier = HoldingTier(disk, methods={"write"})
        manager = await open_manager(kv_caches(), [tier], slots=8)
        await stored(manager, engine(), 2)
        kept[:] = asyncio.ensure_future(manager.aclose(1e6)), manager
        await turns(wait)

    for wait in range(1, 6):
        run_virtually(scenario(wait))
        assert kept[1]._released.done()


@pytest.mark.parametrize("after", [None, 1, 2, 4, 8])
def test_a_cancelled_open_leaves_nothing_behind(tmp_path: Path, after: int | None) -> None:
    class Slow(TierWrapper):
        async def aclose(self) -> None:
            await asyncio.sleep(0.1)
            await self.inner.aclose()

    async def scenario() -> None:
        one = Slow(OnThreads(LmdbTier(tmp_path / "one", 8 << 20, reserve_bytes=0)))
        other = HoldingTier(MemoryTier(1 << 22), methods={"open"})
        opening = asyncio.ensure_future(open_manager(kv_caches(), [one, other]))
        await (other.waiting() if after is None else turns(after))
        for _ in range(3):
            opening.cancel()
            await turns(1)
        with pytest.raises(asyncio.CancelledError):
            await opening
        again = OnThreads(LmdbTier(tmp_path / "one", 8 << 20, reserve_bytes=0))
        await again.open()
        await again.aclose()

    run(scenario)
