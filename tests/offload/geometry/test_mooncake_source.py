"""Records of another geometry in a real Mooncake store: read exactly, refused, or logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offload.errors import NamespaceError, TierUnavailableError
from offload.geometry.mooncake_source import board_of, dump
from offload.namespaces.geometry import OWN
from tests.offload.geometry.engines_in_a_store import engine, opened, store_specs
from tests.offload.geometry.engines_on_disk import KEYS, geometry_of, namespace_of, payload, read
from tests.patience import PATIENCE_S
from tests.tiers.mooncake.real_store import (
    Master,
    OneClient,
    one_store,
    record_name,
    skip_without_mooncake,
)
from tiers.adapters import remote_read_only
from tiers.adapters.remote_read_only import RemoteReadOnlyTier
from tiers.base import ReadOutcome, TierIoError, WriteOutcome
from tiers.mooncake import bulletin as mooncake_board
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.bulletin import post, slots_of
from tiers.mooncake.client import MooncakeClient
from tiers.record import HEADER_BYTES, Identity
from tiers.testing import aligned, fetch

skip_without_mooncake()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with Master(tmp_path_factory.mktemp("master") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[Any]:
    with one_store(master) as joined:
        yield joined


@pytest.fixture
def _quick(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of a test use one connection."""
    monkeypatch.setattr(mooncake_client, "join_store", lambda _settings: OneClient(store))


quick = pytest.mark.usefixtures("_quick")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """Tests share the store, each with a different model."""
    return str(request.node.name)


@quick
@pytest.mark.parametrize(("stored", "now"), [(2, 1), (1, 2), (4, 2), (2, 4)])
async def test_records_of_other_ranks_are_read(
    master: Master, model: str, stored: int, now: int
) -> None:
    async with engine(master, stored, model=model):
        for rank in range(now):
            specs = store_specs(master, now, rank, "translate", model=model)
            assert [spec.name for spec in specs] == ["mooncake", "mooncake_translated"]
            async with opened(specs, 0) as own, opened(specs, 1) as tier:
                assert await tier.present([*KEYS, b"z" * 36]) == [True] * len(KEYS) + [False]
                for key in KEYS:
                    assert await read(tier, key, now, rank) is ReadOutcome.OK
                assert await read(tier, b"z" * 32 + KEYS[0][-4:], now, rank) is ReadOutcome.MISS
                assert await own.present(KEYS) == [False] * len(KEYS)


@quick
async def test_a_batch_is_read_at_once(master: Master, model: str) -> None:
    """Repeated keys, missing keys and other groups in one call, with more keys than one call of the
    store accepts."""
    async with engine(master, 2, model=model):
        specs = store_specs(master, 1, how="translate", model=model)
        async with opened(specs, 1) as tier:
            absent = [bytes([100 + n]) * 32 + KEYS[0][-4:] for n in range(100)]
            keys = [KEYS[0], *absent, *KEYS, b"z" * 36]
            right = [payload(geometry_of(1, 0), key) for key in keys]
            into = [aligned(data.nbytes) for data in right]
            outcomes = await tier.read(keys, into)
            there = [n for n, key in enumerate(keys) if key in KEYS]
            assert [n for n, o in enumerate(outcomes) if o is ReadOutcome.OK] == there
            assert all(np.array_equal(into[n], right[n]) for n in there)


@quick
async def test_chunks_that_only_some_ranks_have_are_absent(master: Master, model: str) -> None:
    async with engine(master, 2, model=model) as (first, second):
        await first.delete(KEYS[:1])
        await second.delete(KEYS[2:3])
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            assert await tier.present(KEYS) == [False, True, False, True, True, True]
            assert await read(tier, KEYS[0], 1) is ReadOutcome.MISS
            assert await read(tier, KEYS[2], 1) is ReadOutcome.MISS
            assert await read(tier, KEYS[1], 1) is ReadOutcome.OK


@quick
async def test_damage_is_detected(master: Master, store: Any, model: str) -> None:
    async with engine(master, 2, model=model):
        [second] = store_specs(master, 2, 1, model=model)
        name = record_name(KEYS[3], namespace=second.namespace, rank=1)
        bad = bytearray(store.get(name))
        bad[HEADER_BYTES + 5] ^= 1
        assert store.remove(name, True) == 0
        assert store.put(name, bytes(bad)) == 0
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            assert await read(tier, KEYS[3], 1) is ReadOutcome.CORRUPT
            assert await read(tier, KEYS[2], 1) is ReadOutcome.OK
            await tier.delete([KEYS[3]])
            assert await tier.present(KEYS[2:4]) == [True, False]


