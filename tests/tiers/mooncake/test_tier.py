"""The tier on a real Mooncake store: the contract, sharing, damage, and a master that dies."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.ports import free_port
from tests.patience import PATIENCE_S
from tests.tiers.mooncake.interrupting_proxy import InterruptingProxy
from tests.tiers.mooncake.real_store import (
    Master,
    OneClient,
    ReplaceableStore,
    one_store,
    record_name,
    replaceable_stores,
    skip_without_mooncake,
    time_out_soon,
)
from tiers.base import ReadOutcome, TierIoError, WriteOutcome
from tiers.mooncake import bounce_buffers as bounce_buffers
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.bounce_buffers import BUFFER_BYTES
from tiers.mooncake.client import HEADERS_BYTES, MooncakeClient, MooncakeSettings
from tiers.mooncake.tier import MooncakeTier
from tiers.record import HEADER_BYTES
from tiers.testing import (
    OK,
    TierContract,
    aligned,
    assert_holds,
    assert_misses,
    fetch,
    key_of,
    payload_of,
    put,
)

skip_without_mooncake()

SIZE = 64 * 1024
LARGE = 4 << 20
KEYS = [key_of(n) for n in range(40)]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    made = Master(tmp_path_factory.mktemp("master") / "log")
    made.start()
    yield made
    made.kill()


def namespace_of(folder: Path) -> bytes:
    """A separate namespace for each test, because tests share the master."""
    return hashlib.blake2b(str(folder).encode(), digest_size=16).digest()


@asynccontextmanager
async def opened(settings: MooncakeSettings, folder: Path, **options: Any) -> AsyncIterator[Any]:
    options = {"namespace": namespace_of(folder)} | options
    tier = MooncakeTier(settings, **options)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.aclose()


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[Any]:
    with one_store(master) as joined:
        yield joined


@pytest.mark.usefixtures("_for_the_class")
class TestContract(TierContract):
    is_listed = False

    @pytest.fixture
    def _for_the_class(self, master: Master, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master = master
        monkeypatch.setattr(mooncake_client, "join_store", lambda _settings: OneClient(store))

    def make_tier(self, folder: Path, capacity_bytes: int) -> MooncakeTier:
        settings = self.master.settings(4 * capacity_bytes)
        return MooncakeTier(settings, namespace=namespace_of(folder))


async def test_engines_find_each_others_records(master: Master, tmp_path: Path) -> None:
    async with (
        opened(master.settings(), tmp_path) as one,
        opened(master.settings(0), tmp_path) as other,
    ):
        assert await put(one, KEYS[::2], SIZE) == [OK] * 20
        assert await other.present(KEYS) == [n % 2 == 0 for n in range(40)]
        assert await other.present([]) == []
        await assert_holds(other, KEYS[::2], SIZE)
        await assert_misses(other, KEYS[1::2], SIZE)
        await other.delete(KEYS[:4])
        assert (await one.present(KEYS))[:6] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    "different", [{"namespace": b"x" * 16}, {"rank": 1}, {"epoch": 3}], ids=lambda d: next(iter(d))
)
async def test_engines_with_another_identity_find_nothing(
    master: Master, tmp_path: Path, different: dict[str, Any]
) -> None:
    async with (
        opened(master.settings(), tmp_path) as one,
        opened(master.settings(0), tmp_path, **different) as other,
    ):
        await put(one, KEYS[:3], SIZE)
        assert await other.present(KEYS[:3]) == [False] * 3
        await assert_misses(other, KEYS[:3], SIZE)


async def test_a_reset_separates_an_engine_from_the_others(master: Master, tmp_path: Path) -> None:
    async with (
        opened(master.settings(), tmp_path) as one,
        opened(master.settings(0), tmp_path) as other,
    ):
        await put(one, KEYS[:3], SIZE)
        await one.reset(99)
        assert await one.present(KEYS[:3]) == [False] * 3
        await assert_holds(other, KEYS[:3], SIZE)
        new = payload_of(KEYS[0], SIZE, version=1)
        assert await one.write(KEYS[:1], [new]) == [OK]
        outcome, data = await fetch(other, KEYS[0], SIZE)
        assert outcome is ReadOutcome.OK
        assert np.array_equal(data, payload_of(KEYS[0], SIZE)), "records of its current weights"


async def test_payloads_are_written_from_the_slab_without_a_copy(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes do not copy payloads: only the slab, and for each thread a bounce buffer for reads and
    one for headers are registered. All of this happens when the tier opens, because a registration
    can fail for some seconds."""
    slab = np.zeros(32 * SIZE, np.uint8)
    memory = range(slab.ctypes.data, slab.ctypes.data + slab.nbytes)
    registered: list[int] = []
    register = MooncakeClient._register

    def noted(self: Any, address: int, nbytes: int) -> None:
        registered.append(nbytes)
        register(self, address, nbytes)

    monkeypatch.setattr(MooncakeClient, "_register", noted)
    async with opened(master.settings(), tmp_path, memory=memory, threads=3) as tier:
        expected = [slab.nbytes, *[BUFFER_BYTES + HEADERS_BYTES, HEADERS_BYTES] * 3]
        assert registered == expected
        slots = [slab[n * SIZE : (n + 1) * SIZE] for n in range(32)]
        for key, slot in zip(KEYS, slots[:16], strict=False):
            slot[:] = payload_of(key, SIZE)
        assert await tier.write(KEYS[:16], slots[:16]) == [OK] * 16
        for _ in range(2):
            slab[16 * SIZE :] = 0
            assert await tier.read(KEYS[:16], slots[16:]) == [ReadOutcome.OK] * 16
            assert np.array_equal(slab[: 16 * SIZE], slab[16 * SIZE :])
        assert registered == expected, "what was registered after the tier had opened"


