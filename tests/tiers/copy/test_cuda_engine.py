"""The CUDA engine with the simulated libcuda in host memory, through real ctypes calls: bytes,
order, errors.

tests/gpu has the tests that only a GPU can run (agreement with the real driver, and speed).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tests.tiers.copy.engine_on_libcuda import BLOCKS, MODEL_STREAM, SLOTS, SimulatedGpu
from tests.tiers.copy.known_caches import Cache, batch, contiguous_blocks, separate_layers
from tiers.copy.base import TransferError
from tiers.copy.cuda_paths import CopyPath
from tiers.cuda_driver import BATCH_COPIES_MAX, Addresses, Driver, DriverError


@pytest.fixture
def cache() -> Cache:
    return separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)


@pytest.fixture
def world(cache: Cache) -> Iterator[SimulatedGpu]:
    one = SimulatedGpu(cache, path=CopyPath.BATCH)
    yield one
    one.close()


@pytest.mark.parametrize("make", [separate_layers, contiguous_blocks])
@pytest.mark.parametrize("path", list(CopyPath))
async def test_bytes_are_right_both_ways_on_every_path(make: object, path: CopyPath) -> None:
    cache = make([4096, 8192, 4096], BLOCKS, chunk_blocks=2)  # type: ignore[operator]  # one of two functions
    # numpy aligns to 16, as the kernel needs.
    assert cache.storage.ctypes.data % 16 == 0
    for seed in range(5):
        world = SimulatedGpu(cache, seed=seed, path=path)
        try:
            assert world.paths() == (path, path)
            rows = np.random.default_rng(seed).permutation(BLOCKS).reshape(SLOTS, 2).tolist()
            before = cache.storage.copy()
            job = [batch(list(range(SLOTS)), rows)]
            await world.engine.submit_store(job, world.engine.record_event()).completed()
            for slot, row in enumerate(rows):
                np.testing.assert_array_equal(world.slot(slot), cache.chunk(row))
            cache.storage[:] = 0
            await world.engine.submit_load(job, world.engine.record_event()).completed()
            np.testing.assert_array_equal(cache.storage, before, err_msg=f"seed {seed}")
        finally:
            world.close()


async def store_behind_a_forward_pass(world: SimulatedGpu, wait: bool) -> bool:
    """Returns True if a store sees the bytes of a kernel that runs late."""
    world.cache.storage[:] = 0
    world.cuda.hold(MODEL_STREAM)
    world.cuda.launch(lambda: world.cache.storage.fill(7))
    after = world.engine.record_event() if wait else None
    ticket = world.engine.submit_store([batch([1], [[3, 4]])], after)
    if wait:
        world.cuda.await_call("cuMemcpyBatchAsync")
        assert not ticket.done()
        world.cuda.release()
    await ticket.completed()
    return bool((world.slot(1) == 7).all())


async def test_a_store_waits_for_the_forward_pass(world: SimulatedGpu) -> None:
    assert await store_behind_a_forward_pass(world, wait=True)


async def test_without_the_event_a_store_would_read_old_bytes(world: SimulatedGpu) -> None:
    """The library can show the fault for which the test above looks."""
    assert not await store_behind_a_forward_pass(world, wait=False)


async def test_a_load_waits_for_the_readers_of_its_blocks(world: SimulatedGpu) -> None:
    world.cache.storage[:] = 3
    world.slot(1)[:] = 9
    seen: list[int] = []
    world.cuda.hold(MODEL_STREAM)
    world.cuda.launch(lambda: seen.extend(np.unique(world.cache.storage).tolist()))
    ticket = world.engine.submit_load([batch([1], [[3, 4]])], world.engine.record_event())
    world.cuda.await_call("cuMemcpyBatchAsync")
    assert not ticket.done()
    world.cuda.release()
    await ticket.completed()
    assert seen == [3]
    assert np.unique(world.cache.chunk([3, 4])).tolist() == [9]


@pytest.mark.parametrize("path", list(CopyPath))
async def test_order_holds_under_random_delays(cache: Cache, path: CopyPath) -> None:
    """Forward passes, stores of their output and loads of it, on three streams at once."""
    for seed in range(4):
        world = SimulatedGpu(cache, seed=seed, path=path, delay_us=500)
        try:
            for value in range(1, 12):
                slot = value % SLOTS
                rows = [[2 * slot, 2 * slot + 1]]
                world.cuda.launch(partial(cache.storage.fill, value))
                stored = world.engine.submit_store(
                    [batch([slot], rows)], world.engine.record_event()
                )
                await stored.completed()
                assert np.unique(world.slot(slot)).tolist() == [value], f"seed {seed}"
                world.slot(slot)[:] = 100 + value
                loaded = world.engine.submit_load(
                    [batch([slot], rows)], world.engine.record_event()
                )
                await loaded.completed()
                assert np.unique(cache.chunk(rows[0])).tolist() == [100 + value], f"seed {seed}"
        finally:
            world.close()


@pytest.mark.parametrize("blocks", [BATCH_COPIES_MAX // 4, BATCH_COPIES_MAX])
async def test_no_call_has_more_copies_than_drivers_can_handle(blocks: int) -> None:
    """A job of any length is submitted in calls of ``BATCH_COPIES_MAX``; the library refuses
    more."""
    cache = separate_layers([32, 16, 48], blocks, chunk_blocks=blocks // 4)
    world = SimulatedGpu(
        cache, path=CopyPath.BATCH, slots=4, batch_limit=BATCH_COPIES_MAX, delay_us=0
    )
    try:
        rows = np.random.default_rng(0).permutation(blocks).reshape(4, -1).tolist()
        before = cache.storage.copy()
        await world.engine.submit_store([batch([3, 1, 0, 2], rows)]).completed()
        cache.storage[:] = 0
        await world.engine.submit_load([batch([3, 1, 0, 2], rows)]).completed()
        np.testing.assert_array_equal(cache.storage, before)
        calls = -(-3 * blocks // BATCH_COPIES_MAX)
        assert world.cuda.calls("cuMemcpyBatchAsync") == 2 * calls
        assert world.cuda.count("largest_batch") == min(3 * blocks, BATCH_COPIES_MAX)
        world.cuda.fail("cuMemcpyBatchAsync", 1, nth=calls)
        with pytest.raises(
            TransferError, match=rf"failed at copy {BATCH_COPIES_MAX * (calls - 1)} "
        ):
            await world.engine.submit_store([batch([3, 1, 0, 2], rows)]).completed()
    finally:
        world.close()


async def test_a_ticket_is_done_only_when_the_bytes_have_arrived(world: SimulatedGpu) -> None:
    world.cuda.hold()
    before = world.slot(0).copy()
    first = world.engine.submit_store([batch([0], [[0, 1]])])
    second = world.engine.submit_load([batch([1], [[4, 5]])])
    wait = asyncio.ensure_future(first.completed())
    await asyncio.to_thread(world.cuda.await_call, "cuEventSynchronize", 2)
    assert not first.done()
    assert not second.done()
    assert (world.slot(0) == before).all()
    world.cuda.release()
    await wait
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))
    await second.completed()


async def test_lists_of_copies_are_kept_until_the_copies_have_run(
    world: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing guarantees that the driver has read its arrays when the call returns."""
    lists: list[weakref.ref[np.ndarray]] = []
    copy_batch = Driver.copy_batch

    def watched(self: Driver, to: Addresses, source: Addresses, sizes: Addresses, at: int) -> None:
        lists.extend(map(weakref.ref, (to, source, sizes)))
        copy_batch(self, to, source, sizes, at)

    monkeypatch.setattr(Driver, "copy_batch", watched)
    world.cuda.hold()
    first = world.engine.submit_store([batch([0], [[0, 1]])])
    second = world.engine.submit_store([batch([1], [[2, 3]])])
    # The submitting thread has finished the first job when it submits the second.
    await asyncio.to_thread(world.cuda.await_call, "cuMemcpyBatchAsync", 2)
    gc.collect()
    assert [array() is not None for array in lists[:3]] == [True] * 3
    world.cuda.release()
    await first.completed()
    await second.completed()


