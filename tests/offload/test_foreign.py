"""Stores of another geometry, on real disks: found, translated, refused, and never written to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.config import parse_config
from offload.errors import ConfigError, NamespaceError
from offload.foreign import find_foreign
from offload.geometry import HEADS, OWN, Geometry, GroupGeometry, LayerGeometry
from offload.keys import group_suffix
from offload.namespace import Namespace
from offload.namespace_folders import bump_epoch, replica_folder
from offload.tier_factory import TierSpec, make_tier, tier_names
from offload.tier_places import TierPlaces
from tiers.base import Buffer, ReadOutcome, Tier, TierClosedError, WriteOutcome
from tiers.testing import aligned, all_keys

HEADS_ALL, BLOCK_TOKENS, UNIT = 4, 32, 64
KEYS = [bytes([number]) * 32 + group_suffix(0) for number in range(6)]


def namespace_of(ranks: int, **changes: Any) -> Namespace:
    """As ``offload.connector.identity`` makes them, in little."""
    groups = [{"kind": "FullAttentionSpec", "num_kv_heads": HEADS_ALL // ranks, "head_size": 32}]
    return Namespace.of(
        {
            "model": {"name": "m"},
            "hash": {"algorithm": "sha256_cbor", "seed": "0"},
            "parallel": {"tensor": ranks, "pipeline": 1},
            "geometry": {"chunk_blocks": 1, "hash_block_size": 32, "groups": groups},
        }
        | changes
    )


def geometry_of(ranks: int, rank: int, split: str = HEADS) -> Geometry:
    heads = HEADS_ALL // ranks
    layers = tuple(
        LayerGeometry(
            f"layer.{n}", split, "CPU_ATTN", 1, BLOCK_TOKENS, heads, 1, UNIT * BLOCK_TOKENS
        )
        for n in range(2)
    )
    group = GroupGeometry(0, "full", "full_attention", BLOCK_TOKENS, 1, layers)
    return Geometry(bytes([ranks]) * 16, rank, ranks, "LBHNC", (group,))


def places(path: Path, ranks: int, rank: int = 0, how: str = "own", **options: Any) -> TierPlaces:
    about = {key: options.pop(key) for key in ("namespace", "geometry") if key in options}
    table = {"type": "lmdb", "path": str(path), "capacity": "64MiB", "reserve": 0}
    tiers = [table | {"geometry": how} | options]
    config = parse_config({"cpu": {"capacity": 1 << 20}, "tiers": tiers})
    geometry = about.get("geometry") or geometry_of(ranks, rank)
    namespace = about.get("namespace") or namespace_of(ranks)
    return TierPlaces(
        config, namespace, geometry.records, rank, 0, ranks, engine="test", geometry=geometry
    )


def payload(geometry: Geometry, key: bytes) -> Buffer:
    """What a rank keeps under a key: every head of every layer has bytes of its own."""
    found = aligned(-(-geometry.groups[0].chunk_bytes // 4096) * 4096)
    found[:] = 0
    heads = geometry.groups[0].layers[0].heads
    size = UNIT * BLOCK_TOKENS
    for layer in range(2):
        for head in range(heads):
            at = (layer * heads + head) * size
            number = key[0] * 16 + layer * 8 + geometry.rank * heads + head
            found[at : at + size] = np.frombuffer(
                np.full(size // 4, number, "<u4").tobytes(), np.uint8
            )
    return found


def release(specs: list[TierSpec]) -> None:
    renew: Any = specs[0].renew
    renew.args[1].close()


@asynccontextmanager
async def opened(specs: list[TierSpec], number: int) -> AsyncIterator[Tier]:
    tier = make_tier(specs[number], 4096)
    try:
        await tier.open()
        yield tier
    finally:
        await tier.aclose()


async def write(path: Path, ranks: int, keys: list[bytes] = KEYS, **options: Any) -> None:
    """An engine that has stored ``keys`` and ended."""
    for rank in range(ranks):
        specs = places(path, ranks, rank, **options).specs()
        async with opened(specs, 0) as tier:
            geometry = geometry_of(ranks, rank)
            written = await tier.write(keys, [payload(geometry, key) for key in keys])
            assert written == [WriteOutcome.OK] * len(keys)
        release(specs)


async def read(tier: Tier, key: bytes, ranks: int, rank: int = 0) -> ReadOutcome:
    """Read a key; what was read must be what this rank would have written itself."""
    right = payload(geometry_of(ranks, rank), key)
    into = aligned(right.nbytes)
    into[:] = 0xEE
    [outcome] = await tier.read([key], [into])
    assert outcome is not ReadOutcome.OK or (into == right).all()
    return outcome


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file but LMDB's table of readers: length and time of change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.mdb"
    }


@pytest.mark.parametrize("kind", ["lmdb", "file", "shared", "shared_file"])
@pytest.mark.parametrize(("stored", "now"), [(2, 1), (1, 2), (4, 2), (2, 4)])
async def test_what_other_ranks_stored_is_read(
    tmp_path: Path, stored: int, now: int, kind: str
) -> None:
    names = {"shared": "lmdb", "shared_file": "file"}
    options = {"type": names.get(kind, kind)} | ({"shared": True} if kind in names else {})
    await write(tmp_path / "kv", stored, **options)
    theirs = tmp_path / "kv" / namespace_of(stored).name
    before = state_of(theirs)
    for rank in range(now):
        large = options | {"capacity": "640MiB"}
        specs = places(tmp_path / "kv", now, rank, "translate", **large).specs()
        kind = options["type"]
        assert [spec.name for spec in specs] == [kind, f"{kind}_translated"]
        async with opened(specs, 0) as own, opened(specs, 1) as tier:
            found = await all_keys(tier)
            size = payload(geometry_of(now, rank), KEYS[0]).nbytes
            assert sorted(found) == [(key, size) for key in KEYS]
            for key in KEYS:
                assert await read(tier, key, now, rank) is ReadOutcome.OK
            assert await read(own, KEYS[0], now, rank) is ReadOutcome.MISS
        release(specs)
    assert state_of(theirs) == before


async def test_nothing_is_ever_written_deleted_or_found_after_a_reset(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    theirs = tmp_path / "kv" / namespace_of(2).name
    before = state_of(theirs)
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        data = payload(geometry_of(1, 0), KEYS[0])
        assert await tier.write([b"k" * 36], [data]) == [WriteOutcome.FAILED]
        await tier.delete(KEYS[:1])
        assert await read(tier, KEYS[0], 1) is ReadOutcome.MISS
        await tier.touch(KEYS)
        assert await read(tier, KEYS[1], 1) is ReadOutcome.OK
        await tier.reset(7)
        assert await read(tier, KEYS[1], 1) is ReadOutcome.MISS
    with pytest.raises(TierClosedError):
        await tier.read(KEYS[:1], [data])
    release(specs)
    assert state_of(theirs) == before


async def test_what_only_some_ranks_have_is_not_there(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    specs = places(tmp_path / "kv", 2, 1).specs()
    async with opened(specs, 0) as tier:
        await tier.delete(KEYS[:2])
        await tier.touch(KEYS)
    release(specs)
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert sorted(key for key, _ in await all_keys(tier)) == KEYS[2:]
    release(specs)


async def test_damage_is_seen(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    data = tmp_path / "kv" / namespace_of(2).name / "replica-0" / "rank-1" / "payload.data"
    content = bytearray(data.read_bytes())
    wanted = payload(geometry_of(2, 1), KEYS[3]).tobytes()
    at = content.index(wanted)
    content[at + 5] ^= 1
    data.write_bytes(content)
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert await read(tier, KEYS[3], 1) is ReadOutcome.CORRUPT
        assert await read(tier, KEYS[2], 1) is ReadOutcome.OK
    release(specs)


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.offload.test_foreign import KEYS, opened, places, payload, geometry_of
async def main():
    path = Path(sys.argv[1])
    specs = [places(path, 2, rank).specs() for rank in range(2)]
    async with opened(specs[0], 0) as one, opened(specs[1], 0) as two:
        print("ready", flush=True)
        for line in sys.stdin:
            what = line.strip()
            for rank, tier in enumerate((one, two)):
                if what == "evict":
                    await tier.delete(KEYS[:3])
                    await tier.write([b"z" * 36], [payload(geometry_of(2, rank), KEYS[5])])
                elif what == "reset":
                    await tier.reset(1)
            print("done", flush=True)
asyncio.run(main())
"""