class GivesUp(ReplaceableStore):
    """A store that abandons each read, and records the buffers that the reads used."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.used: list[int] = []

    def batch_get_into_multi_buffers(self, names: list[str], at: Any, sizes: Any) -> list[int]:
        self.used += [address for places in at for address in places]
        return [-800] * len(names)


async def test_the_buffer_of_an_abandoned_transfer_is_never_reused(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the abandoned transfer may still arrive. Nothing is transferred directly into a
    slot; a call that failed quickly has ended."""
    slab = np.zeros(32 * SIZE, np.uint8)
    memory = range(slab.ctypes.data, slab.ctypes.data + slab.nbytes)
    slots = [slab[n * SIZE : (n + 1) * SIZE] for n in range(16)]
    stores = replaceable_stores(monkeypatch)
    async with opened(master.settings(), tmp_path, memory=memory) as tier:
        assert await put(tier, KEYS[:16], SIZE) == [OK] * 16
        [store] = stores
        store.now = gives_up = GivesUp(store.real)
        for _ in range(2):
            assert set(await tier.read(KEYS[:16], slots)) == {ReadOutcome.BUSY}
        assert len(set(gives_up.used)) == 2 * 16, "a call that failed quickly has ended"
        monkeypatch.setattr(bounce_buffers, "GIVEN_UP_AFTER_S", 0.0)
        gives_up.used.clear()
        for _ in range(3):
            assert set(await tier.read(KEYS[:16], slots)) == {ReadOutcome.BUSY}
        assert len(set(gives_up.used)) == 3 * 2 * 16, "headers and payloads"
        assert not [address for address in gives_up.used if address in memory]
        store.now = store.real
        assert await tier.read(KEYS[:16], slots) == [ReadOutcome.OK] * 16
        for key, slot in zip(KEYS, slots, strict=False):
            assert np.array_equal(slot, payload_of(key, SIZE))
        store.now = gives_up
        monkeypatch.setattr(bounce_buffers, "GIVEN_UP_MAX", 40 * SIZE)
        with pytest.raises(TierIoError, match="were abandoned"):
            await tier.read(KEYS[:16], slots)
        store.now = store.real


class ComesLate(ReplaceableStore):
    """A store that abandons the first transfer, which continues just when the next one has
    ended."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._given_up: Any = None

    def batch_get_into_multi_buffers(self, *call: Any) -> list[int]:
        return self._late(self.real.batch_get_into_multi_buffers, call)

    def batch_put_from_multi_buffers(self, *call: Any) -> list[int]:
        return self._late(self.real.batch_put_from_multi_buffers, call)

    def _late(self, transfer: Any, call: Any) -> list[int]:
        if self._given_up is None:
            self._given_up = call
            return [-800] * len(call[0])
        codes: list[int] = transfer(*call)
        assert transfer(*self._given_up) != [-800], "the late transfer arrives"
        return codes


async def test_late_bytes_of_a_read_damage_no_other_read(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late bytes affect neither the payload nor the header of another read; otherwise healthy
    records would be removed for all engines."""
    monkeypatch.setattr(bounce_buffers, "GIVEN_UP_AFTER_S", 0.0)
    stores = replaceable_stores(monkeypatch)
    async with opened(master.settings(), tmp_path, threads=1) as tier:
        assert await put(tier, KEYS[:4], SIZE) == [OK] * 4
        [store] = stores
        store.now = ComesLate(store.real)
        assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.BUSY
        await assert_holds(tier, KEYS[2:4], SIZE)
        store.now = store.real
        await assert_holds(tier, KEYS[:4], SIZE)


