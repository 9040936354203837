"""An LMDB tier, shared or not, that is opened with a smaller capacity than before."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from tiers.base import TierIoError, WriteOutcome
from tiers.lmdb.files import payload_capacity_bytes
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.index import Changes, LmdbIndex
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.tier import LmdbTier
from tiers.testing import aligned, all_keys, assert_holds, key_of, put

SIZE = 12_000
KEYS = [key_of(n) for n in range(3)]
Kind = type[LmdbTier] | type[SharedLmdbTier]


@pytest.fixture(params=[LmdbTier, SharedLmdbTier])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


async def test_a_smaller_capacity_keeps_the_records_that_fit(tmp_path: Path, kind: Kind) -> None:
    tier = kind(tmp_path / "tier", 64 << 20, reserve_bytes=0)
    await tier.open()
    keys = [key_of(n) for n in range(40)]
    assert await put(tier, keys, 1 << 20) == [WriteOutcome.OK] * 40
    await tier.aclose()
    tier = kind(tmp_path / "tier", 16 << 20, reserve_bytes=0)
    info = await tier.open()
    assert 10 <= info.record_count <= 14
    assert info.used_bytes <= info.capacity_bytes
    assert (tmp_path / "tier" / PAYLOAD_NAME).stat().st_size <= 16 << 20
    await assert_holds(tier, [stored.key for stored in await all_keys(tier)], 1 << 20)
    await tier.aclose()


@pytest.mark.parametrize("share", [0.7, 0.2])
async def test_a_smaller_capacity_of_an_index_that_is_full(
    tmp_path: Path, kind: Kind, share: float
) -> None:
    """Each page of the index has records to delete, and the map cannot hold copies of all pages.
    The index keeps its size, and the new capacity is respected all the same."""
    options = LmdbOptions(reserve_bytes=0, record_bytes=4096, grow_bytes=8 << 20)
    tier = kind(tmp_path / "tier", 40 << 20, options=options)
    info = await tier.open()
    keys = [key_of(n) for n in range(info.capacity_bytes // 4096)]
    # records that are adjacent on disk are not neighbours in the index
    random.Random(5).shuffle(keys)
    page = aligned(4096)
    for start in range(0, len(keys), 4000):  # more than one transaction's changes fit into the map
        some = keys[start : start + 4000]
        assert set(await tier.write(some, [page] * len(some))) == {WriteOutcome.OK}
    await tier.aclose()
    capacity_bytes = int(share * (40 << 20))
    tier = kind(tmp_path / "tier", capacity_bytes, options=options)
    info = await tier.open()
    assert tier.stats()["quarantined"] == 0
    assert info.record_count == info.capacity_bytes // 4096 > 50
    files = [file for file in (tmp_path / "tier").iterdir() if file.is_file()]
    assert sum(file.stat().st_blocks * 512 for file in files) <= capacity_bytes
    kept = [stored.key for stored in await all_keys(tier)]
    await tier.delete(kept[::2])
    assert await tier.write([key_of(1 << 40)], [page]) == [WriteOutcome.OK]
    tier.check()
    await tier.aclose()
    tier = kind(tmp_path / "tier", capacity_bytes, options=options)
    assert (await tier.open()).record_count == len(kept[1::2]) + 1
    await tier.aclose()


async def test_an_index_too_large_for_the_capacity_is_moved_aside(
    tmp_path: Path, kind: Kind
) -> None:
    options = LmdbOptions(reserve_bytes=0, record_bytes=4096)
    tier = kind(tmp_path / "tier", 64 << 20, options=options)
    await tier.open()
    await put(tier, KEYS, SIZE)
    await tier.aclose()
    strict = kind(tmp_path / "tier", 6 << 20, options=options, recovery=Recovery.STRICT)
    with pytest.raises(TierIoError, match="leaves no space"):
        await strict.open()
    tier = kind(tmp_path / "tier", 6 << 20, options=options)
    assert (await tier.open()).record_count == 0
    assert tier.stats()["quarantined"] == 1
    await put(tier, KEYS, SIZE)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


def test_a_capacity_too_small_for_anything() -> None:
    with pytest.raises(ValueError, match="leaves no space"):
        payload_capacity_bytes(1 << 20)


async def test_changes_that_do_not_fit_the_map_are_committed_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction needs copies of all pages that it touches; here one record at a time is already
    too many."""
    apply = LmdbIndex.apply
    keys = [key_of(number) for number in range(1200)]

    def with_little_space(index: LmdbIndex, changes: Changes) -> None:
        if len(changes.edits) > 700 or keys[7] in changes.edits:
            raise lmdb.MapFullError("planted")
        apply(index, changes)

    monkeypatch.setattr(LmdbIndex, "apply", with_little_space)
    tier = LmdbTier(tmp_path / "tier", 40 << 20, reserve_bytes=0)
    await tier.open()
    outcomes = await tier.write(keys, [aligned(4096)] * len(keys))
    assert set(outcomes) == {WriteOutcome.OK, WriteOutcome.FULL}
    assert outcomes[7] is WriteOutcome.FULL
    stored = {key for key, o in zip(keys, outcomes, strict=True) if o is WriteOutcome.OK}
    assert len(stored) > 400
    assert {found.key for found in await all_keys(tier)} == stored
    tier.check()
    await tier.aclose()
