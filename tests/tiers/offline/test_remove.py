"""Removals from a folder that no tier has open end when their time is over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tiers.files.tier import FileTier
from tiers.lmdb.index import DATA_NAME
from tiers.lmdb.tier import LmdbTier
from tiers.offline import remove
from tiers.offline.file_reader import FileReader
from tiers.offline.lmdb_reader import LmdbReader
from tiers.testing import KIB, MIB, OK, key_of, put

KEYS = [key_of(number) for number in range(8)]


async def filled(tier: LmdbTier | FileTier) -> None:
    await tier.open()
    assert await put(tier, KEYS, 8 * KIB) == [OK] * 8
    await tier.aclose()


def left(reader: LmdbReader | FileReader) -> set[bytes]:
    keys = {record.key for batch in reader.batches() for record in batch}
    reader.close()
    return keys


@pytest.mark.parametrize(("until", "removed"), [(0.0, 2), (math.inf, 6)])
async def test_an_index_is_edited_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: float, removed: int
) -> None:
    """One transaction is always made."""
    await filled(LmdbTier(tmp_path, 16 * MIB, reserve_bytes=0))
    monkeypatch.setattr(remove, "REMOVED_AT_ONCE", 2)
    reader = LmdbReader(tmp_path, is_owned=False)
    owner = reader.owner
    reader.close()
    marks = [remove.index_mark(tmp_path)]
    assert remove.remove_from_lmdb(tmp_path, owner, [], until) == 0
    marks.append(remove.index_mark(tmp_path))
    assert remove.remove_from_lmdb(tmp_path, owner, KEYS[2:], until) == removed
    marks.append(remove.index_mark(tmp_path))
    assert marks[0] == marks[1] != marks[2]
    kept = {*KEYS[:2], *KEYS[2 + removed :]}
    assert left(LmdbReader(tmp_path, is_owned=False)) == kept


@pytest.mark.parametrize(("until", "removed"), [(0.0, 1), (math.inf, 6)])
async def test_files_are_removed_until_the_time_is_over(
    tmp_path: Path, until: float, removed: int
) -> None:
    await filled(FileTier(tmp_path, 16 * MIB))
    reader = FileReader(tmp_path)
    assert remove.remove_files(reader, [], until) == 0
    assert remove.remove_files(reader, KEYS[2:], until) == removed
    assert left(reader) == {*KEYS[:2], *KEYS[2 + removed :]}


def test_a_folder_without_an_index_has_no_mark(tmp_path: Path) -> None:
    assert remove.index_mark(tmp_path) == b""


@pytest.mark.parametrize("page_bytes", [4 * KIB, 16 * KIB, 32 * KIB])
def test_the_mark_of_an_index_covers_both_meta_pages(tmp_path: Path, page_bytes: int) -> None:
    """LMDB writes them in turn. Its pages are those of the machine, up to 32 KiB."""
    content = bytearray(3 * page_bytes)
    (tmp_path / DATA_NAME).write_bytes(content)
    marks = {remove.index_mark(tmp_path)}
    for number in range(2):
        content[number * page_bytes + 100] = 1
        (tmp_path / DATA_NAME).write_bytes(content)
        marks.add(remove.index_mark(tmp_path))
    assert len(marks) == 3
