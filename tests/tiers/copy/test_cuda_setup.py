"""Tests how the CUDA engine chooses its way of copying, and how it pins through the driver."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

from tests.libcuda import strict_cuda
from tests.tiers.copy.engine_on_libcuda import BLOCKS, MODEL_STREAM, SimulatedGpu
from tests.tiers.copy.known_caches import separate_layers
from tiers.copy.cuda_engine import gpu_node
from tiers.copy.cuda_paths import (
    KERNEL_BELOW_BYTES,
    KERNEL_UP_TO_BYTES,
    Choice,
    CopyCapabilities,
    CopyPath,
    choose,
    possible_paths,
)
from tiers.copy.descriptors import CopyShape
from tiers.cuda_driver import DriverError
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.pinning import PinningError
from tiers.slab.slab import HostSlab, SlabError

BATCH, KERNEL, EACH = CopyPath.BATCH, CopyPath.KERNEL, CopyPath.EACH
SMALL, LARGE, HUGE = KERNEL_BELOW_BYTES - 16, KERNEL_BELOW_BYTES, KERNEL_UP_TO_BYTES + 16
ALL = CopyCapabilities(batch=True, kernel=True)


@pytest.mark.parametrize(
    ("shape", "capabilities", "wanted", "paths"),
    [
        (CopyShape(32, LARGE, 4096), ALL, None, (BATCH, KERNEL)),
        (CopyShape(32, SMALL, 16), ALL, None, (KERNEL, BATCH)),
        (CopyShape(32, HUGE, 16), ALL, None, (BATCH,)),
        (CopyShape(32, SMALL, 8), ALL, None, (BATCH,)),
        (CopyShape(1, SMALL, 4096), ALL, None, (BATCH,)),
        (CopyShape(32, SMALL, 4096), CopyCapabilities(batch=True, kernel=False), None, (BATCH,)),
        (
            CopyShape(32, LARGE, 4096),
            CopyCapabilities(batch=False, kernel=True),
            None,
            (EACH, KERNEL),
        ),
        (CopyShape(32, SMALL, 4096), CopyCapabilities(batch=False, kernel=False), None, (EACH,)),
        (CopyShape(32, LARGE, 4096), ALL, KERNEL, (KERNEL,)),
        (CopyShape(32, SMALL, 8), ALL, KERNEL, (BATCH,)),
        (CopyShape(32, SMALL, 4096), ALL, BATCH, (BATCH,)),
        (CopyShape(32, SMALL, 4096), ALL, EACH, (EACH,)),
    ],
)
def test_the_compared_paths_depend_on_page_size_and_capabilities(
    shape: CopyShape,
    capabilities: CopyCapabilities,
    wanted: CopyPath | None,
    paths: tuple[CopyPath, ...],
) -> None:
    assert possible_paths(shape, capabilities, wanted) == paths


@pytest.mark.parametrize(
    ("paths", "rates", "path"),
    [
        ((BATCH, KERNEL), {BATCH: 10.0, KERNEL: 12.6}, KERNEL),
        ((BATCH, KERNEL), {BATCH: 10.0, KERNEL: 12.4}, BATCH),
        ((KERNEL, BATCH), {BATCH: 10.0, KERNEL: 11.0}, BATCH),
        ((EACH, KERNEL), {EACH: 1.0, KERNEL: 50.0}, KERNEL),
        ((KERNEL, BATCH), {}, KERNEL),
        ((BATCH, KERNEL), {}, BATCH),
        ((BATCH, KERNEL), {KERNEL: 50.0}, BATCH),
    ],
)
def test_the_kernel_must_be_clearly_faster(
    paths: tuple[CopyPath, ...], rates: dict[CopyPath, float], path: CopyPath
) -> None:
    assert choose(paths, rates) == Choice(path, rates)


async def test_each_direction_uses_the_faster_path_and_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel is faster for loads and slower for stores here, as on an H100."""
    cache = separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)
    before = cache.storage.copy()
    with caplog.at_level(logging.INFO, "tiers.copy.cuda_engine"):
        world = SimulatedGpu(
            cache,
            batch_store_ns=500,
            batch_load_ns=500,
            kernel_store_ns=450,
            kernel_load_ns=100,
        )
    try:
        assert world.paths() == (BATCH, KERNEL)
        rate = (4096 + 8192) / 2 / 500e-9
        store, load = (world.engine.choices()[0, way].rates for way in ("store", "load"))
        assert store == {KERNEL: pytest.approx(rate / 0.9), BATCH: pytest.approx(rate)}
        assert load == {KERNEL: pytest.approx(rate * 5), BATCH: pytest.approx(rate)}
        np.testing.assert_array_equal(cache.storage, before, "the measurement changed the cache")
        ways = [(way.direction, way.name, way.is_used) for way in world.engine.path_infos()]
        assert sorted(ways) == [
            ("load", "batch", False),
            ("load", "kernel", True),
            ("store", "batch", True),
            ("store", "kernel", False),
        ]
    finally:
        world.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "kvtiers: group 0, store: each block is copied in 2 pieces of at least 4,096 bytes, by one "
        "batched driver call (measured: a gather/scatter kernel 13.7 GB/s, one batched driver call "
        "12.3 GB/s)",
        "kvtiers: group 0, load: each block is copied in 2 pieces of at least 4,096 bytes, by a "
        "gather/scatter kernel (measured: a gather/scatter kernel 61.4 GB/s, one batched driver "
        "call 12.3 GB/s)",
    ]


