"""Free extents in LMDB, against the map in memory and against a set of pages."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from tiers.io.extents import Extent, Extents
from tiers.lmdb.shared.free_extents import FreeExtents, free_extents, put_free_extents

PAGES = 400


@pytest.mark.parametrize("seed", range(6))
def test_random_allocations_tile_the_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    held: list[Extents] = []
    free = set(range(1, PAGES))
    with lmdb.open(str(tmp_path), max_dbs=1, map_size=1 << 20) as env:
        table = env.open_db(b"free")
        with env.begin(write=True) as txn:
            assert put_free_extents(txn, table, [Extent(1, PAGES - 1)]) == PAGES - 1
        cursor = 0
        for _ in range(60):
            with env.begin(write=True) as txn:
                space = FreeExtents(txn, table, cursor, len(free))
                for _ in range(rng.randrange(12)):
                    if held and rng.random() < 0.5:
                        extents = held.pop(rng.randrange(len(held)))
                        space.give(extents)
                        free |= {page for start, n in extents for page in range(start, start + n)}
                    else:
                        wanted = rng.randrange(1, 40)
                        found = space.take(wanted)
                        assert (found is None) == (wanted > len(free)), seed
                        if found is not None:
                            pages = [p for start, n in found for p in range(start, start + n)]
                            assert len(pages) == len(set(pages)) == wanted
                            assert free.issuperset(pages), f"given twice, seed {seed}"
                            free.difference_update(pages)
                            held.append(found)
                cursor = space.cursor
                assert space.pages == len(free)
            with env.begin() as txn:
                runs_now = free_extents(txn, table)
            assert {p for start, n in runs_now for p in range(start, start + n)} == free
            ends = [start + n for start, n in runs_now]
            assert all(end < start for end, (start, _n) in zip(ends, runs_now[1:], strict=False))


@pytest.mark.parametrize("wrong", [Extent(10, 5), Extent(12, 1), Extent(5, 6), Extent(14, 3)])
def test_free_extents_cannot_be_freed_again(tmp_path: Path, wrong: Extent) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        table = env.open_db(b"free")
        with env.begin(write=True) as txn:
            put_free_extents(txn, table, [Extent(10, 5)])
            space = FreeExtents(txn, table, 0, 5)
            with pytest.raises(ValueError, match="free already"):
                space.give([wrong])


def test_one_transaction_with_thousands_of_extents_needs_few_pages(tmp_path: Path) -> None:
    """LMDB does not reuse a table's page that was empty in the meantime."""
    with lmdb.open(str(tmp_path), max_dbs=1, map_size=64 * 4096) as env:
        table = env.open_db(b"free")
        with env.begin(write=True) as txn:
            space = FreeExtents(txn, table, 0, put_free_extents(txn, table, [Extent(1, 5000)]))
            allocations = [space.take(1) for _ in range(4999)]
            for extents in allocations:
                assert extents is not None
                space.give(extents)
            assert free_extents(txn, table) == [Extent(1, 5000)]
