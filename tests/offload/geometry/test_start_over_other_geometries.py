"""A server starts on a path with other geometries: they are used, refused with a message, or
ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.config.schema import parse_config, tier_names
from offload.errors import ConfigError, NamespaceError
from offload.geometry.folder_source import find_other_replicas
from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.epochs import TierEpochs
from offload.namespaces.folders import replica_folder
from offload.namespaces.geometry import OWN
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.write_through import QueueSettings
from policies.base import EntryInfo
from policies.registry import make_policy
from tests.offload.geometry.engines_on_disk import (
    KEYS,
    geometry_of,
    namespace_of,
    opened,
    places,
    release,
    state_of,
    write,
)


def look(path: Path, how: str = "translate", **changes: Any) -> list[Any]:
    namespace = changes.get("namespace", namespace_of(1))
    geometry = changes.get("geometry", geometry_of(1, 0))
    return find_other_replicas("$.tiers[0]", path, namespace, geometry, how)


async def test_other_models_are_ignored(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2, namespace=namespace_of(2, model={"name": "other"}))
    await write(tmp_path / "kv", 2, namespace=namespace_of(2, hash={"seed": "7"}))
    for how in ("own", "translate", "refuse"):
        assert look(tmp_path / "kv", how) == []


async def test_the_choices_of_the_option(tmp_path: Path) -> None:
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
        '    parallel.tensor was 2 when stored and is 1 now: "geometry" is "refuse"\n'
        'Use another path, start with the same flags, or set "geometry": "own" to keep blocks of '
        "both side by side."
    )


STATES = geometry_of(1, 0, OWN)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"parallel": {"tensor": 1, "pipeline": 2}},
            "    parallel.pipeline was 1 when stored and is 2 now: only tensor parallel "
            "ranks are translated\n",
        ),
        (
            {"geometry": {"hash_block_size": 16, "groups": []}},
            "    geometry.hash_block_size was 32 when stored and is 16 now: keys are "
            "hashes of other ranges "
            "of the prompt\n",
        ),
        (
            {"geometry": {"hash_block_size": 32, "groups": [{"head_size": 64}]}},
            "    geometry.groups[0].head_size was 32 when stored and is 64 now: another "
            "kind of KV cache\n",
        ),
    ],
)
async def test_fields_whose_differences_cannot_be_bridged(
    tmp_path: Path, changes: dict[str, Any], lines: str
) -> None:
    await write(tmp_path / "kv", 2)
    with pytest.raises(NamespaceError) as error:
        look(tmp_path / "kv", namespace=namespace_of(1, **changes))
    assert lines in str(error.value)
    assert not (tmp_path / "kv" / namespace_of(1, **changes).name).exists()


async def test_states_are_refused_and_nothing_is_created(tmp_path: Path) -> None:
    for rank in range(2):
        specs = places(tmp_path / "kv", 2, rank, geometry=geometry_of(2, rank, OWN)).specs()
        async with opened(specs, 0):
            pass
        release(specs)
    before = sorted(path.name for path in (tmp_path / "kv").iterdir())
    with pytest.raises(NamespaceError) as error:
        places(tmp_path / "kv", 1, how="translate", geometry=STATES, capacity="640MiB").specs()
    assert (
        "    parallel.tensor was 2 when stored and is 1 now: layer layer.0 (CPU_ATTN) "
        "cannot be split over "
        "other ranks\n    (it was written with --tensor-parallel-size 2)\n" in str(error.value)
    )
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == before


async def test_stores_without_a_description_are_refused(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    replica = tmp_path / "kv" / namespace_of(2).name / "replica-0"
    for rank in range(2):
        (replica / f"rank-{rank}.geometry.json").write_text("{}")
    with pytest.raises(NamespaceError, match="does not describe the order of its records"):
        look(tmp_path / "kv")


async def test_stores_to_translate_are_not_removed_for_space(tmp_path: Path) -> None:
    """The stores count towards the capacity: too small a capacity is refused, and without
    ``translate`` the stores are removed."""
    await write(tmp_path / "kv", 2)
    theirs = tmp_path / "kv" / namespace_of(2).name
    with pytest.raises(ConfigError, match=r"\$.tiers\[0\].capacity.*leaves too little. Give at"):
        places(tmp_path / "kv", 1, how="translate").specs()
    release(places(tmp_path / "kv", 1, how="translate", capacity="80MiB").specs())
    assert theirs.exists()
    release(places(tmp_path / "kv", 1).specs())
    assert not theirs.exists()


async def test_a_reset_begins_no_epoch_of_other_engines(tmp_path: Path) -> None:
    await write(tmp_path / "kv", 2)
    release(places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs())
    before = state_of(tmp_path / "kv" / namespace_of(2).name)
    epochs = TierEpochs([str(tmp_path / "kv")], namespace_of(1), 0)
    own = replica_folder(tmp_path / "kv", namespace_of(1))
    assert epochs.begin(1) > 0
    assert read_epoch(own) == 0
    assert epochs.begin(0) == read_epoch(own) == 1
    assert state_of(tmp_path / "kv" / namespace_of(2).name) == before


def test_nothing_is_written_through_to_a_read_only_tier() -> None:
    """The same chunk is queued for a tier that may be written."""
    groups = {0: GroupInfo("full", 32, (4096,))}
    queued = []
    for read_only in (False, True):
        cpu = TierIndex("cpu", SlotCapacity(4), make_policy("lru"))
        infos = [EntryInfo(0, "full")]
        cpu.reserve(KEYS[:1], infos)
        cpu.commit(KEYS[:1], infos)
        disk = TierIndex("disk", ByteCapacity(1 << 20), make_policy("lru"))
        settings = PlannerSettings(queue_settings=[QueueSettings(read_only=read_only)])
        (queue,) = Planner(groups, cpu, [disk], settings).write_through.queues
        queue.offer(KEYS[:1], infos)
        queued.append(len(queue))
    assert queued == [1, 0]


def test_read_only_tiers_are_named_and_numbered_after_the_others() -> None:
    table = {"type": "lmdb", "capacity": "1GiB", "geometry": "translate"}
    tiers = [
        table | {"path": "/a"},
        table | {"path": "/b", "geometry": "own"},
        table | {"path": "/c"},
    ]
    config = parse_config({"cpu": {"capacity": "1GiB"}, "tiers": tiers})
    assert tier_names(config) == ["lmdb", "lmdb2", "lmdb3", "lmdb_translated", "lmdb3_translated"]
    assert [config.is_read_only(tier) for tier in range(5)] == [False] * 3 + [True] * 2
    store = {"type": "mooncake", "master": "10.0.0.1:50051"}
    tiers = [store, tiers[0], store | {"geometry": "translate"}]
    config = parse_config({"cpu": {"capacity": "1GiB"}, "tiers": tiers})
    translated = ["lmdb_translated", "mooncake2_translated"]
    assert tier_names(config) == ["mooncake", "lmdb", "mooncake2", *translated]
