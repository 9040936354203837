"""The in-process API on both copy engines: bytes, limits, damage, hangs and resets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import offload.worker.rank_memory
import tiers.copy.cuda_engine
from offload.config.schema import TierConfig
from offload.errors import ConfigError, TierUnavailableError
from offload.layout.keys import group_suffix
from offload.manager import OffloadManager
from policies.registry import make_policy
from tests.offload.small_model import (
    BLOCKS,
    compute,
    keys,
    kv_caches,
    kv_config,
    open_manager,
    wrong_blocks,
)
from tests.patience import PATIENCE_S
from tests.threads import no_thread_is_left
from tiers.adapters.wrapper import TierWrapper
from tiers.base import Tier, TierClosedError, TierIoError, WriteOutcome
from tiers.testing.faults import (
    CountingTier,
    Damage,
    DamagingTier,
    FailingTier,
    FullTier,
    HoldingTier,
    nth,
)
from tiers.testing.memory_tier import MemoryTier
from tiers.testing.simulated_copy import SimulatedCopyEngine


@pytest.fixture(params=["host", "simulated-1", "simulated-2", "simulated-3"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on the real host engine and on simulated, late streams."""
    name: str = request.param
    if name.startswith("simulated"):
        seed = int(name[-1])

        def make(registration: Any, slab: Any, device: torch.device) -> SimulatedCopyEngine:
            blocks = registration.num_blocks
            return SimulatedCopyEngine(registration.groups, slab, num_blocks=blocks, seed=seed)

        monkeypatch.setattr(offload.worker.rank_memory, "make_engine", make)
    return name


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield


def memory() -> MemoryTier:
    return MemoryTier(1 << 22)


async def stored(manager: OffloadManager, caches: dict[str, torch.Tensor], count: int) -> None:
    """Offload ``count`` chunks, a few at a time, and wait until they have reached every tier."""
    for start in range(0, count, 4):
        names = keys(min(4, count - start), start)
        blocks = range(len(names))
        compute(caches, names, blocks)
        assert await manager.offload(names, blocks) == len(names)
        await manager.flush()


async def restored_right(
    manager: OffloadManager, caches: dict[str, torch.Tensor], count: int, expected: int
) -> None:
    blocks = range(20, 20 + count)
    for cache in caches.values():
        cache[20:] = 0xEE
    assert await manager.restore(keys(count), blocks) == expected
    assert wrong_blocks(caches, keys(expected), blocks[:expected]) == []


@contextmanager
def deadline_of_loads(manager: OffloadManager, seconds: float) -> Iterator[None]:
    """Limits for operations that hang here; operations that must succeed have the usual limits,
    also for a busy machine."""
    executor = manager._executor
    usual = executor.limits
    executor.limits = replace(usual, load_timeout_s=seconds)
    try:
        yield
    finally:
        executor.limits = usual


async def test_chunks_are_restored_from_the_cpu_tier(engine: str) -> None:
    caches = kv_caches()
    async with await open_manager(caches) as manager:
        await stored(manager, caches, 6)
        assert manager.lookup(keys(8)) == 6
        await restored_right(manager, caches, 8, expected=6)
        manager.planner.check()


async def test_groups_with_different_pages_are_kept_apart(engine: str) -> None:
    caches = kv_caches()
    async with await open_manager(caches) as manager:
        compute(caches, keys(3), [1, 2, 3], group=0)
        compute(caches, keys(3), [4, 5, 6], group=1)
        assert await manager.offload(keys(3), [1, 2, 3], group=0) == 3
        assert manager.lookup(keys(3), group=1) == 0
        assert await manager.offload(keys(3), [4, 5, 6], group=1) == 3
        assert await manager.restore(keys(3), [14, 15, 16], group=1) == 3
        assert wrong_blocks(caches, keys(3), [14, 15, 16], group=1) == []