async def test_the_measurement_waits_for_the_model_to_clear_its_cache() -> None:
    """vLLM's zeroing may still be in progress, so the measurement must not copy back older
    bytes."""
    cache = separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)
    world = SimulatedGpu(cache)
    world.engine.close()
    try:
        world.cuda.hold(MODEL_STREAM)
        world.cuda.launch(lambda: cache.storage.fill(0))
        opening = asyncio.create_task(asyncio.to_thread(world.open_engine))
        while world.cuda.calls("cuStreamWaitEvent") < 4 and not opening.done():  # noqa: ASYNC110  # set by a thread
            await asyncio.sleep(0.001)
        assert not opening.done(), "it was measured while the model's stream was blocked"
        world.cuda.release()
        await opening
        assert not cache.storage.any()
    finally:
        world.close()


@pytest.mark.parametrize("nth", [3, 4, 9])
async def test_without_a_measurement_the_size_decides(nth: int) -> None:
    """A copy fails while it is timed: cuStreamSynchronize 1 and 2 belong to the kernel."""
    cache = separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)
    world = SimulatedGpu(cache, failing=("cuStreamSynchronize", nth))
    try:
        assert world.paths() == (KERNEL, KERNEL)
        assert world.engine.choices()[0, "load"].rates == {}
    finally:
        world.close()


def test_registration_uses_the_driver_and_reports_its_error() -> None:
    with strict_cuda() as cuda:
        slab = HostSlab(
            4096,
            3,
            pin=True,
            registrar=CudaRegistrar(1, cuda.driver),
            piece_bytes=1,
            background=False,
        )
        assert cuda.registered() == {slab.slot_address(i): 4096 for i in range(3)}
        slab.close()
        cuda.fail("cuMemHostRegister_v2", 2)
        with pytest.raises(SlabError, match=r"cuMemHostRegister_v2: out of memory \(2\)"):
            HostSlab(4096, 3, pin=True, registrar=CudaRegistrar(1, cuda.driver), background=False)
        with pytest.raises(PinningError, match="cuDeviceGet"):
            CudaRegistrar(7, cuda.driver)


def test_the_registrar_uses_the_context_of_the_caller() -> None:
    with strict_cuda() as cuda:
        cuda.make_current()
        CudaRegistrar(None, cuda.driver).close()
        assert cuda.calls("cuDevicePrimaryCtxRetain") == 0, "a context of another GPU was opened"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """/sys of a machine with two nodes: ordinal 0 is on node 1, ordinal 1 on a bus without a
    node."""
    (tmp_path / "has_memory").write_text("0-1\n")
    for bus, node in [("0000:65:00.0", "1\n"), ("0000:a3:00.0", "-1\n")]:
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(node)
    return tmp_path


def test_the_slab_goes_to_the_node_of_its_gpu(machine: Path) -> None:
    with strict_cuda() as cuda:
        driver = cuda.driver
        assert gpu_node(0, driver=driver, nodes=machine, devices=machine) == 1
        assert gpu_node(1, driver=driver, nodes=machine, devices=machine) is None
        with pytest.raises(DriverError, match="cuDeviceGet"):
            driver.device(7)
        assert gpu_node(7, driver=driver, nodes=machine, devices=machine) is None
        (machine / "has_memory").write_text("0\n")
        assert gpu_node(0, driver=driver, nodes=machine, devices=machine) is None


def test_a_registrar_releases_what_it_opened_and_nothing_else() -> None:
    with strict_cuda() as cuda:
        one = CudaRegistrar(1, cuda.driver)
        assert cuda.count("retained") == 1
        one.close()
        one.close()
        assert cuda.count("retained") == 0
