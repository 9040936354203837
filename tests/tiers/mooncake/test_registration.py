"""Memory is registered with the store when a tier opens, however late the metadata server answers;
a store without such a server works as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.mooncake.real_store import Master, skip_without_mooncake, time_out_soon
from tiers.base import ReadOutcome, TierIoError
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.client import MooncakeClient, MooncakeSettings
from tiers.mooncake.tier import MooncakeTier
from tiers.testing import OK, aligned, assert_holds, key_of, put

skip_without_mooncake()

SIZE = 64 * 1024
KEYS = [key_of(n) for n in range(20)]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path / "log") as made:
        yield made


def stop_when_joined(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the master, and with it the metadata server, hang as soon as a client has joined."""
    join = mooncake_client.join_store

    def joined(settings: MooncakeSettings) -> Any:
        store = join(settings)
        master.stop()
        return store

    monkeypatch.setattr(mooncake_client, "join_store", joined)


async def test_a_tier_that_opens_waits_for_the_metadata_server(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, the first write or read would fail. The master continues after the first
    attempt to register has failed."""
    stop_when_joined(master, monkeypatch)
    failed: list[int] = []
    register = MooncakeClient._register

    def noted(self: MooncakeClient, address: int, nbytes: int) -> None:
        try:
            register(self, address, nbytes)
        except TierIoError:
            failed.append(address)
            master.resume()
            raise

    monkeypatch.setattr(MooncakeClient, "_register", noted)
    slab = aligned(20 * SIZE)
    memory = range(slab.ctypes.data, slab.ctypes.data + slab.nbytes)
    tier = MooncakeTier(master.settings(), memory=memory, threads=2)
    await tier.open()
    assert failed != [], "the metadata server did not hang"
    assert await put(tier, KEYS, SIZE) == [OK] * 20
    await assert_holds(tier, KEYS, SIZE)
    slots = [slab[n * SIZE : (n + 1) * SIZE] for n in range(20)]
    assert await tier.read(KEYS, slots) == [ReadOutcome.OK] * 20
    await tier.delete(KEYS)
    assert await tier.write(KEYS, slots) == [OK] * 20
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


async def test_a_metadata_server_that_never_answers_is_named(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_out_soon(monkeypatch)
    monkeypatch.setattr(mooncake_client, "REGISTER_TIMEOUT_S", 0.0)
    stop_when_joined(master, monkeypatch)
    words = f"metadata server at {master.metadata} does not answer.*P2PHANDSHAKE"
    with pytest.raises(TierIoError, match=words):
        await MooncakeTier(master.settings()).open()
    master.resume()


@pytest.mark.parametrize("has_metadata", [True, False])
async def test_memory_that_can_never_be_registered_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_metadata: bool
) -> None:
    """Mooncake accepts no memory that overlaps with other memory."""
    slab = aligned(20 * SIZE)
    start = slab.ctypes.data
    join, register = mooncake_client.join_store, MooncakeClient._register
    attempts: list[int] = []

    def joined(settings: MooncakeSettings) -> Any:
        store = join(settings)
        assert store.register_buffer(start + SIZE, SIZE) == 0
        return store

    def noted(self: MooncakeClient, address: int, nbytes: int) -> None:
        attempts.append(address)
        register(self, address, nbytes)

    monkeypatch.setattr(mooncake_client, "join_store", joined)
    monkeypatch.setattr(MooncakeClient, "_register", noted)
    with Master(tmp_path / "log", has_metadata=has_metadata) as master:
        tier = MooncakeTier(master.settings(), memory=range(start, start + slab.nbytes))
        words = r"does not accept \d+ bytes of memory \(code -600\)\. See the lines that Mooncake"
        with pytest.raises(TierIoError, match=words):
            await tier.open()
    assert attempts == [start]


async def test_a_store_without_a_metadata_server(tmp_path: Path) -> None:
    """Two clients read each other's records."""
    with Master(tmp_path / "log", has_metadata=False) as master:
        assert master.metadata == "P2PHANDSHAKE"
        one, two = MooncakeTier(master.settings()), MooncakeTier(master.settings(0))
        await one.open()
        await two.open()
        assert await put(one, KEYS[::2], SIZE) == [OK] * 10
        assert await two.present(KEYS) == [n % 2 == 0 for n in range(20)]
        await assert_holds(two, KEYS[::2], SIZE)
        assert await put(two, KEYS[1::2], SIZE) == [OK] * 10
        await assert_holds(one, KEYS, SIZE)
        await two.aclose()
        await one.aclose()
