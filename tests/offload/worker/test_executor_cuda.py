"""The executor over the CUDA engine and the libcuda in host memory: fences without waiting for
copies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from offload.layout.registration import GroupCaches, register_kv_caches
from offload.messages.plan import StepPlan, StoreJob
from offload.worker.executor import Executor
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.fences import Reading
from offload.worker.rank_memory import RankMemory
from offload.worker.unanswered_jobs import Drained
from tests.libcuda import Cuda, strict_cuda
from tests.offload.small_model import BLOCKS, kv_caches
from tests.patience import PATIENCE_S
from tests.tiers.copy.engine_on_libcuda import MODEL_STREAM
from tiers.copy.cuda_engine import CudaCopyEngine
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

LAYERS = ("layers.0", "layers.1")
FENCE_S = 60.0
"""Far longer than a submission takes; this ends a fence that waits for a copy that is blocked."""


class Rank:
    """An executor like a worker's; the blocks of its caches count as the GPU's memory."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.caches = {name: kv_caches()[name] for name in LAYERS}
        for cache in self.caches.values():
            cuda.on_device(cache.data_ptr(), cache.nbytes)
        cuda.make_current()
        registration = register_kv_caches(BLOCKS, [GroupCaches(0, 1, self.caches)])
        self.slab = HostSlab(
            8192, 6, pin=True, registrar=CudaRegistrar(0, cuda.driver), background=False
        )
        self.engine = CudaCopyEngine(
            registration.groups,
            self.slab,
            num_blocks=BLOCKS,
            device=0,
            driver=cuda.driver,
            compute_stream=lambda: MODEL_STREAM,
        )
        limits = ExecutorLimits(fence_timeout_s=FENCE_S)
        groups = {group.group: group for group in registration.groups}
        self.executor = Executor(RankMemory(self.slab, self.engine, groups), limits=limits)

    def fill(self, block: int, value: int) -> None:
        """A kernel of the model that overwrites a block."""
        for cache in self.caches.values():
            self.cuda.launch(lambda cache=cache: cache[block].fill_(value), MODEL_STREAM)

    async def result(self) -> Drained:
        """Wait for the answers of the jobs under way."""
        deadline = time.monotonic() + PATIENCE_S
        while not (drained := self.executor.drain()).report.results:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        return drained


@asynccontextmanager
async def rank() -> AsyncIterator[Rank]:
    with strict_cuda() as cuda:
        one = Rank(cuda)
        one.executor.start()
        try:
            yield one
        finally:
            cuda.release()
            await one.executor.aclose(PATIENCE_S)
            one.slab.close()


async def fence_in_time(one: Rank) -> None:
    """The model's thread fences job 1 while the loop runs."""
    await asyncio.to_thread(one.executor.fence, [1])


def set_when_called(patch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """An event that is set when a fence begins to wait in this method of ``Reading``."""
    real, called = getattr(Reading, name), threading.Event()

    def method(reading: Reading, timeout_s: float) -> object:
        called.set()
        return real(reading, timeout_s)

    patch.setattr(Reading, name, method)
    return called


async def until_it_waits(fence: asyncio.Task[None], waits: threading.Event) -> None:
    """Return when the fence waits; fail if it has ended instead."""
    while not (waits.is_set() or fence.done()):  # noqa: ASYNC110  # set by a thread
        await asyncio.sleep(0.001)
    assert not fence.done(), "the store still reads"


async def test_a_fence_does_not_wait_for_the_copy_and_the_bytes_are_right() -> None:
    async with rank() as one:
        one.fill(3, 7)
        one.cuda.await_idle()
        one.cuda.hold(one.engine._store.stream)  # the copy does not advance
        one.executor.post(StepPlan(stores=(StoreJob(1, 0, [3], [2]),)))
        await fence_in_time(one)
        assert one.executor.stats.fence_timeouts == 0, "the fence waited for the copy"
        one.fill(3, 9)  # the block's next owner
        one.cuda.await_stuck()  # a kernel that does not wait has run
        assert one.cuda.count("queued") == 2, "the model's stream waits for the store"
        one.cuda.release()
        drained = await one.result()
        assert not drained.report.results[1].failed
        assert np.unique(one.slab.slot_view(2, 6000)).tolist() == [7]
        one.cuda.await_idle()
        assert np.unique(one.caches["layers.0"][3].numpy()).tolist() == [9]


async def test_a_fence_waits_until_the_store_is_submitted() -> None:
    """The loop has not accepted the plan yet when the model's thread reaches the fence."""
    async with rank() as one:
        one.fill(3, 7)
        one.executor.post(StepPlan(stores=(StoreJob(1, 0, [3], [2]),)))
        await fence_in_time(one)
        one.fill(3, 9)
        drained = await one.result()
        assert not drained.report.results[1].failed
        assert np.unique(one.slab.slot_view(2, 6000)).tolist() == [7]


@pytest.mark.parametrize("name", ["cuStreamWaitEvent", "cuCtxPushCurrent_v2"])
async def test_if_the_driver_refuses_the_fence_waits_for_the_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rank() as one:
        one.fill(3, 7)
        one.cuda.await_idle()
        one.cuda.hold(one.engine._store.stream)
        one.executor.post(StepPlan(stores=(StoreJob(1, 0, [3], [2]),)))
        await asyncio.to_thread(one.cuda.await_call, "cuEventSynchronize")
        one.cuda.fail(name, 400, nth=1)
        waits = set_when_called(monkeypatch, "result")
        fence = asyncio.create_task(fence_in_time(one))
        await until_it_waits(fence, waits)
        one.cuda.release()
        await fence
        assert one.executor.stats.fence_timeouts == 0
        one.fill(3, 9)
        drained = await one.result()
        assert not drained.report.results[1].failed
        assert np.unique(one.slab.slot_view(2, 6000)).tolist() == [7]


async def test_a_fence_waits_for_a_store_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rank() as one:
        one.fill(3, 7)
        one.cuda.await_idle()
        one.executor.post(StepPlan())
        one.cuda.hold(one.engine._store.stream)
        synchronizations = one.cuda.calls("cuStreamSynchronize")
        one.cuda.fail("cuEventRecord", 700, nth=2)  # the first is the model's
        one.executor.post(StepPlan(stores=(StoreJob(1, 0, [3], [2]),)))
        waits = set_when_called(monkeypatch, "end")
        fence = asyncio.create_task(fence_in_time(one))
        # Instead of the event, a thread waits for the whole stream.
        await asyncio.to_thread(one.cuda.await_call, "cuStreamSynchronize", synchronizations + 1)
        await until_it_waits(fence, waits)
        one.cuda.release()
        await fence
        assert (await one.result()).report.results[1].failed
