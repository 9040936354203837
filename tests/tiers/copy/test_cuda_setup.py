"""How the CUDA engine chooses its way of copying, and pinning through the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.copy.fake_cuda import FakeCuda
from tiers.copy.cuda_engine import KERNEL_BELOW_BYTES, CopyPath, Means, choose_path, gpu_node
from tiers.copy.descriptors import CopyShape
from tiers.cuda_driver import Driver, DriverError, load_driver
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.pinning import PinningError
from tiers.slab.slab import HostSlab, SlabError

SMALL, LARGE = KERNEL_BELOW_BYTES - 16, KERNEL_BELOW_BYTES
ALL = Means(batch=True, kernel=True)


@pytest.mark.parametrize(
    ("shape", "means", "wanted", "path"),
    [
        (CopyShape(32, LARGE, 4096), ALL, None, CopyPath.BATCH),
        (CopyShape(32, SMALL, 16), ALL, None, CopyPath.KERNEL),
        (CopyShape(32, SMALL, 8), ALL, None, CopyPath.BATCH),
        (CopyShape(1, SMALL, 4096), ALL, None, CopyPath.BATCH),
        (CopyShape(32, SMALL, 4096), Means(batch=True, kernel=False), None, CopyPath.BATCH),
        (CopyShape(32, LARGE, 4096), Means(batch=False, kernel=True), None, CopyPath.EACH),
        (CopyShape(32, LARGE, 4096), ALL, CopyPath.KERNEL, CopyPath.KERNEL),
        (CopyShape(32, SMALL, 8), ALL, CopyPath.KERNEL, CopyPath.BATCH),
        (CopyShape(32, SMALL, 4096), ALL, CopyPath.BATCH, CopyPath.BATCH),
        (CopyShape(32, SMALL, 4096), ALL, CopyPath.EACH, CopyPath.EACH),
    ],
)
def test_the_path_follows_from_page_size_and_means(
    shape: CopyShape, means: Means, wanted: CopyPath | None, path: CopyPath
) -> None:
    assert choose_path(shape, means, wanted) is path


def test_registration_goes_through_the_driver_and_reports_its_words() -> None:
    cuda = FakeCuda()
    driver = Driver(cuda)
    slab = HostSlab(
        4096, 3, pin=True, registrar=CudaRegistrar(1, driver), piece_bytes=1, background=False
    )
    assert cuda.registered == {slab.slot_address(i): 4096 for i in range(3)}
    slab.close()
    assert cuda.registered == {}
    cuda.fail["cuMemHostRegister_v2"] = 2
    with pytest.raises(SlabError, match=r"cuMemHostRegister_v2: out of memory \(2\)"):
        HostSlab(4096, 3, pin=True, registrar=CudaRegistrar(1, driver), background=False)
    with pytest.raises(PinningError, match="cuDeviceGet"):
        CudaRegistrar(7, driver)
    cuda.stop()
    assert cuda.errors == []


def test_the_registrar_takes_the_context_of_the_caller() -> None:
    cuda = FakeCuda()
    cuda.make_current()
    CudaRegistrar(None, Driver(cuda))
    assert cuda.retained == 0, "no context of another GPU was opened"
    cuda.stop()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """/sys of a machine with two nodes: ordinal 0 on node 1, ordinal 1 on a bus of no node."""
    (tmp_path / "has_memory").write_text("0-1\n")
    for bus, node in [("0000:65:00.0", "1\n"), ("0000:a3:00.0", "-1\n")]:
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(node)
    return tmp_path


def test_the_slab_goes_to_the_node_of_its_gpu(machine: Path) -> None:
    cuda = FakeCuda()
    driver = Driver(cuda)
    assert gpu_node(0, driver=driver, nodes=machine, devices=machine) == 1
    assert gpu_node(1, driver=driver, nodes=machine, devices=machine) is None
    with pytest.raises(DriverError, match="cuDeviceGet"):
        driver.device(7)
    assert gpu_node(7, driver=driver, nodes=machine, devices=machine) is None
    (machine / "has_memory").write_text("0\n")
    assert gpu_node(0, driver=driver, nodes=machine, devices=machine) is None
    cuda.stop()
    assert cuda.errors == []


def test_a_registrar_lets_go_of_what_it_opened_and_of_nothing_else() -> None:
    cuda = FakeCuda()
    one = CudaRegistrar(1, Driver(cuda))
    assert cuda.retained == 1
    one.close()
    one.close()
    assert cuda.retained == 0
    cuda.make_current()
    CudaRegistrar(None, Driver(cuda)).close()
    assert cuda.retained == 0
    cuda.stop()
    assert cuda.errors == []


def test_without_a_driver_everything_says_so() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(DriverError, match="no CUDA driver"):
        load_driver()