@quick
async def test_nothing_is_written_and_nothing_is_found_after_a_reset(
    master: Master, model: str
) -> None:
    async with engine(master, 2, model=model) as (first, _):
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            data = payload(geometry_of(1, 0), KEYS[0])
            assert await tier.write([b"k" * 36], [data]) == [WriteOutcome.FAILED]
            await tier.delete(KEYS[:1])
            await tier.touch(KEYS)
            assert await read(tier, KEYS[1], 1) is ReadOutcome.OK
            await tier.reset(7)
            assert await tier.present(KEYS) == [False] * 6
            assert await read(tier, KEYS[1], 1) is ReadOutcome.MISS
        assert await first.present(KEYS) == [True] * 6


@quick
async def test_weights_that_were_replaced_are_not_read(master: Master, model: str) -> None:
    new = bytes([6]) * 32 + KEYS[0][-4:]
    async with engine(master, 2, model=model) as tiers:
        for rank, tier in enumerate(tiers):
            await tier.reset(1)
            await tier.write([new], [payload(geometry_of(2, rank), new)])
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            assert await tier.present([KEYS[0], new]) == [True, False]


@quick
async def test_other_models_are_ignored(master: Master, model: str) -> None:
    async with engine(master, 2, model=f"{model} other"):
        for how in ("translate", "refuse"):
            specs = store_specs(master, 1, how=how, model=model)
            if how == "translate":
                async with opened(specs, 1) as tier:
                    assert await tier.present(KEYS) == [False] * 6


@quick
async def test_a_hybrid_of_other_ranks_is_refused(master: Master, model: str) -> None:
    states = geometry_of(2, 0, OWN)
    async with opened(store_specs(master, 2, model=model, geometry=states), 0):
        with pytest.raises(NamespaceError) as error:
            store_specs(master, 1, how="translate", model=model, geometry=geometry_of(1, 0, OWN))
    assert str(error.value) == (
        f"kvtiers: $.tiers[0]: the Mooncake store at {master.address} holds blocks of this model "
        f"that this engine must not read:\n"
        f"  namespace {namespace_of(2, model={'name': model}).name}:\n"
        "    parallel.tensor was 2 when stored and is 1 now: layer layer.0 (CPU_ATTN) "
        "cannot be split over "
        "other ranks\n"
        "    (it was written with --tensor-parallel-size 2)\n"
        'Use another store, start with the same flags, or set "geometry": "own" to keep blocks of '
        "both side by side."
    )


