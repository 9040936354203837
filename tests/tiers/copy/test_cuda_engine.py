"""The CUDA engine against a driver simulated behind the real C functions: bytes, order, errors.

What only a GPU can show (that the real driver agrees, and the speed) is in tests/gpu.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.copy.engine_on_fake_cuda import BLOCKS, SLOTS, World
from tests.tiers.copy.fake_cuda import CONTEXT
from tests.tiers.copy.known_caches import Cache, batch, contiguous_blocks, separate_layers
from tiers.copy.base import TransferError
from tiers.copy.cuda_engine import CopyPath
from tiers.cuda_driver import Addresses, Driver, DriverError


@pytest.fixture
def cache() -> Cache:
    return separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)


@pytest.fixture
def world(cache: Cache) -> Iterator[World]:
    one = World(cache, path=CopyPath.BATCH)
    yield one
    one.close()


@pytest.mark.parametrize("make", [separate_layers, contiguous_blocks])
@pytest.mark.parametrize("path", list(CopyPath))
async def test_bytes_are_right_both_ways_on_every_path(make: object, path: CopyPath) -> None:
    cache = make([4096, 8192, 4096], BLOCKS, chunk_blocks=2)  # type: ignore[operator]  # one of two functions
    # numpy aligns to 16, as the kernel needs.
    assert cache.storage.ctypes.data % 16 == 0
    for seed in range(5):
        world = World(cache, seed=seed, path=path)
        try:
            assert world.engine.paths() == {0: path}
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


async def store_behind_a_forward_pass(cache: Cache, seed: int, wait: bool) -> bool:
    world = World(cache, seed=seed, path=CopyPath.BATCH)
    try:
        cache.storage[:] = 0
        world.cuda.hold()
        for _ in range(3):
            world.cuda.launch(lambda: None)
        world.cuda.launch(lambda: cache.storage.fill(7))
        after = world.engine.record_event() if wait else None
        ticket = world.engine.submit_store([batch([1], [[3, 4]])], after)
        world.cuda.await_call("cuMemcpyBatchAsync")
        world.cuda.release()
        await ticket.completed()
        return bool((world.slot(1) == 7).all())
    finally:
        world.close()


async def test_a_store_waits_for_the_forward_pass(cache: Cache) -> None:
    outcomes = [await store_behind_a_forward_pass(cache, seed, wait=True) for seed in range(10)]
    assert all(outcomes)


async def test_without_the_event_it_would_not(cache: Cache) -> None:
    """The fake GPU can show the fault that the test above looks for."""
    outcomes = [await store_behind_a_forward_pass(cache, seed, wait=False) for seed in range(10)]
    assert not all(outcomes)


async def test_a_load_waits_for_the_readers_of_its_blocks(cache: Cache) -> None:
    for seed in range(10):
        world = World(cache, seed=seed, path=CopyPath.BATCH)
        try:
            cache.storage[:] = 3
            world.slot(1)[:] = 9
            seen: list[int] = []
            world.cuda.hold()
            for _ in range(3):
                world.cuda.launch(lambda: None)
            world.cuda.launch(lambda seen=seen: seen.extend(np.unique(cache.storage).tolist()))
            ticket = world.engine.submit_load([batch([1], [[3, 4]])], world.engine.record_event())
            world.cuda.await_call("cuMemcpyBatchAsync")
            world.cuda.release()
            await ticket.completed()
            assert seen == [3], f"seed {seed}"
            assert np.unique(cache.chunk([3, 4])).tolist() == [9]
        finally:
            world.close()


async def test_a_ticket_is_done_only_when_the_bytes_have_arrived(world: World) -> None:
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


async def test_lists_of_copies_are_held_until_the_copies_have_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that the driver has read its arrays when the call returns."""
    lists: list[weakref.ref[np.ndarray]] = []
    copy_batch = Driver.copy_batch

    def watched(self: Driver, to: Addresses, source: Addresses, sizes: Addresses, at: int) -> None:
        lists.extend(map(weakref.ref, (to, source, sizes)))
        copy_batch(self, to, source, sizes, at)

    monkeypatch.setattr(Driver, "copy_batch", watched)
    world.cuda.hold()
    first = world.engine.submit_store([batch([0], [[0, 1]])])
    second = world.engine.submit_store([batch([1], [[2, 3]])])
    # The thread that submits has left the first job when it submits the second.
    await asyncio.to_thread(world.cuda.await_call, "cuMemcpyBatchAsync", 2)
    gc.collect()
    assert [array() is not None for array in lists[:3]] == [True] * 3
    world.cuda.release()
    await first.completed()
    await second.completed()