async def test_chunks_evicted_from_the_cpu_tier_are_restored_from_below(engine: str) -> None:
    caches, tier = kv_caches(), CountingTier(memory())
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 20)
        assert manager.planner.stats.tier(-1).evicted_chunks > 0
        await restored_right(manager, caches, 20, expected=20)


async def test_a_prefix_four_times_the_cpu_tier_is_read_once(engine: str) -> None:
    caches, tier = kv_caches(), CountingTier(memory())
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 24)
        before = dict(tier.keys_seen)
        await restored_right(manager, caches, 24, expected=24)
        read = tier.keys_seen["read"] - before.get("read", 0)
        assert 24 - 6 <= read <= 24


async def test_two_restores_of_the_same_chunks_share_one_read(engine: str) -> None:
    caches, tier = kv_caches(), CountingTier(memory())
    async with await open_manager(caches, [tier], slots=12) as manager:
        await stored(manager, caches, 20)
        missing = [key for key in keys(20) if key + bytes(4) not in manager.planner.cpu]
        first = missing[:4]
        before = tier.keys_seen["read"]
        answers = await asyncio.gather(
            manager.restore(first, [30, 31, 32, 33]), manager.restore(first, [40, 41, 42, 43])
        )
        assert answers == [4, 4]
        assert wrong_blocks(caches, first, [30, 31, 32, 33]) == []
        assert wrong_blocks(caches, first, [40, 41, 42, 43]) == []
        assert tier.keys_seen["read"] - before == 4


@pytest.mark.parametrize("damage", Damage)
async def test_a_damaged_record_ends_the_prefix_and_is_forgotten(
    engine: str, damage: Damage
) -> None:
    caches, inner = kv_caches(), memory()
    tier = DamagingTier(inner, damage)
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 16)
        missing = next(n for n, k in enumerate(keys(16)) if k + bytes(4) not in manager.planner.cpu)
        await restored_right(manager, caches, 16, expected=missing)
        assert tier.met > 0
        assert manager.lookup(keys(16)) == missing
        await manager.flush()
        assert keys(16)[missing] + bytes(4) not in inner.records
        manager.planner.check()


async def test_without_detection_of_damage_these_tests_would_fail(engine: str) -> None:
    caches = kv_caches()
    tier = DamagingTier(memory(), Damage.FLIP, detected=False)
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 16)
        with pytest.raises(AssertionError):
            await restored_right(manager, caches, 16, expected=16)


async def test_a_hanging_read_fails_at_the_deadline_and_keeps_its_slots(engine: str) -> None:
    caches = kv_caches()
    tier = HoldingTier(memory(), methods={"read"})
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 16)
        missing = [key for key in keys(16) if key + bytes(4) not in manager.planner.cpu]
        with deadline_of_loads(manager, 0.2):
            while not tier.met:  # on a busy machine the call may end before the read has begun
                assert await manager.restore(missing[:4], range(20, 24)) == 0
        filling = manager.planner.cpu.filling_count
        assert filling > 0, "slots that a read may still write into stay reserved"
        tier.release()
        await manager.flush()
        assert manager.planner.cpu.filling_count == 0
        manager.planner.check()
        await restored_right(manager, caches, 16, expected=16)


@pytest.mark.parametrize("wrap", [FullTier, FailingTier])
async def test_a_tier_that_accepts_nothing_only_costs_hits(engine: str, wrap: Any) -> None:
    caches = kv_caches()
    tier = wrap(memory(), methods={"write"}) if wrap is FailingTier else wrap(memory())
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 16)
        assert tier.met > 0
        held = [key for key in keys(16) if manager.lookup([key])]
        assert len(held) == 6
        assert await manager.restore(held, range(20, 26)) == 6
        assert wrong_blocks(caches, held, range(20, 26)) == []
        manager.planner.check()


async def test_one_failed_read_is_a_miss_and_the_record_stays(engine: str) -> None:
    caches = kv_caches()
    tier = FailingTier(memory(), nth(1), methods={"read"})
    async with await open_manager(caches, [tier], slots=8) as manager:
        await stored(manager, caches, 16)
        await manager.restore(keys(16), range(20, 36))
        assert tier.met == 1
        await restored_right(manager, caches, 16, expected=16)


