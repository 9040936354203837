"""A worker releases everything that it has set up when a later step of the set-up fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.config.schema import TierConfig, parse_config
from offload.connector.worker import worker_side
from offload.connector.worker.worker_side import OPEN_TIMEOUT, WorkerSide
from offload.errors import ConfigError, TierUnavailableError
from offload.layout.registration import GroupCaches, Registration, register_kv_caches
from offload.namespaces.manifest import Namespace
from offload.worker import idle_scrub, rank_memory
from offload.worker.tier_factory import TierSpec, scrub_limits
from tests.offload.cli.rank_folders import flip
from tests.offload.small_model import BLOCKS, kv_caches
from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT, TierInfo, WriteOutcome
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.index import extents_of
from tiers.lmdb.tier import LmdbTier
from tiers.slab.slab import HostSlab, SlabError
from tiers.testing import put
from tiers.testing.memory_tier import MemoryTier

NAMESPACE = b"n" * 16


def registration() -> Registration:
    layers = {name: kv_caches()[name] for name in ("layers.0", "layers.1")}
    return register_kv_caches(BLOCKS, [GroupCaches(0, 1, layers)])


def file_tier(folder: Path) -> TierSpec:
    config = TierConfig("file", str(folder), 1 << 24)
    return TierSpec("$.tiers", "file", config, folder, 1 << 24, NAMESPACE, 0, 1)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[HostSlab]:
    """Every slab that a worker creates."""
    made: list[HostSlab] = []

    def make(*arguments: Any, **options: Any) -> HostSlab:
        made.append(HostSlab(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(rank_memory, "HostSlab", make)
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
        thread.join(PATIENCE_S)  # a loop's own pool ends without being joined
    assert not [thread for thread in left if thread.is_alive()]


def test_a_tier_that_does_not_open_leaves_nothing_behind(
    tmp_path: Path, slabs: list[HostSlab]
) -> None:
    threads = set(threading.enumerate())
    (tmp_path / "file").write_text("not a folder")
    one = worker()
    with pytest.raises(TierUnavailableError):
        one.register(registration(), [file_tier(tmp_path / "a"), file_tier(tmp_path / "file")])
    assert_released(slabs, threads)
    assert one.state() is None
    one.shutdown()


class HeldTier(MemoryTier):
    """Opens when ``is_ready`` says so."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        super().__init__(1 << 20)
        self._is_ready = is_ready

    async def open(self) -> TierInfo:
        while not self._is_ready():  # noqa: ASYNC110  # set by another thread
            await asyncio.sleep(0.001)
        return await super().open()


def test_a_tier_that_never_opens_is_reported(
    tmp_path: Path, slabs: list[HostSlab], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    monkeypatch.setenv(OPEN_TIMEOUT, "0.05")
    one = worker()
    spec = replace(file_tier(tmp_path), make=lambda: HeldTier(lambda: False))
    with pytest.raises(TierUnavailableError, match=f"{tmp_path}.* increase {OPEN_TIMEOUT}"):
        one.register(registration(), [spec])
    assert_released(slabs, threads)


def test_a_tier_that_opens_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_side, "OPEN_WARNING_S", 0.01)
    one = worker()
    spec = replace(file_tier(tmp_path), make=lambda: HeldTier(lambda: "still" in caplog.text))
    one.register(registration(), [spec])
    assert f"still opening $.tiers ({tmp_path})" in caplog.text
    assert one.state() is not None
    one.shutdown()


def test_only_the_tier_that_is_opening_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first tier is open, and the second one waits for its disk."""
    monkeypatch.setattr(worker_side, "OPEN_WARNING_S", 0.01)
    one = worker()
    slow = replace(
        file_tier(tmp_path / "slow"),
        where="$.tiers[1]",
        make=lambda: HeldTier(lambda: "$.tiers[1]" in caplog.text),
    )
    one.register(registration(), [file_tier(tmp_path / "quick"), slow])
    assert f"still opening $.tiers[1] ({tmp_path / 'slow'});" in caplog.text
    assert not [line for line in caplog.messages if "quick" in line and "slow" in line]
    one.shutdown()


def test_a_store_is_named_by_its_address() -> None:
    table = {"type": "mooncake", "master": "10.0.0.1:50051"}
    config = parse_config({"cpu": {"capacity": "1MiB"}, "tiers": [table]})
    spec = TierSpec("$.tiers[0]", "mooncake", config.tiers[0], Path(), 0, NAMESPACE, 0, 0)
    assert spec.description == "$.tiers[0] (10.0.0.1:50051)"


def test_a_share_that_is_too_small_is_reported_with_its_place(
    tmp_path: Path, slabs: list[HostSlab]
) -> None:
    """Other servers' data below the path is seen only when the path is claimed."""
    threads = set(threading.enumerate())
    one = worker()
    config = TierConfig("lmdb", str(tmp_path), 1 << 24)
    spec = TierSpec("$.tiers[1]", "lmdb", config, tmp_path, 1 << 20, NAMESPACE, 0, 1)
    with pytest.raises(ConfigError) as raised:
        one.register(registration(), [spec])
    [problem] = raised.value.problems
    assert problem.where == "$.tiers[1].capacity"
    assert "leaves no space for records" in problem.what
    assert_released(slabs, threads)
    one.shutdown()