@contextmanager
def live_owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield owner
    finally:
        owner.kill()
        owner.communicate()


async def test_a_live_owner_evicts_resets_and_is_killed(tmp_path: Path) -> None:
    """What it removes is a miss; nothing that is read is ever wrong (see ``read``)."""
    await write(tmp_path / "kv", 2)
    with live_owner(tmp_path / "kv") as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None

        def order(what: str) -> None:
            print(what, file=owner.stdin, flush=True)
            assert owner.stdout is not None
            assert owner.stdout.readline() == "done\n"

        assert owner.stdout.readline() == "ready\n"
        specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
        async with opened(specs, 1) as tier:
            assert [await read(tier, key, 1) for key in KEYS] == [ReadOutcome.OK] * 6
            order("evict")
            found = [await read(tier, key, 1) for key in KEYS]
            assert found == [ReadOutcome.MISS] * 3 + [ReadOutcome.OK] * 3
            order("reset")
            assert [await read(tier, key, 1) for key in KEYS] == [ReadOutcome.MISS] * 6
            os.kill(owner.pid, signal.SIGKILL)
            owner.wait()
            assert await read(tier, KEYS[4], 1) is ReadOutcome.MISS
        release(specs)


async def test_weights_that_were_replaced_are_not_read(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    bump_epoch(replica_folder(tmp_path / "kv", namespace_of(2)))
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert await all_keys(tier) == []
    release(specs)


async def test_records_that_are_not_those_described_are_not_read(tmp_path: Path) -> None:
    """The owner's next start with other kernels: its geometry is written before its records go."""
    await write(tmp_path / "kv", 2)
    for rank in range(2):
        other = replace(geometry_of(2, rank), records=b"other kernels...")
        release(places(tmp_path / "kv", 2, rank, geometry=other).specs())
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert await all_keys(tier) == []
    release(specs)


# -- attaching -------------------------------------------------------------------------------


def look(path: Path, how: str = "translate", **changes: Any) -> list[Any]:
    namespace = changes.get("namespace", namespace_of(1))
    geometry = changes.get("geometry", geometry_of(1, 0))
    return find_foreign("$.tiers[0]", path, namespace, geometry, how)


async def test_other_models_are_nobodys_business(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2, namespace=namespace_of(2, model={"name": "other"}))
    await write(tmp_path / "kv", 2, namespace=namespace_of(2, hash={"seed": "7"}))
    for how in ("own", "translate", "refuse"):
        assert look(tmp_path / "kv", how) == []


async def test_the_choice(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    assert look(tmp_path / "kv", "own") == []
    [store] = look(tmp_path / "kv", "translate")
    assert store.namespace == namespace_of(2).name
    assert [geometry.rank for geometry in store.ranks] == [0, 1]
    assert look(tmp_path / "kv", "refuse", namespace=namespace_of(2)) == []
    with pytest.raises(NamespaceError) as error:
        look(tmp_path / "kv", "refuse")
    assert str(error.value) == (
        f"kvtiers: $.tiers[0]: {tmp_path}/kv holds blocks of this model that this engine must not "
        f"read:\n  namespace {namespace_of(2).name}:\n"
        '    parallel.tensor is 2 stored, 1 now: "geometry" is "refuse"\n'
        'Use another path, start with the same flags, or set "geometry": "own" to keep blocks of '
        "both side by side."
    )


STATES = geometry_of(1, 0, OWN)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"parallel": {"tensor": 1, "pipeline": 2}},
            "    parallel.pipeline is 1 stored, 2 now: only tensor parallel ranks are translated\n",
        ),
        (
            {"geometry": {"hash_block_size": 16, "groups": []}},
            "    geometry.hash_block_size is 32 stored, 16 now: keys are hashes of other stretches "
            "of the prompt\n",
        ),
        (
            {"geometry": {"hash_block_size": 32, "groups": [{"head_size": 64}]}},
            "    geometry.groups[0].head_size is 32 stored, 64 now: another kind of KV cache\n",
        ),
    ],
)
async def test_fields_that_nothing_can_bridge(
    tmp_path: Path, changes: dict[str, Any], lines: str
) -> None:
    await write(tmp_path / "kv", 2)
    with pytest.raises(NamespaceError) as error:
        look(tmp_path / "kv", namespace=namespace_of(1, **changes))
    assert lines in str(error.value)
    assert not (tmp_path / "kv" / namespace_of(1, **changes).name).exists()