async def test_after_a_reset_nothing_is_found(engine: str) -> None:
    caches, inner = kv_caches(), memory()
    async with await open_manager(caches, [inner], slots=8) as manager:
        await stored(manager, caches, 12)
        compute(caches, keys(2, 50), [1, 2])
        late = asyncio.ensure_future(manager.offload(keys(2, 50), [1, 2]))
        await asyncio.sleep(0)
        await manager.reset()
        await late
        await manager.flush()
        assert manager.lookup(keys(12)) == 0
        assert manager.lookup(keys(2, 50)) == 0
        assert inner.epoch == 1
        assert await manager.restore(keys(12), range(20, 32)) == 0
        await stored(manager, caches, 4)
        await restored_right(manager, caches, 4, expected=4)


async def test_a_full_cpu_tier_returns_how_many_chunks_it_has_taken(engine: str) -> None:
    caches = kv_caches()
    tier = HoldingTier(memory(), methods={"write"})
    async with await open_manager(caches, [tier], slots=8) as manager:
        compute(caches, keys(12), range(12))
        taken = await manager.offload(keys(12), range(12))
        assert taken == 6, (
            "2 of 8 slots are for staging, and chunks that were not written yet are not evicted"
        )
        assert await manager.offload(keys(12), range(12)) == 6
        tier.release()
        await manager.flush()
        assert await manager.offload(keys(12), range(12)) == 12


async def test_closing_with_a_hung_tier_is_bounded() -> None:
    caches = kv_caches()
    tier = HoldingTier(memory(), methods={"write"})
    manager = await open_manager(caches, [tier], slots=8)
    compute(caches, keys(2), range(2))
    await manager.offload(keys(2), range(2))
    await tier.waiting()
    closing = asyncio.ensure_future(manager.aclose(timeout_s=0.1))
    await asyncio.wait({closing}, timeout=PATIENCE_S)
    assert closing.done(), "vLLM waits 5 s for workers to end, and closing waits for the tier"
    tier.release()


async def test_invalid_calls_are_refused_with_the_numbers() -> None:
    async with await open_manager(kv_caches()) as manager:
        with pytest.raises(ValueError, match="2 keys need 2 block ids"):
            await manager.offload(keys(2), [1])
        with pytest.raises(ValueError, match=rf"\[{BLOCKS}\] are not in 0..{BLOCKS - 1}"):
            await manager.restore(keys(1), [BLOCKS])
        with pytest.raises(ValueError, match="no group 7"):
            await manager.offload(keys(1), [1], group=7)


async def test_a_capacity_below_one_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\$.cpu.capacity"):
        await OffloadManager.open(kv_config(), kv_caches(), {"cpu": {"capacity": 4096}})


async def test_a_cancelled_offload_ends_only_when_its_blocks_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines: list[SimulatedCopyEngine] = []

    def make(registration: Any, slab: Any, device: torch.device) -> SimulatedCopyEngine:
        engines.append(SimulatedCopyEngine(registration.groups, slab, automatic=False))
        return engines[0]

    monkeypatch.setattr(offload.worker.rank_memory, "make_engine", make)
    caches = kv_caches()
    async with await open_manager(caches) as manager:
        compute(caches, keys(1), [1])
        call = asyncio.ensure_future(manager.offload(keys(1), [1]))
        second = asyncio.ensure_future(manager.offload(keys(1), [1]))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not call.done(), "the copy still reads block 1"
        assert not second.done(), "no tier holds the chunk yet"
        engines[0].run_all()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await second == 1
        compute(caches, keys(1, 9), [1])  # the block has a new owner
        restore = asyncio.ensure_future(manager.restore(keys(1), [5]))
        for _ in range(5):
            await asyncio.sleep(0)
        engines[0].run_all()
        assert await restore == 1
        assert wrong_blocks(caches, keys(1), [5]) == []