async def test_a_batch_that_fails_half_way_is_reported_when_all_its_copies_have_ended(
    world: SimulatedGpu,
) -> None:
    world.cuda.hold()
    world.cuda.fail("half of cuMemcpyBatchAsync", 1)
    slots = [world.slot(i) for i in range(3)]
    for slot in slots:
        slot[:] = 0xEE
    ticket = world.engine.submit_store([batch([0, 1, 2], [[0, 1], [2, 3], [4, 5]])])
    behind = world.engine.submit_store([])
    # If nothing waits for the first job, the next job still has something to wait for.
    await asyncio.to_thread(world.cuda.await_call, "cuEventSynchronize")
    assert not ticket.done()
    world.cuda.release()
    with pytest.raises(TransferError, match=r"12 copies \(failed at copy 6 .*: invalid argument"):
        await ticket.completed()
    assert world.cuda.count("queued") == 0
    await behind.completed()
    world.cuda.fail("half of cuMemcpyBatchAsync", 0)
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    np.testing.assert_array_equal(slots[0], world.cache.chunk([0, 1]))


async def test_a_batch_out_of_range_moves_nothing_and_the_lane_continues(
    world: SimulatedGpu,
) -> None:
    world.slot(0)[:] = 0xEE
    bad = world.engine.submit_store([batch([0], [[0, 1]]), batch([1], [[0, BLOCKS]])])
    with pytest.raises(TransferError, match="block 12 requested"):
        await bad.completed()
    assert (world.slot(0) == 0xEE).all()
    with pytest.raises(TransferError, match="group 5 is not registered"):
        await world.engine.submit_load([batch([0], [[0, 1]], group=5)]).completed()
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_broken_gpu_fails_tickets_instead_of_hanging(world: SimulatedGpu) -> None:
    world.cuda.configure(event_failure=700)
    with pytest.raises(TransferError, match="cuEventSynchronize: unknown error"):
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    world.cuda.configure(event_failure=0)
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_job_whose_end_cannot_be_marked_ends_when_its_copies_have(
    world: SimulatedGpu,
) -> None:
    world.cuda.hold()
    world.cuda.fail("cuEventRecord", 700, nth=1)
    ticket = world.engine.submit_store([batch([0], [[0, 1]])])
    behind = world.engine.submit_store([batch([1], [[2, 3]])])
    await asyncio.to_thread(world.cuda.await_call, "cuStreamSynchronize")
    assert not ticket.done()
    world.cuda.release()
    with pytest.raises(TransferError, match="cuEventRecord"):
        await ticket.completed()
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))
    await behind.completed()