def test_an_engine_that_cannot_be_created_leaves_nothing_behind(slabs: list[HostSlab]) -> None:
    threads = set(threading.enumerate())
    one = worker()
    # The KV cache is on a device for which this machine has no driver.
    with pytest.raises(Exception, match="CUDA"):
        _register_on_cuda(one)
    assert_released(slabs, threads)
    one.shutdown()


def _register_on_cuda(one: WorkerSide) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    one._config = parse_config({"cpu": {"capacity": "1MiB", "pin": "off"}})
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    one.register(replace(registration(), tensors=(on_cuda,)), [])


def test_a_successful_set_up_stays(tmp_path: Path, slabs: list[HostSlab]) -> None:
    """The control: the same without the fault."""
    threads = set(threading.enumerate())
    one = worker()
    one.register(registration(), [file_tier(tmp_path / "a")])
    slabs[0].slot(0)[:] = 1
    assert one.state() is not None
    one.shutdown()
    assert_released(slabs, threads)


def filled(path: Path, keys: list[bytes], size: int) -> list[int]:
    """A closed LMDB tier with these records, and the offsets of their payloads in its file."""

    async def fill() -> list[int]:
        tier = LmdbTier(path, 1 << 24, namespace=NAMESPACE, record_bytes=size, reserve_bytes=0)
        await tier.open()
        assert set(await put(tier, keys, size)) == {WriteOutcome.OK}
        values = [tier._contents.records.get(key) or b"" for key in keys]
        await tier.aclose()
        return [extents_of(value)[0].start * ALIGNMENT for value in values]

    return asyncio.run(fill())


@pytest.mark.parametrize("scrub", ["idle", "off"])
def test_an_idle_worker_finds_damage_and_reports_it(
    tmp_path: Path, scrub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request reads the record."""
    monkeypatch.setattr(idle_scrub, "QUIET_S", 0.01)
    folder, size = tmp_path / "rank-0", 8192
    keys = [bytes([n]) * 32 + bytes(4) for n in range(20)]
    places = filled(folder, keys, size)
    flip(folder / PAYLOAD_NAME, places[7] + 99)
    table = {"type": "lmdb", "path": str(tmp_path), "capacity": "16MiB", "scrub_rate": "1GiB"}
    config = parse_config({"cpu": {"capacity": "1MiB"}, "tiers": [table | {"scrub": scrub}]})
    spec = TierSpec("$.tiers[0]", "lmdb", config.tiers[0], folder, 1 << 24, NAMESPACE, 0, 0)
    one = WorkerSide(config, 0, 1, NAMESPACE.hex())
    one.register(registration(), [spec])
    damaged: frozenset[bytes] = frozenset()
    counted: dict[str, float] = {}
    while scrub == "idle" and counted.get("scrubbed_records:0", 0) < len(keys):
        for seen in one.drain(idle=True).report.tiers.values():
            damaged |= seen.damaged
        for name, value in one.counters({}).items():
            counted[name] = counted.get(name, 0) + value
    for seen in one.drain(idle=True).report.tiers.values():  # found after the last drain
        damaged |= seen.damaged
    one.shutdown()
    if scrub == "off":
        assert scrub_limits(config, 1) == {}
        return
    assert damaged == {keys[7]}
    assert counted["scrubbed_bytes:0"] == len(keys) * size
    assert counted["scrub_damaged:0"] == counted["corrupt_records:0"] == 1

    async def count() -> int:
        tier = LmdbTier(folder, 1 << 24, namespace=NAMESPACE, record_bytes=size, reserve_bytes=0)
        found = (await tier.open()).record_count
        await tier.aclose()
        return found

    assert asyncio.run(count()) == len(keys) - 1