async def test_a_reset_that_is_not_durable_is_an_error() -> None:
    caches = kv_caches()
    tier = FailingTier(memory(), methods={"reset"})
    async with await open_manager(caches, [tier]) as manager:
        await stored(manager, caches, 4)
        with pytest.raises(TierUnavailableError, match="reset durably"):
            await manager.reset()
        assert manager.lookup(keys(4)) == 0


class LosesTouches(TierWrapper):
    """Holds the first use notification until ``may_fail`` is set, and then fails it."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.may_fail = asyncio.Event()

    async def before(self, method: str, keys: Sequence[bytes]) -> None:
        if method == "touch":
            await self.may_fail.wait()
            raise TierIoError("the note is lost")


async def test_a_reset_is_durable_even_if_another_operation_fails_meanwhile() -> None:
    caches, tier = kv_caches(), LosesTouches(memory())
    async with await open_manager(caches, [tier]) as manager:
        await stored(manager, caches, 4)
        await manager.flush()
        assert await manager.restore(keys(4), [4, 5, 6, 7]) == 4  # queues the use notification
        resetting = asyncio.ensure_future(manager.reset())
        await asyncio.sleep(0)
        tier.may_fail.set()
        await resetting
        assert manager.lookup(keys(4)) == 0


async def test_a_tier_that_does_not_open_leaves_nothing_behind(engine: str) -> None:
    """The fixture counts the threads of slab and engine."""
    good = memory()
    with pytest.raises(TierUnavailableError, match="tier 1"):
        await open_manager(kv_caches(), [good, FailingTier(memory(), methods={"open"})])
    with pytest.raises(TierClosedError):
        await good.read([], [])


async def test_records_that_fit_no_group_are_deleted_at_start() -> None:
    """If they stayed, each load of them would fail, and no index would count their space."""
    tier = memory()
    await tier.open()
    fitting, others = (
        keys(1)[0] + group_suffix(0),
        [
            keys(2)[1] + group_suffix(0),
            keys(1)[0] + group_suffix(3),
            b"e" * 4,
        ],
    )
    sizes = (8192, 4096, 8192, 8192)
    written = await tier.write([fitting, *others], [np.zeros(size, np.uint8) for size in sizes])
    assert set(written) == {WriteOutcome.OK}
    async with await open_manager(kv_caches(), [tier], slots=8) as manager:
        assert manager.lookup(keys(2)) == 1
        assert set(tier.records) == {fitting}


async def test_a_tier_object_has_the_default_options_of_a_tier() -> None:
    async with await open_manager(kv_caches(), [memory()], slots=8) as manager:
        (index,) = manager.planner.lower
        config = TierConfig("object", "", 0)
        assert index.space.capacity == int((1 << 22) * config.high_watermark)
        assert type(index.policy) is type(make_policy(config.policy.spec))


async def test_tiers_in_the_configuration_are_refused() -> None:
    lmdb = {"type": "lmdb", "path": "/nonexistent/kv", "capacity": "1GiB"}
    with pytest.raises(ConfigError, match="Pass tier objects"):
        await OffloadManager.open(kv_config(), kv_caches(), {"tiers": [lmdb]})


def test_the_gpu_is_that_of_the_caches_and_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> None:
        asked.append(options.get("device", arguments[0] if arguments else None))

    monkeypatch.setattr(tiers.copy.cuda_engine, "CudaCopyEngine", remember)
    monkeypatch.setattr(tiers.copy.cuda_engine, "gpu_node", remember)
    monkeypatch.setattr(offload.worker.rank_memory, "HostSlab", MagicMock())
    registration: Any = SimpleNamespace(groups=(), num_blocks=3)
    device = torch.device("cuda", 1)
    slab: Any = offload.worker.rank_memory.make_slab(4096, 2, device, "prefer")
    offload.worker.rank_memory.make_engine(registration, slab, device)
    assert asked == [1, 1]
