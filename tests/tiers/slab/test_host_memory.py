"""Facts about the machine's memory, read from files like those of Linux, and NUMA placement."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tiers.slab.host_memory import available_bytes, node_count, parse_id_list, pci_node, prefer_node
from tiers.slab.slab import HostSlab

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal: {24 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {20 * 2**20} kB\n"
    )
    (folder / "self" / "cgroup").write_text("0::/pod/box\n")
    return folder


def group(folder: Path, limit: str, current: int = 0, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {reclaimable}\ninactive_file 0\n")


def test_without_a_group_limit_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 20 * GIB
    group(tmp_path / "groups" / "pod" / "box", "max")
    assert available_bytes(proc, tmp_path / "groups") == 20 * GIB


def test_the_tightest_group_above_the_process_decides(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "pod" / "box", str(16 * GIB), current=2 * GIB)
    assert available_bytes(proc, groups) == 14 * GIB
    group(groups / "pod", str(8 * GIB), current=5 * GIB, reclaimable=GIB)
    assert available_bytes(proc, groups) == 4 * GIB
    group(groups / "pod", str(8 * GIB), current=9 * GIB)
    assert available_bytes(proc, groups) == 0


def test_a_machine_without_information_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


def test_this_machine_reports_its_memory() -> None:
    available = available_bytes()
    assert available is None or available > 0


@pytest.mark.parametrize(
    ("text", "ids"), [("0\n", [0]), ("0-2,5\n", [0, 1, 2, 5]), ("", []), ("3,1", [3, 1])]
)
def test_lists_of_ids_are_parsed(text: str, ids: list[int]) -> None:
    assert parse_id_list(text) == ids


def test_nodes_and_pci_devices(tmp_path: Path) -> None:
    (tmp_path / "has_memory").write_text("0-1\n")
    assert node_count(tmp_path) == 2
    assert node_count(tmp_path / "none") == 1
    for bus, node in [("0000:65:00.0", "1\n"), ("0000:03:00.0", "-1\n")]:
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(node)
    assert pci_node("0000:65:00.0", tmp_path) == 1
    assert pci_node("0000:03:00.0", tmp_path) is None
    assert pci_node("0000:99:00.0", tmp_path) is None


def policy_of(address: int) -> str:
    """The kernel's own description of a mapping (/proc/self/numa_maps), empty if there is none."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return ""
    starts = {int(line.split()[0], 16): line.split()[1] for line in lines}
    below = [start for start in starts if start <= address]
    return starts[max(below)]


def test_a_slab_prefers_the_given_node() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("needs a kernel with NUMA")
    slab = HostSlab(4096, 16, numa_node=0, background=False)
    try:
        assert policy_of(slab.address) == "prefer:0"
    finally:
        slab.close()


def test_a_missing_node_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        slab = HostSlab(4096, 4, numa_node=500, background=False)
    try:
        assert "could not be placed on NUMA node 500" in caplog.text
        slab.slot(0)[:] = 1
        assert not prefer_node(slab.address, slab.size_bytes, 500)
    finally:
        slab.close()