async def test_a_write_that_continues_late_has_its_own_header(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce_buffers, "GIVEN_UP_AFTER_S", 0.0)
    stores = replaceable_stores(monkeypatch)
    async with opened(master.settings(), tmp_path, threads=1) as tier:
        [store] = stores
        store.now = ComesLate(store.real)
        assert await put(tier, KEYS[:2], SIZE) == [WriteOutcome.FAILED] * 2
        assert await put(tier, KEYS[2:4], SIZE) == [OK] * 2
        store.now = store.real
        await assert_holds(tier, KEYS[:4], SIZE)


async def test_damage_is_detected_and_can_be_removed(
    master: Master, store: Any, tmp_path: Path
) -> None:
    async with opened(master.settings(), tmp_path) as tier:
        await put(tier, KEYS[:2], SIZE)
        name = record_name(KEYS[0], namespace=namespace_of(tmp_path))
        bad = bytearray(store.get(name))
        bad[HEADER_BYTES + 777] ^= 4
        assert store.remove(name, True) == 0
        assert store.put(name, bytes(bad)) == 0
        assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.CORRUPT
        assert await put(tier, KEYS[:1], SIZE) == [OK]
        assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.CORRUPT, (
            "the record must stay unchanged"
        )
        await tier.delete(KEYS[:1])
        assert await put(tier, KEYS[:1], SIZE) == [OK]
        await assert_holds(tier, KEYS[:2], SIZE)


async def test_swapped_records_are_not_mistaken_for_each_other(
    master: Master, store: Any, tmp_path: Path
) -> None:
    async with opened(master.settings(), tmp_path) as tier:
        await put(tier, KEYS[:2], SIZE)
        names = [record_name(key, namespace=namespace_of(tmp_path)) for key in KEYS[:2]]
        one, two = (store.get(name) for name in names)
        for name, data in zip(names, (two, one), strict=True):
            assert store.remove(name, True) == 0
            assert store.put(name, data) == 0
        for key in KEYS[:2]:
            assert (await fetch(tier, key, SIZE))[0] is ReadOutcome.CORRUPT


async def test_the_store_evicts_by_itself(master: Master, tmp_path: Path) -> None:
    """Three times as much is stored as the segments can hold, and then more, until an old record
    has been evicted and the newest record was stored. Evicted records are misses, the others are
    right. The master evicts in the background, and requested records count as new."""
    with Master(tmp_path / "log") as own:
        async with opened(own.settings(32 << 20), tmp_path) as tier:
            keys: list[bytes] = []
            is_enough = False
            async with asyncio.timeout(PATIENCE_S):
                while not is_enough:
                    keys.append(key_of(1000 + len(keys)))
                    [stored] = await put(tier, keys[-1:], 1 << 20)
                    assert stored in (OK, WriteOutcome.FULL, WriteOutcome.FAILED)
                    if len(keys) >= 96 and stored is OK:
                        is_enough = await tier.present([keys[-96]]) == [False]
            found = {}
            for key in reversed(keys):
                outcome, data = await fetch(tier, key, 1 << 20)
                found[key] = outcome
                assert outcome in (ReadOutcome.OK, ReadOutcome.MISS)
                if outcome is ReadOutcome.OK:
                    assert np.array_equal(data, payload_of(key, 1 << 20))
            assert found[keys[-1]] is ReadOutcome.OK
            assert found[keys[-96]] is ReadOutcome.MISS


async def test_a_missing_master_is_reported_at_once() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    settings = MooncakeSettings(nobody, f"http://{nobody}/metadata", 16 << 20)
    with pytest.raises(TierIoError, match=nobody):
        await MooncakeTier(settings).open()


READ, WRITE = "batch_get_into_multi_buffers", "batch_put_from_multi_buffers"


