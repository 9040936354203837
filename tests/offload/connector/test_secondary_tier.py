"""Our LMDB tier below vLLM's own tiering: vLLM's real manager and factory, a real LMDB, real
bytes."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from offload.connector import secondary_tier
from offload.connector.secondary_tier import LmdbSecondaryTier, _folder_and_namespace
from offload.errors import TierUnavailableError
from offload.namespaces import wait_for_owners
from tests.offload.connector.model.tiny_configs import change_later, config_of, make_model
from tests.patience import PATIENCE_S
from tests.threads import no_thread_is_left
from tiers.base import TierIoError
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.tier import LmdbTier

CHUNKS = 4
ROW = 8192
KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(12)]


def spec_of(model: str = "some/model", engine: str = "engine") -> Any:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    config = OffloadingConfig(
        (OffloadingGroupConfig(16, ("layer",), 0),),
        ROW,
        False,
        {},
        engine,
        OffloadingModelConfig(model, "float16"),
        OffloadingCacheConfig(16, 1),
        parallel,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class Region:
    """The memory of vLLM's CPU tier, without a GPU to pin it for."""

    def __init__(self) -> None:
        self.rows = np.zeros((CHUNKS, ROW), np.int8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)

    def cleanup(self) -> None:
        pass


class VllmTiering:
    """vLLM's tiering manager over four chunks of memory and our tier."""

    def __init__(self, path: Path, model: str = "some/model", **options: Any) -> None:
        self.region = Region()
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region)  # type: ignore[arg-type]  # its memory only
        entry = {
            "type": "LmdbSecondaryTier",
            "module_path": "offload.connector.secondary_tier",
            "path": str(path),
            "capacity": "16MiB",
            **options,
        }
        view = primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(entry, view, spec_of(model))
        assert isinstance(self.tier, LmdbSecondaryTier)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Step until all transfers have ended."""
        end = time.monotonic() + PATIENCE_S
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "transfers did not end"
            self.step()

    def reset(self) -> None:
        """Reset as vLLM does, after its workers have reported the transfers in progress: 0.33
        promotes nothing in between."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def store(self, key: bytes, content: int) -> None:
        """Put the bytes that a GPU would have stored into the primary tier's chunk, and then store
        them in the lower tier."""
        context = self.request()
        stored = self.manager.prepare_store([key], context)
        assert stored is not None
        assert list(stored.keys_to_store) == [key]
        self.region.rows[stored.store_spec.chunk_ids[0]] = content
        self.manager.complete_store([key], context)
        self.manager.on_request_finished(context)
        self.settle()

    def load(self, key: bytes) -> np.ndarray[Any, Any] | None:
        """The bytes of a chunk, promoted if necessary; ``None`` for a miss."""
        context = self.request()
        end = time.monotonic() + PATIENCE_S
        while (found := self.manager.lookup(key, context)) is not LookupResult.HIT:
            if found is LookupResult.MISS:
                self.manager.on_request_finished(context)
                return None
            assert time.monotonic() < end, "the promotion did not end"
            self.step()
        spec = self.manager.prepare_load([key], context)
        data = self.region.rows[spec.chunk_ids[0]].copy()
        self.manager.complete_load([key], context)
        self.manager.on_request_finished(context)
        return data


@contextmanager
def world_at(path: Path, model: str = "some/model", **options: Any) -> Iterator[VllmTiering]:
    world = VllmTiering(path, model, **options)
    try:
        yield world
    finally:
        world.manager.shutdown()
        assert not [t for t in threading.enumerate() if t.name.startswith("kvtiers-secondary")]


def holds(world: VllmTiering, numbers: range) -> None:
    for number in numbers:
        data = world.load(KEYS[number])
        assert data is not None, f"chunk {number} is a miss"
        assert (data == number + 1).all(), f"chunk {number} has other bytes"


def test_chunks_that_left_the_primary_tier_are_restored_even_after_a_restart(
    tmp_path: Path,
) -> None:
    with world_at(tmp_path / "kv") as world:
        for number in range(12):
            world.store(KEYS[number], number + 1)
        holds(world, range(12))
    with world_at(tmp_path / "kv") as world:
        holds(world, range(12))
    with world_at(tmp_path / "kv", model="another/model") as world:
        assert world.load(KEYS[0]) is None