async def test_a_batch_that_fails_half_way_is_reported_when_nothing_moves_any_more(
    world: World,
) -> None:
    world.cuda.hold()
    world.cuda.fail["cuMemcpyBatchAsync"] = 1
    slots = [world.slot(i) for i in range(3)]
    for slot in slots:
        slot[:] = 0xEE
    ticket = world.engine.submit_store([batch([0, 1, 2], [[0, 1], [2, 3], [4, 5]])])
    behind = world.engine.submit_store([])
    # If nothing waits for the first job, something waits for the next one.
    await asyncio.to_thread(world.cuda.await_call, "cuEventSynchronize")
    assert not ticket.done()
    world.cuda.release()
    with pytest.raises(TransferError, match=r"12 copies \(failed at 6\): invalid argument \(1\)"):
        await ticket.completed()
    stream_queues = [len(stream.queue) for stream in world.cuda.streams.values()]
    assert stream_queues == [0, 0, 0]
    await behind.completed()
    del world.cuda.fail["cuMemcpyBatchAsync"]
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    np.testing.assert_array_equal(slots[0], world.cache.chunk([0, 1]))


async def test_a_batch_out_of_range_moves_nothing_and_the_lane_goes_on(world: World) -> None:
    world.slot(0)[:] = 0xEE
    bad = world.engine.submit_store([batch([0], [[0, 1]]), batch([1], [[0, BLOCKS]])])
    with pytest.raises(TransferError, match="block 12 asked for"):
        await bad.completed()
    assert (world.slot(0) == 0xEE).all()
    with pytest.raises(TransferError, match="group 5 is not registered"):
        await world.engine.submit_load([batch([0], [[0, 1]], group=5)]).completed()
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_broken_gpu_fails_tickets_rather_than_hanging_them(world: World) -> None:
    world.cuda.event_failure = 700
    with pytest.raises(TransferError, match="cuEventSynchronize: unknown error"):
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    world.cuda.event_failure = 0
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_job_whose_end_cannot_be_marked_ends_when_its_copies_have(world: World) -> None:
    world.cuda.hold()
    world.cuda.fail_nth["cuEventRecord"] = 1, 700
    ticket = world.engine.submit_store([batch([0], [[0, 1]])])
    behind = world.engine.submit_store([batch([1], [[2, 3]])])
    await asyncio.to_thread(world.cuda.await_call, "cuStreamSynchronize")
    assert not ticket.done()
    world.cuda.release()
    with pytest.raises(TransferError, match="cuEventRecord"):
        await ticket.completed()
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))
    await behind.completed()


async def test_a_job_without_an_event_for_its_end_does_not_begin(world: World) -> None:
    world.slot(0)[:] = 0xEE
    world.cuda.fail["cuEventCreate"] = 2
    with pytest.raises(TransferError, match=r"cuEventCreate: out of memory \(2\)"):
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    assert "cuMemcpyBatchAsync" not in world.cuda.calls
    assert (world.slot(0) == 0xEE).all()
    del world.cuda.fail["cuEventCreate"]
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()


async def test_a_failure_that_repeats_is_logged_at_the_first_and_the_tenth_time(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.cuda.fail["cuMemcpyBatchAsync"] = 1
    for count in range(2, 14):  # the text differs, the kind does not
        job = [batch([n % SLOTS], [[0, 1]]) for n in range(count)]
        with pytest.raises(TransferError, match="cuMemcpyBatchAsync"):
            await world.engine.submit_store(job).completed()
    world.cuda.event_failure = 700
    with pytest.raises(TransferError):
        await world.engine.submit_load([batch([0], [[0, 1]])]).completed()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("cuM")[0] for line in lines[:2]] == [
        "a copy failed unexpectedly (",
        "10 copies have failed like this so far: ",
    ]
    assert len([line for line in lines if "cuMemcpyBatchAsync" in line]) == 2
    assert world.engine.failures() == {
        "cuMemcpyBatchAsync: 1": 13,
        "cuEventSynchronize: 700": 1,
        "cuStreamSynchronize: 700": 1,
    }
    world.cuda.event_failure = 0