async def test_a_job_without_an_event_for_its_end_does_not_begin(world: SimulatedGpu) -> None:
    world.slot(0)[:] = 0xEE
    held = [world.engine.record_event() for _ in range(world.cuda.count("events"))]
    world.cuda.fail("cuEventCreate", 2)
    with pytest.raises(TransferError, match=r"cuEventCreate: out of memory \(2\)"):
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    assert world.cuda.calls("cuMemcpyBatchAsync") == 0
    assert (world.slot(0) == 0xEE).all()
    world.cuda.fail("cuEventCreate", 0)
    del held
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_repeated_failure_is_logged_the_first_and_the_tenth_time(
    world: SimulatedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    world.cuda.fail("half of cuMemcpyBatchAsync", 1)
    for count in range(2, 14):  # the text differs, but the kind does not
        job = [batch([n % SLOTS], [[0, 1]]) for n in range(count)]
        with pytest.raises(TransferError, match="cuMemcpyBatchAsync"):
            await world.engine.submit_store(job).completed()
    world.cuda.configure(event_failure=700)
    with pytest.raises(TransferError):
        await world.engine.submit_load([batch([0], [[0, 1]])]).completed()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("cuM")[0] for line in lines[:2]] == [
        "kvtiers: a copy failed unexpectedly (",
        "kvtiers: 10 copies have failed like this so far: ",
    ]
    assert len([line for line in lines if "cuMemcpyBatchAsync" in line]) == 2
    assert world.engine.failures() == {
        "cuMemcpyBatchAsync: 1": 13,
        "cuEventSynchronize: 700": 1,
        "cuStreamSynchronize: 700": 1,
    }
    world.cuda.configure(event_failure=0)


async def test_events_belong_to_the_caches_device_whatever_context_is_current(
    world: SimulatedGpu,
) -> None:
    """No context is current in this thread, as in a thread whose model runs on another device."""
    after = await asyncio.to_thread(world.engine.record_event)
    await world.engine.submit_store([batch([0], [[0, 1]])], after).completed()
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))