def test_damage_is_a_miss(tmp_path: Path) -> None:
    with world_at(tmp_path / "kv") as world:
        for number in range(12):
            world.store(KEYS[number], number + 1)
    (payloads,) = (tmp_path / "kv").glob(f"vllm-*/{PAYLOAD_NAME}")
    data = bytearray(payloads.read_bytes())
    at = data.index(bytes([1]) * ROW)
    data[at + 100] ^= 1
    payloads.write_bytes(data)
    with world_at(tmp_path / "kv") as world:
        assert world.load(KEYS[0]) is None
        holds(world, range(1, 12))


def placed(root: Path, config: VllmConfig) -> tuple[Path, bytes]:
    """The folder of the tier of an engine with this configuration, which vLLM does not pass to the
    tier."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    return _folder_and_namespace(root, spec_of(config.model_config.model, transfer.engine_id), ROW)


def test_everything_that_decides_what_is_computed_decides_the_folder(tmp_path: Path) -> None:
    """Other weights under the same name, and flags that vLLM does not pass to a tier."""
    model = make_model(tmp_path / "model")
    before = placed(tmp_path / "kv", config_of(model, engine="first"))
    assert placed(tmp_path / "kv", config_of(model, engine="second")) == before
    eager = placed(tmp_path / "kv", config_of(model, engine="third", enforce_eager=True))
    (model / "model.safetensors").write_bytes(b"new")
    after = placed(tmp_path / "kv", config_of(model, engine="fourth"))
    assert len({before[0], eager[0], after[0]}) == 3
    assert len({before[1], eager[1], after[1]}) == 3


@pytest.mark.parametrize("why", ["no configuration", "adapters", "no weights"])
def test_without_a_known_identity_the_blocks_are_for_one_engine(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's hashes identify adapters only by name and path."""
    model = make_model(tmp_path / "model")
    if why == "no weights":
        (model / "model.safetensors").unlink()
    configs = [
        config_of(model, engine=f"{why} {number}", enable_lora=why == "adapters")
        for number in range(2)
    ]
    if why == "no configuration":
        names = ["nobody", "nobody else"]
        found = [
            _folder_and_namespace(tmp_path / "kv", spec_of(str(model), name), ROW) for name in names
        ]
    else:
        found = [placed(tmp_path / "kv", config) for config in configs]
    assert found[0] != found[1]
    assert "stored blocks are not used after a restart" in caplog.text


def test_weights_that_change_during_a_start_are_for_this_start(tmp_path: Path) -> None:
    """Even if the user gives every start the same ``engine_id``."""
    model = make_model(tmp_path / "model")

    def start(weights: bytes) -> tuple[Path, bytes]:
        config = config_of(model, engine="one name")
        change_later(model / "model.safetensors", lambda file: file.write_bytes(weights))
        found = placed(tmp_path / "kv", config)
        config.kv_transfer_config = None  # so that the next start does not find it
        return found

    assert start(b"one") != start(b"two")
    settled = placed(tmp_path / "kv", config_of(model, engine="one name"))
    assert settled not in (start(b"three"), start(b"four"))