async def test_the_event_is_of_the_caches_device_whatever_the_caller_has_made_current(
    world: World,
) -> None:
    """In this thread no context is current, as on one whose model runs on another device."""
    after = await asyncio.to_thread(world.engine.record_event)
    await world.engine.submit_store([batch([0], [[0, 1]])], after).completed()
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))


async def test_an_event_of_something_else_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="not an event of this engine"):
        world.engine.submit_store([], object())


async def test_closing_finishes_the_work_and_frees_everything(cache: Cache) -> None:
    threads = set(threading.enumerate())
    world = World(cache)
    tickets = [world.engine.submit_store([batch([i % SLOTS], [[0, 1]])]) for i in range(30)]
    held = world.engine.record_event()
    world.engine.close()
    world.engine.close()
    assert all(ticket.done() for ticket in tickets)
    assert list(world.cuda.streams) == [0]
    del held
    assert len(world.cuda.events) == 1  # the one that the caller still held
    assert world.cuda.retained == 1  # the registrar's
    late = world.engine.submit_load([])
    with pytest.raises(TransferError, match="closed"):
        await late.completed()
    world.close()
    assert world.cuda.retained == 0
    assert world.cuda.registered == {}
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
    ],
)
def test_what_was_set_up_is_released_when_a_later_step_fails(
    cache: Cache, name: str, nth: int
) -> None:
    world = World(cache)
    world.engine.close()
    threads = set(threading.enumerate())
    retained = world.cuda.retained
    world.cuda.fail_nth[name] = nth, 2
    try:
        with pytest.raises(DriverError, match=name):
            world.open_engine()
        assert list(world.cuda.streams) == [0]
        assert world.cuda.retained == retained
        assert set(threading.enumerate()) <= threads
        assert world.cuda._local.stack == [CONTEXT], "the caller's own context is current again"
        world.open_engine()  # the same works when nothing fails
    finally:
        world.close()


async def test_events_are_reused(world: World) -> None:
    for _ in range(50):
        after = world.engine.record_event()
        await world.engine.submit_store([batch([0], [[0, 1]])], after).completed()
    assert len(world.cuda.events) <= 6


async def test_threads_keep_out_of_the_way_of_graph_capture(world: World) -> None:
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    await world.engine.submit_load([batch([0], [[0, 1]])]).completed()
    ours = {name: modes for name, modes in world.cuda.modes.items() if name.startswith("kvtiers")}
    lanes = {"kvtiers-store", "kvtiers-store-wait", "kvtiers-load", "kvtiers-load-wait"}
    assert ours == {name: {2} for name in (*lanes, "kvtiers-slab")}
    assert getattr(world.cuda._local, "mode", 0) == 0, "the caller's own mode is restored"


async def test_an_older_driver_copies_one_by_one(cache: Cache) -> None:
    world = World(cache, batch_copy=False, path=CopyPath.BATCH)
    assert world.engine.paths() == {0: CopyPath.EACH}
    await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
    np.testing.assert_array_equal(world.slot(0), cache.chunk([0, 1]))
    world.close()


async def test_the_choice_is_logged_and_a_missing_kernel_is_warned_of(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tiers.copy.cuda_engine"):
        World(cache).close()
        World(cache, kernel=False).close()
    lines = [record.getMessage() for record in caplog.records if "group 0" in record.getMessage()]
    start = "group 0: 2 copies per block of at least 4,096 bytes, by "
    assert lines == [start + "a gather/scatter kernel", start + "one batched driver call"]
    assert caplog.text.count("the gather/scatter kernel cannot be used (ModuleNotFound") == 1