async def test_an_event_of_another_engine_is_refused(world: SimulatedGpu) -> None:
    with pytest.raises(TypeError, match="not an event of this engine"):
        world.engine.submit_store([], object())


async def test_closing_finishes_the_work_and_frees_everything(cache: Cache) -> None:
    threads = set(threading.enumerate())
    world = SimulatedGpu(cache)
    tickets = [world.engine.submit_store([batch([i % SLOTS], [[0, 1]])]) for i in range(30)]
    held = world.engine.record_event()
    world.engine.close()
    world.engine.close()
    assert all(ticket.done() for ticket in tickets)
    assert world.cuda.count("streams") == 0
    del held
    assert world.cuda.count("events") == 1  # the one that the caller still holds
    assert world.cuda.count("retained") == 1  # the registrar's
    assert world.cuda.count("allocated") == 0
    late = world.engine.submit_load([])
    with pytest.raises(TransferError, match="closed"):
        await late.completed()
    world.close()
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("cuStreamCreateWithPriority", 1),
        ("cuStreamCreateWithPriority", 2),
        ("cuCtxSetCurrent", 1),
        ("cuCtxSetCurrent", 2),
        ("cuCtxSetCurrent", 3),
        ("cuCtxSetCurrent", 4),
        ("cuCtxPushCurrent_v2", 2),
        ("cuCtxPushCurrent_v2", 3),
        ("cuEventRecord", 3),
        ("cuStreamWaitEvent", 2),
    ],
)
def test_a_failed_start_releases_what_was_set_up(cache: Cache, name: str, nth: int) -> None:
    world = SimulatedGpu(cache)
    world.engine.close()
    threads = set(threading.enumerate())
    retained = world.cuda.count("retained")
    world.cuda.fail(name, 2, nth)
    try:
        with pytest.raises(DriverError, match=name):
            world.open_engine()
        assert world.cuda.count("streams") == 0
        assert world.cuda.count("retained") == retained
        assert set(threading.enumerate()) <= threads
        assert world.cuda.library.kvt_depth() == 1, "the caller's own context is current again"
        world.open_engine()  # the same start works if nothing fails
    finally:
        world.close()


async def test_events_are_reused(world: SimulatedGpu) -> None:
    for _ in range(50):
        after = world.engine.record_event()
        await world.engine.submit_store([batch([0], [[0, 1]])], after).completed()
    assert world.cuda.count("events") <= 6


async def test_threads_do_not_disturb_graph_capture(world: SimulatedGpu) -> None:
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    await world.engine.submit_load([batch([0], [[0, 1]])]).completed()
    lanes = {"kvtiers-store", "kvtiers-store-wait", "kvtiers-load", "kvtiers-load-wait"}
    modes = world.cuda.capture_modes()
    assert {name: modes[name] for name in modes if name.startswith("kvtiers")} == {
        name: {2} for name in lanes
    }
    assert world.cuda.library.kvt_capture_mode() == 0, "the caller's own mode is restored"


async def test_an_older_driver_copies_one_by_one(cache: Cache) -> None:
    world = SimulatedGpu(cache, has_batch=0, path=CopyPath.BATCH)
    assert world.paths() == (CopyPath.EACH, CopyPath.EACH)
    world.close()
    world = SimulatedGpu(cache, has_batch=0, path=CopyPath.EACH)
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    np.testing.assert_array_equal(world.slot(0), cache.chunk([0, 1]))
    world.close()


@pytest.mark.parametrize("path", [None, *CopyPath])
async def test_without_shared_host_addresses_neither_batch_nor_kernel_is_used(
    cache: Cache, path: CopyPath | None
) -> None:
    """Attribute 91 is 0 on WSL2: a single batch or kernel there makes every later call fail."""
    world = SimulatedGpu(cache, path=path, host_pointers=0)
    try:
        assert world.paths() == (CopyPath.EACH, CopyPath.EACH)
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
        await world.engine.submit_load([batch([0], [[2, 3]])]).completed()
        np.testing.assert_array_equal(cache.chunk([0, 1]), cache.chunk([2, 3]))
    finally:
        world.close()