async def test_states_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    for rank in range(2):
        specs = places(tmp_path / "kv", 2, rank, geometry=geometry_of(2, rank, OWN)).specs()
        async with opened(specs, 0):
            pass
        release(specs)
    before = sorted(path.name for path in (tmp_path / "kv").iterdir())
    with pytest.raises(NamespaceError) as error:
        places(tmp_path / "kv", 1, how="translate", geometry=STATES, capacity="640MiB").specs()
    assert (
        "    parallel.tensor is 2 stored, 1 now: layer layer.0 (CPU_ATTN) cannot be split over "
        "other ranks\n    (it was written with --tensor-parallel-size 2)\n" in str(error.value)
    )
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == before


async def test_stores_that_do_not_describe_themselves_are_refused(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    home = tmp_path / "kv" / namespace_of(2).name / "replica-0"
    for rank in range(2):
        (home / f"rank-{rank}.geometry.json").write_text("{}")
    with pytest.raises(NamespaceError, match="does not say how its records are ordered"):
        look(tmp_path / "kv")


async def test_what_is_read_is_not_removed_for_room(tmp_path: Path) -> None:
    """It counts all the same: too small a capacity is refused, and without the wish it goes."""
    await write(tmp_path / "kv", 2)
    theirs = tmp_path / "kv" / namespace_of(2).name
    with pytest.raises(ConfigError, match=r"\$.tiers\[0\].capacity.*leaves too little. Give at"):
        places(tmp_path / "kv", 1, how="translate").specs()
    release(places(tmp_path / "kv", 1, how="translate", capacity="80MiB").specs())
    assert theirs.exists()
    release(places(tmp_path / "kv", 1).specs())
    assert not theirs.exists()


def test_names_of_tiers() -> None:
    table = {"type": "lmdb", "capacity": "1GiB", "geometry": "translate"}
    tiers = [
        table | {"path": "/a"},
        table | {"path": "/b", "geometry": "own"},
        table | {"path": "/c"},
    ]
    config = parse_config({"cpu": {"capacity": "1GiB"}, "tiers": tiers})
    assert tier_names(config) == ["lmdb", "lmdb2", "lmdb3", "lmdb_translated", "lmdb3_translated"]
    assert [config.is_read_only(tier) for tier in range(5)] == [False] * 3 + [True] * 2
