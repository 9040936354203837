"""The CUDA engine while its slab is not pinned: not yet, only in part, or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.libcuda import strict_cuda
from tests.patience import PATIENCE_S
from tests.tiers.copy.engine_on_libcuda import BLOCKS, SLOTS, SimulatedGpu
from tests.tiers.copy.known_caches import Cache, batch, separate_layers
from tiers.copy.base import TransferError
from tiers.copy.cuda_engine import CudaCopyEngine
from tiers.copy.cuda_paths import CopyPath
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab, SlabError


@pytest.fixture
def cache() -> Cache:
    return separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)


class Slow(CudaRegistrar):
    """Pins one piece per permit."""

    permits = threading.Semaphore(0)

    def register(self, address: int, nbytes: int) -> None:
        self.permits.acquire()
        super().register(address, nbytes)


@pytest.fixture
def slow(cache: Cache) -> Iterator[SimulatedGpu]:
    """A world in which the first piece (slot 0) is pinned, and the rest is not yet."""
    Slow.permits = threading.Semaphore(1)
    one = SimulatedGpu(cache, path=CopyPath.BATCH, registrar=Slow, wait_pinned=False)
    one.slab.wait_ready(1)
    yield one
    Slow.permits.release(SLOTS)
    one.close()


@pytest.mark.parametrize("seed", range(5))
async def test_copies_of_slots_that_are_not_pinned_yet_use_the_slow_path(
    slow: SimulatedGpu, seed: int
) -> None:
    """Every copy ends although the pinning is blocked."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(BLOCKS).reshape(SLOTS, 2).tolist()
    slots = rng.permutation(SLOTS).tolist()
    before = slow.cache.storage.copy()
    slow.cuda.launch(lambda: slow.cache.storage.__setitem__(slice(None), ~before))
    stored = slow.engine.submit_store([batch(slots, rows)], slow.engine.record_event())
    await asyncio.wait_for(stored.completed(), PATIENCE_S)
    for slot, row in zip(slots, rows, strict=True):
        np.testing.assert_array_equal(slow.slot(slot), slow.cache.chunk(row), f"seed {seed}")
    assert slow.cuda.calls("cuMemcpyBatchAsync") == 1  # slot 0: 4 copies
    assert slow.cuda.calls("cuMemcpyAsync") == 4 * (SLOTS - 1)
    slow.cache.storage[:] = 0
    await slow.engine.submit_load([batch(slots, rows)], slow.engine.record_event()).completed()
    np.testing.assert_array_equal(slow.cache.storage, ~before, f"seed {seed}")
    assert slow.slab.pinned_slots == 1
    Slow.permits.release(SLOTS)
    slow.slab.wait_ready()
    await slow.engine.submit_store([batch(slots, rows)]).completed()
    assert slow.cuda.calls("cuMemcpyAsync") == 2 * 4 * (SLOTS - 1), "all are pinned now"


async def test_a_copy_of_an_unpinned_slot_delays_no_other_copy(slow: SimulatedGpu) -> None:
    first = slow.engine.submit_load([batch([5], [[0, 1]])])
    second = slow.engine.submit_load([batch([0], [[2, 3]])])
    both = asyncio.gather(first.completed(), second.completed())
    await asyncio.wait_for(both, PATIENCE_S)
    assert slow.slab.pinned_slots == 1


async def test_closing_does_not_wait_for_pinning(slow: SimulatedGpu) -> None:
    ticket = slow.engine.submit_store([batch([5], [[0, 1]])])
    await asyncio.wait_for(asyncio.to_thread(slow.engine.close), PATIENCE_S)
    assert ticket.done()
    await ticket.completed()
    slow.slab.stop_preparing()
    assert slow.slab.pinned_slots == 1
    with pytest.raises(SlabError, match="closed while it was being prepared"):
        slow.slab.wait_ready()
    Slow.permits.release(SLOTS)
    slow.slab.close()
    assert Slow.permits.acquire(blocking=False), "later pieces than the one in progress were pinned"


async def test_pieces_pinned_before_a_failure_stay_fast(cache: Cache) -> None:
    """With the fallback, slots before the failed piece are copied in batches, the others one by
    one."""
    with strict_cuda() as cuda:
        cuda.on_device(cache.storage.ctypes.data, cache.storage.nbytes)
        cuda.make_current()
        cuda.fail("cuMemHostRegister_v2", 2, nth=3)
        slab = HostSlab(
            cache.regions.chunk_bytes,
            SLOTS,
            pin=True,
            pin_fallback=True,
            registrar=CudaRegistrar(0, cuda.driver),
            piece_bytes=1,
            background=False,
        )
        engine = CudaCopyEngine(
            [cache.regions],
            slab,
            device=0,
            path=CopyPath.BATCH,
            driver=cuda.driver,
            compute_stream=lambda: 0,
        )
        await engine.submit_store([batch([0, 1], [[0, 1], [2, 3]])]).completed()
        assert cuda.calls("cuMemcpyAsync") == 0
        await engine.submit_store([batch([1, 2], [[0, 1], [2, 3]])]).completed()
        assert cuda.calls("cuMemcpyAsync") == 4
        engine.close()
        slab.close()


async def test_memory_that_is_not_pinned_is_copied_one_by_one(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    world = SimulatedGpu(cache, pin=False, path=CopyPath.BATCH)
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    np.testing.assert_array_equal(world.slot(0), cache.chunk([0, 1]))
    assert world.cuda.calls("cuMemcpyBatchAsync") == 0
    assert "the slab is not pinned" in caplog.text
    world.close()


async def test_a_slab_whose_pinning_failed_fails_copies_with_the_reason(cache: Cache) -> None:
    with strict_cuda() as cuda:
        cuda.on_device(cache.storage.ctypes.data, cache.storage.nbytes)
        cuda.make_current()
        cuda.fail("cuMemHostRegister_v2", 2)
        registrar = CudaRegistrar(0, cuda.driver)
        slab = HostSlab(cache.regions.chunk_bytes, SLOTS, pin=True, registrar=registrar)
        engine = CudaCopyEngine(
            [cache.regions],
            slab,
            device=0,
            path=CopyPath.BATCH,
            driver=cuda.driver,
            compute_stream=lambda: 0,
        )
        with pytest.raises(SlabError):
            slab.wait_ready()
        with pytest.raises(TransferError, match=r"not ready: cannot pin .* out of memory \(2\)"):
            await engine.submit_store([batch([0], [[0, 1]])]).completed()
        engine.close()
        slab.close()


async def test_unregistering_memory_too_early_is_detected(cache: Cache) -> None:
    """The control for all tests here: the library detects a slab that is released before its copies
    have ended."""
    world = SimulatedGpu(cache, path=CopyPath.BATCH)
    world.cuda.hold()
    ticket = world.engine.submit_store([batch([0], [[0, 1]])])
    world.cuda.await_call("cuMemcpyBatchAsync")
    [(address, _)] = list(world.cuda.registered().items())[-1:]
    world.cuda.driver.unregister(address)
    world.cuda.release()
    await ticket.completed()
    assert set(world.cuda.notes()) == {"a batched copy of memory that was unregistered or freed"}
    with pytest.raises(AssertionError, match="unregistered or freed"):
        world.close()