class Transfers:
    """A store that lets a proxy kill the master in the middle of a transfer."""

    def __init__(self, store: Any, proxy: InterruptingProxy) -> None:
        self._store = store
        self._proxy = proxy
        self._lock = threading.Lock()
        self._method = ""
        self._began = threading.Event()
        self.interrupted: dict[str, list[int]] = {}
        """The codes of the calls into which the master was killed, by method."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, *call: Any) -> list[int]:
        return self._transfer("batch_put_from_multi_buffers", *call)

    def batch_get_into_multi_buffers(self, *call: Any) -> list[int]:
        return self._transfer("batch_get_into_multi_buffers", *call)

    def _transfer(self, method: str, names: list[str], *parts: Any) -> list[int]:
        with self._lock:
            is_chosen = self._method == method
            if is_chosen:
                self._method = ""
                self._proxy.expect(names[0])
                self._began.set()
        codes: list[int] = getattr(self._store, method)(names, *parts)
        if is_chosen:
            self.interrupted[method] = codes
        return codes

    def kill_into(self, method: str) -> None:
        """Kill the master in the middle of a call of this method."""
        self._began.clear()
        self._method = method
        assert self._began.wait(PATIENCE_S), f"{method} is never called"
        self._proxy.wait_until_killed()


BROKEN_WRITE = "Batch finalization RPC failed"
"""Mooncake's log line for a write whose bytes were transferred: the master had allocated their
memory, and was gone when the write ended."""


@dataclass
class Load:
    """Writes and reads large records until it is stopped; no read may be wrong."""

    failures: int = 0
    served: int = 0
    losses: int = 0
    is_over: bool = False

    async def run(self, tier: MooncakeTier, number: int) -> None:
        keys = [key_of(10_000 * number + n) for n in range(6)]
        payloads = [payload_of(key, LARGE) for key in keys]
        while not self.is_over:
            into = [aligned(LARGE) for _ in keys]
            try:
                await tier.delete(keys)
                assert set(await tier.write(keys, payloads)) <= set(WriteOutcome)
                await tier.present(keys)
                outcomes = await tier.read(keys, into)
            except TierIoError:
                self.failures += 1
                await asyncio.sleep(0.01)
                continue
            for outcome, data, right in zip(outcomes, into, payloads, strict=True):
                if outcome is ReadOutcome.OK:
                    self.served += 1
                    assert np.array_equal(data, right)

    def lost(self) -> None:
        self.losses += 1


async def test_a_master_killed_and_restarted_under_load(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master is killed in the middle of a read and of a write. No call hangs, and none returns
    a wrong result; when the master is back, empty, the tier reports the loss and works."""
    load = Load()
    stores = replaceable_stores(monkeypatch)
    with Master(tmp_path / "log") as master, InterruptingProxy(master) as proxy:
        settings = replace(master.settings(), master=proxy.address)
        async with opened(settings, tmp_path) as tier:
            tier.on_loss(load.lost)
            stores[0].now = watched = Transfers(stores[0].real, proxy)
            loads = [asyncio.create_task(load.run(tier, n)) for n in (1, 2, 3)]
            try:
                for method in (READ, WRITE):
                    await _grown(load, "served", 20, loads)
                    await asyncio.to_thread(watched.kill_into, method)
                    await _grown(load, "failures", 20, loads)
                    master.start()
                    await _grown(load, "losses", 1, loads)
                await _grown(load, "served", 20, loads)
            finally:
                load.is_over = True
                await asyncio.gather(*loads)
    assert all(code > LARGE for code in watched.interrupted[READ]), (
        "the master had returned all locations by then"
    )
    assert all(code < 0 for code in watched.interrupted[WRITE]), (
        "the write ended without the master"
    )
    assert BROKEN_WRITE in capfd.readouterr().err, "the write was not interrupted by the kill"


async def test_a_master_that_stalls_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random moments of reads and writes, the master accepts connections but does not respond;
    then it continues. No call waits for it for long, none returns a wrong result, and closing the
    tier during a stall takes a bounded time."""
    time_out_soon(monkeypatch)
    rng = random.Random(1)
    load = Load()
    with Master(tmp_path / "log") as master:
        async with opened(master.settings(), tmp_path) as tier:
            tier.on_loss(load.lost)
            loads = [asyncio.create_task(load.run(tier, n)) for n in (1, 2, 3)]
            try:
                for _ in range(4):
                    await _grown(load, "served", 20, loads)
                    await asyncio.sleep(rng.random() * 0.1)
                    master.stop()
                    await _grown(load, "failures", 3, loads)
                    master.resume()
                    await _grown(load, "losses", 1, loads)
                await _grown(load, "served", 20, loads)
                master.stop()
                await _grown(load, "failures", 3, loads)
            finally:
                load.is_over = True
                await asyncio.gather(*loads)
            async with asyncio.timeout(PATIENCE_S):
                await tier.aclose()
            master.resume()


async def _grown(load: Load, counter: str, by: int, loads: list[asyncio.Task[None]]) -> None:
    """Wait until a counter has grown by this much."""
    wanted = getattr(load, counter) + by
    await _until(lambda: getattr(load, counter) >= wanted, loads)


async def _until(is_so: Callable[[], bool], loads: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            for task in loads:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
