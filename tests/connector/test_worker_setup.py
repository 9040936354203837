"""What a worker has set up is let go again when a later step of its set-up fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from offload.config import TierConfig, parse_config
from offload.connector import worker_side
from offload.connector.worker_side import WorkerSide
from offload.errors import ConfigError, TierUnavailableError
from offload.namespace import Namespace
from offload.registry import GroupCaches, Registration, register_kv_caches
from offload.tier_factory import TierSpec
from tests.offload.small_model import BLOCKS, kv_caches
from tiers.slab import HostSlab, SlabError

NAMESPACE = b"n" * 16


def registration() -> Registration:
    layers = {name: kv_caches()[name] for name in ("layers.0", "layers.1")}
    return register_kv_caches(BLOCKS, [GroupCaches(0, 1, layers)])


def file_tier(folder: Path) -> TierSpec:
    config = TierConfig("file", str(folder), 1 << 24)
    return TierSpec("$.tiers", "file", config, folder, 1 << 24, NAMESPACE, 0, 1)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[HostSlab]:
    """Every slab that a worker makes."""
    made: list[HostSlab] = []

    def make(*arguments: Any, **options: Any) -> HostSlab:
        made.append(HostSlab(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(worker_side, "HostSlab", make)
    return made


def worker() -> WorkerSide:
    config = {
        "cpu": {"capacity": "1MiB"},
        "tiers": [{"type": "file", "path": "/kv", "capacity": "1GiB"}],
    }
    return WorkerSide(parse_config(config), 0, 1, Namespace.of({}))


def assert_released(slabs: list[HostSlab], threads: set[threading.Thread]) -> None:
    assert len(slabs) == 1
    with pytest.raises(SlabError, match="closed"):
        slabs[0].slot(0)
    left = set(threading.enumerate()) - threads
    for thread in left:
        thread.join(30.0)  # a loop's own pool is told to end, not waited for
    assert not [thread for thread in left if thread.is_alive()]


def test_a_tier_that_does_not_open_leaves_nothing_behind(
    tmp_path: Path, slabs: list[HostSlab]
) -> None:
    threads = set(threading.enumerate())
    (tmp_path / "file").write_text("not a folder")
    one = worker()
    with pytest.raises(TierUnavailableError):
        one.register(
            registration(), "cpu", [file_tier(tmp_path / "a"), file_tier(tmp_path / "file")]
        )
    assert_released(slabs, threads)
    assert one.handshake() is None
    one.shutdown()


def test_a_share_that_is_too_small_has_its_place(tmp_path: Path, slabs: list[HostSlab]) -> None:
    """What others have left below the path is seen only when it is claimed."""
    threads = set(threading.enumerate())
    one = worker()
    config = TierConfig("lmdb", str(tmp_path), 1 << 24)
    spec = TierSpec("$.tiers[1]", "lmdb", config, tmp_path, 1 << 20, NAMESPACE, 0, 1)
    with pytest.raises(ConfigError) as raised:
        one.register(registration(), "cpu", [spec])
    [problem] = raised.value.problems
    assert problem.where == "$.tiers[1].capacity"
    assert "leaves no room for records" in problem.what
    assert_released(slabs, threads)
    one.shutdown()


def test_an_engine_that_cannot_be_made_leaves_nothing_behind(slabs: list[HostSlab]) -> None:
    threads = set(threading.enumerate())
    one = worker()
    # A KV cache on a device that this machine has no driver of.
    with pytest.raises(Exception, match="CUDA"):
        _register_on_cuda(one)
    assert_released(slabs, threads)
    one.shutdown()


def _register_on_cuda(one: WorkerSide) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    one._config = parse_config({"cpu": {"capacity": "1MiB", "pin": "off"}})
    one.register(registration(), "cuda", [])


def test_what_could_be_set_up_stays(tmp_path: Path, slabs: list[HostSlab]) -> None:
    """The control: the same without the fault."""
    threads = set(threading.enumerate())
    one = worker()
    one.register(registration(), "cpu", [file_tier(tmp_path / "a")])
    slabs[0].slot(0)[:] = 1
    assert one.handshake() is not None
    one.shutdown()
    assert_released(slabs, threads)