@quick
async def test_an_engine_that_has_not_run_for_days_causes_no_refusal(
    master: Master, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's records are still read if an exact translation exists."""
    states = {"model": model, "geometry": geometry_of(1, 0, OWN)}
    async with engine(master, 4, model=model):
        pass
    async with opened(store_specs(master, 2, model=model, geometry=geometry_of(2, 0, OWN)), 0):
        pass
    with pytest.raises(NamespaceError, match="cannot be split"):
        store_specs(master, 1, 0, "translate", **states)
    with pytest.raises(NamespaceError, match="was 2 when stored and is 1 now"):
        store_specs(master, 1, 0, "translate", model=model)
    day = mooncake_board.today() + 2
    monkeypatch.setattr(mooncake_board, "today", lambda: day)
    store_specs(master, 1, 0, "translate", **states)
    async with opened(store_specs(master, 1, 0, "translate", model=model), 1) as tier:
        assert await read(tier, KEYS[0], 1) is ReadOutcome.OK


@quick
async def test_the_choices_of_the_option(
    master: Master, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(master, 2, model=model):
        with pytest.raises(
            NamespaceError, match=r'parallel\.tensor was 2 when stored and is 1 now: "geometry"'
        ):
            store_specs(master, 1, how="refuse", model=model)
        store_specs(master, 2, how="refuse", model=model)
        with caplog.at_level(logging.INFO):
            async with opened(store_specs(master, 1, model=model), 0) as tier:
                assert await tier.present(KEYS) == [False] * 6
    [line] = [line for line in caplog.messages if "in another geometry" in line]
    assert "parallel.tensor (2 there, 1 here)" in line


def test_a_missing_master_is_reported_at_once(tmp_path: Any) -> None:
    with pytest.raises(TierUnavailableError, match=r"\$.tiers\[0\]: nothing listens at"):
        store_specs(Master(tmp_path / "log"), 1, how="translate")


def look_now(tier: Any) -> None:
    """The tier's check, which runs every minute."""
    assert isinstance(tier, RemoteReadOnlyTier)
    assert tier._source is not None
    tier._source.refresh()


@quick
async def test_engines_that_appear_later_are_read_or_logged(
    master: Master, model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_read_only, "LOOK_S", 0.05)
    async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
        assert await tier.present(KEYS) == [False] * 6
        async with engine(master, 2, model=model):
            async with asyncio.timeout(PATIENCE_S):
                while await tier.present(KEYS) != [True] * 6:
                    pass
            assert await read(tier, KEYS[0], 1) is ReadOutcome.OK
            states = geometry_of(4, 0, OWN)
            async with opened(store_specs(master, 4, model=model, geometry=states), 0):
                for _ in range(2):
                    look_now(tier)
            assert await read(tier, KEYS[1], 1) is ReadOutcome.OK
    [line] = [line for line in caplog.messages if "must not read" in line]
    assert "parallel.tensor was 4 when stored and is 1 now" in line or "groups[0].split" in line


@quick
async def test_a_missing_description_of_a_rank_is_waited_for(master: Master, model: str) -> None:
    async with opened(store_specs(master, 2, 0, model=model), 0) as first:
        await first.write(KEYS[:1], [payload(geometry_of(2, 0), KEYS[0])])
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            assert await tier.present(KEYS[:1]) == [False]
            async with opened(store_specs(master, 2, 1, model=model), 0) as second:
                await second.write(KEYS[:1], [payload(geometry_of(2, 1), KEYS[0])])
                look_now(tier)
                assert await tier.present(KEYS[:1]) == [True]
                assert await read(tier, KEYS[0], 1) is ReadOutcome.OK


@quick
async def test_two_descriptions_of_the_same_records_are_both_ignored(
    master: Master, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them would give wrong bytes."""
    namespace = namespace_of(2, model={"name": model})
    client = MooncakeClient(master.settings(), Identity(), None)
    async with engine(master, 2, model=model):
        [first] = store_specs(master, 2, model=model)
        other = replace(geometry_of(2, 0), records=first.namespace)
        group = other.groups[0]
        lying = replace(other, groups=(replace(group, layers=group.layers[::-1]),))
        assert post(client, board_of(namespace.fields, 0), dump(namespace, lying))
        client.close()
        async with opened(store_specs(master, 1, how="translate", model=model), 1) as tier:
            assert await tier.present(KEYS) == [False] * 6
            assert (await fetch(tier, KEYS[0], 4096))[0] is ReadOutcome.MISS
    assert "has two different descriptions" in caplog.text


@quick
async def test_invalid_documents_on_the_board_do_no_harm(
    master: Master, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = namespace_of(2, model={"name": model}).fields
    good = dump(namespace_of(2, model={"name": model}), geometry_of(2, 0))
    rubbish = [b"{}", b"[1]", b"\xff", good.replace(b"LBHNC", b"BLHNC"), b"[" * 100_000]
    client = MooncakeClient(master.settings(), Identity(), None)
    async with opened(store_specs(master, 2, 1, model=model), 0):
        for name, content in zip(slots_of(board_of(fields, 0)), rubbish, strict=False):
            assert client.put_document(name, content, is_pinned=True)
        client.close()
        async with engine(master, 2, model=model):
            specs = store_specs(master, 1, how="translate", model=model)
            async with opened(specs, 1) as translating:
                assert await read(translating, KEYS[0], 1) is ReadOutcome.OK
    assert caplog.text.count("a description of an engine in the store") >= len(rubbish)


async def test_a_master_that_comes_back_empty(tmp_path: Any, model: str) -> None:
    """The engines post their descriptions again, and records stored again are read."""
    with Master(tmp_path / "log") as own:
        specs = store_specs(own, 2, 1, "translate", model=model)
        async with (
            engine(own, 1, model=model) as (first,),
            opened(specs, 1) as tier,
            asyncio.timeout(PATIENCE_S),
        ):
            assert await read(tier, KEYS[0], 2, 1) is ReadOutcome.OK
            own.kill()
            for each in (first, tier):
                with pytest.raises(TierIoError):
                    await each.present(KEYS)
            own.start()
            data = [payload(geometry_of(1, 0), key) for key in KEYS]
            while WriteOutcome.OK not in await written(first, data):
                pass
            found: list[bool] | None = None
            while found != [True] * 6:
                with contextlib.suppress(TierIoError):
                    look_now(tier)
                    found = await present_or_not(tier)
            assert await read(tier, KEYS[0], 2, 1) is ReadOutcome.OK


async def present_or_not(tier: Any) -> list[bool] | None:
    try:
        return list(await tier.present(KEYS))
    except TierIoError:
        return None


async def written(tier: Any, data: list[Any]) -> list[WriteOutcome]:
    await asyncio.sleep(0.01)
    try:
        return list(await tier.write(KEYS, data))
    except TierIoError:
        return []