def test_a_reset_discards_records_permanently(tmp_path: Path) -> None:
    with world_at(tmp_path / "kv") as world:
        for number in range(6):
            world.store(KEYS[number], number + 1)
        world.reset()
        assert all(world.load(KEYS[number]) is None for number in range(6))
        world.store(KEYS[7], 77)
    with world_at(tmp_path / "kv") as world:
        assert all(world.load(key) is None for key in KEYS), (
            "the weights are those of the files again"
        )


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_failed_reset_disables_the_tier(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's thread gets no exception and waits within a bound; nothing old is found."""

    async def reset(_tier: LmdbTier, _epoch: int) -> None:
        if how == "fails":
            raise TierIoError("no space left")
        await asyncio.Event().wait()

    with world_at(tmp_path / "kv") as world:
        for number in range(6):
            world.store(KEYS[number], number + 1)
        with monkeypatch.context() as patched:
            patched.setattr(secondary_tier, "RESET_TIMEOUT_S", 0.2)
            patched.setattr(LmdbTier, "reset", reset)
            world.reset()
            assert "delete" in caplog.text
            for number in range(6, 12):
                world.store(KEYS[number], 99)  # the last ones stay in vLLM's own tier
            assert all(world.load(key) is None for key in KEYS[:8])
        world.reset()
        assert all(world.load(key) is None for key in KEYS)
        for number in range(12):
            world.store(KEYS[number], number + 1)
        holds(world, range(12))


def test_a_reset_waits_for_transfers_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reuses their memory when the reset has returned."""
    gate, real = threading.Event(), LmdbTier.write
    monkeypatch.setattr(secondary_tier, "DRAIN_WARNING_S", 0.01)

    async def write(tier: LmdbTier, *arguments: Any) -> Any:
        await asyncio.to_thread(gate.wait, PATIENCE_S)
        return await real(tier, *arguments)

    with world_at(tmp_path / "kv") as world:
        context = world.request()
        monkeypatch.setattr(LmdbTier, "write", write)
        assert world.manager.prepare_store(KEYS[:1], context) is not None
        world.manager.complete_store(KEYS[:1], context)
        world.step()
        resetting = threading.Thread(target=world.reset)
        resetting.start()
        while "is waiting for 1 transfers" not in caplog.text:
            assert resetting.is_alive()
            time.sleep(0.01)
        gate.set()
        resetting.join(PATIENCE_S)
        assert not resetting.is_alive()
        assert world.load(KEYS[0]) is None


def test_a_tier_that_cannot_be_reset_at_its_start_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_at(tmp_path / "kv") as world:
        world.store(KEYS[0], 1)
        world.reset()

    async def fail(_tier: LmdbTier, _epoch: int) -> None:
        raise TierIoError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbTier, "reset", fail)
        with no_thread_is_left(), pytest.raises(TierUnavailableError, match="no space left"):
            VllmTiering(tmp_path / "kv")
    with world_at(tmp_path / "kv") as world:
        assert world.load(KEYS[0]) is None


def test_a_tier_that_does_not_open_in_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_tier: LmdbTier) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(secondary_tier, "SECONDARY_OPEN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(LmdbTier, "open", hang)
    with no_thread_is_left(), pytest.raises(TierUnavailableError, match=r"within 0\.01 s"):
        VllmTiering(tmp_path / "kv")


def test_the_capacity_is_kept_and_recently_used_chunks_stay(tmp_path: Path) -> None:
    source = random.Random(0)
    keys = [make_offload_key(source.randbytes(32), 0) for _ in range(800)]
    with world_at(tmp_path / "kv", capacity="4MiB") as world:  # which has space for 240
        for start in range(0, len(keys), CHUNKS):
            context = world.request()
            part = keys[start : start + CHUNKS]
            stored = world.manager.prepare_store(part, context)
            assert stored is not None
            world.manager.complete_store(part, context)
            world.manager.on_request_finished(context)
            world.settle()
            if start % 100 == 0:
                assert world.load(keys[0]) is not None
        files = [file for file in (tmp_path / "kv").rglob("*") if file.is_file()]
        assert sum(file.stat().st_blocks * 512 for file in files) <= 4 << 20
        assert world.load(keys[1]) is None
        assert world.load(keys[-1]) is not None


def test_a_server_waits_for_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubernetes and systemd can start a server while its predecessor writes its last blocks."""
    previous = VllmTiering(tmp_path / "kv")
    previous.store(KEYS[0], 1)

    def end_it(record: logging.LogRecord) -> bool:
        if "for it to end" in record.getMessage():
            previous.manager.shutdown()
        return True

    caplog.handler.addFilter(end_it)
    try:
        with world_at(tmp_path / "kv") as world:
            holds(world, range(1))
    finally:
        caplog.handler.removeFilter(end_it)
    assert "is in use by process" in caplog.text


def test_a_second_server_gets_the_reason_for_its_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_for_owners, "OWNERS_WAIT_S", 0.01)
    refused = pytest.raises(TierUnavailableError, match="kvtiers: LmdbSecondaryTier at ")
    with world_at(tmp_path / "kv"), refused as error:
        VllmTiering(tmp_path / "kv")
    assert str(tmp_path) in str(error.value)
