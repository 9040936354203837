"""A worker from start to shutdown with the CUDA engine and the simulated libcuda in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.config.schema import parse_config
from offload.connector.scheduler.metrics_collector import copy_gauges
from offload.connector.worker.worker_side import WorkerSide
from offload.errors import CapacityError
from offload.layout.registration import GroupCaches, Registration, register_kv_caches
from offload.messages.plan import IN_SLAB, LoadItem, LoadJob, StepPlan, StoreJob
from offload.namespaces.manifest import Namespace
from offload.worker.unanswered_jobs import Drained
from tests.libcuda import Cuda, strict_cuda
from tests.offload.small_model import BLOCKS, compute, keys, kv_caches, wrong_blocks
from tests.patience import PATIENCE_S
from tiers.copy import cuda_engine
from tiers.copy.base import CopyPathInfo
from tiers.slab import cuda_registrar, slab

KEYS = [key + bytes(4) for key in keys(3)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    threads = set(threading.enumerate())
    with strict_cuda() as one:
        one.make_current()
        for module in (cuda_engine, cuda_registrar):
            monkeypatch.setattr(module, "load_driver", lambda: one.driver)
        monkeypatch.setattr(cuda_engine, "_torch_stream", lambda _device: 0)
        yield one
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE_S)


def registered(cuda: Cuda, caches: dict[str, torch.Tensor]) -> Registration:
    """The caches as vLLM registers them on a GPU."""
    layers = {name: caches[name] for name in ("layers.0", "layers.1")}
    registration = register_kv_caches(BLOCKS, [GroupCaches(0, 1, layers)])
    for cache in layers.values():
        cuda.on_device(cache.data_ptr(), cache.nbytes)
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda", 0))
    return replace(registration, tensors=(on_cuda,))


def worker(**cpu: Any) -> WorkerSide:
    config = {"cpu": {"capacity": "1MiB"} | cpu, "tiers": []}
    return WorkerSide(parse_config(config), 0, 1, Namespace.of({}))


def ended(one: WorkerSide, job: int) -> Drained:
    """Wait for the answer of a job."""
    deadline = time.monotonic() + PATIENCE_S
    while job not in (drained := one.drain(idle=True)).report.results:
        assert time.monotonic() < deadline
    return drained


def store_and_load(one: WorkerSide, cuda: Cuda, caches: dict[str, torch.Tensor]) -> None:
    """Blocks 1 to 3 are stored into slots and loaded into blocks 5 to 7."""
    compute(caches, keys(3), [1, 2, 3])
    one.post(StepPlan(stores=(StoreJob(1, 0, [1, 2, 3], [0, 1, 2]),)))
    assert not ended(one, 1).report.results[1].failed
    items = tuple(LoadItem(KEYS[n], 0, (5 + n,), n, IN_SLAB) for n in range(3))
    one.post(StepPlan(loads=(LoadJob(2, "r", items),)))
    assert not ended(one, 2).report.results[2].failed
    assert wrong_blocks(caches, keys(3), [5, 6, 7]) == []


def test_a_worker_stores_loads_and_releases_everything(cuda: Cuda) -> None:
    caches = kv_caches()
    one = worker()
    one.register(registered(cuda, caches), [])
    store_and_load(one, cuda, caches)
    assert cuda.calls("cuMemcpyBatchAsync") + cuda.calls("cuLaunchKernel") > 0
    one.shutdown()


def test_the_chosen_copy_paths_are_published_as_gauges(cuda: Cuda) -> None:
    one = worker()
    one.register(registered(cuda, kv_caches()), [])
    state = one.state()
    assert state is not None
    # Pages of 3,000 bytes are not aligned to 16, so there is nothing to compare.
    assert copy_gauges([state]) == {"copy_groups:store:batch": 1, "copy_groups:load:batch": 1}
    one.shutdown()
    paths = (
        CopyPathInfo(0, "load", "kernel", True, 4e10),
        CopyPathInfo(0, "load", "batch", False, 2e10),
        CopyPathInfo(1, "load", "kernel", True, 3e10),
    )
    assert copy_gauges([replace(state, copy_paths=paths)]) == {
        "copy_groups:load:kernel": 2,
        "copy_bytes_per_second:load:kernel": 3e10,
        "copy_bytes_per_second:load:batch": 2e10,
    }


def test_errors_of_the_driver_are_counted_for_the_metrics(cuda: Cuda) -> None:
    one = worker()
    one.register(registered(cuda, kv_caches()), [])
    assert "copy_failures" not in one.counters({})
    cuda.fail("cuMemcpyBatchAsync", 1, nth=1)
    one.post(StepPlan(stores=(StoreJob(1, 0, [1, 2, 3], [0, 1, 2]),)))
    assert ended(one, 1).report.results[1].failed
    assert one.counters({})["copy_failures"] == 1
    assert "copy_failures" not in one.counters({}), "only the difference is reported"
    one.shutdown()


def test_a_worker_also_works_without_pinning(cuda: Cuda) -> None:
    caches = kv_caches()
    one = worker(pin="off")
    one.register(registered(cuda, caches), [])
    store_and_load(one, cuda, caches)
    assert cuda.count("registered") == 0
    one.shutdown()


def test_slots_are_reported_as_they_are_pinned(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler learns of the first slots at the start and of the others when they are
    ready."""
    gate = threading.Semaphore(1)
    register = cuda_registrar.CudaRegistrar.register

    def slow(self: Any, address: int, nbytes: int) -> None:
        gate.acquire()
        register(self, address, nbytes)

    monkeypatch.setattr(cuda_registrar.CudaRegistrar, "register", slow)
    monkeypatch.setattr(
        slab.HostSlab.__init__,
        "__kwdefaults__",
        {
            **slab.HostSlab.__init__.__kwdefaults__,
            "piece_bytes": 64 * 1024,
        },
    )
    one = worker()
    one.register(registered(cuda, kv_caches()), [])
    state = one.state()
    assert state is not None
    assert (state.slots, state.usable) == (128, 8)
    assert one.drain(idle=False).report.usable == {}
    assert not one.wait_until_pinned(0.0)
    gate.release()
    deadline = time.monotonic() + PATIENCE_S
    while not (grown := one.drain(idle=True).report.usable):
        assert time.monotonic() < deadline
    assert grown == {0: 16}
    gate.release(100)
    assert one.wait_until_pinned(PATIENCE_S)
    one.shutdown()


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("cuMemHostRegister_v2", 1),
        ("cuStreamCreateWithPriority", 2),
        ("cuCtxSetCurrent", 1),
        ("cuDevicePrimaryCtxRetain", 1),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(cuda: Cuda, name: str, nth: int) -> None:
    one = worker()
    cuda.fail(name, 2, nth)
    with pytest.raises((CapacityError, cuda_engine.DriverError), match=r"out of memory|cu\w+"):
        one.register(registered(cuda, kv_caches()), [])
    assert one.state() is None
    one.shutdown()
