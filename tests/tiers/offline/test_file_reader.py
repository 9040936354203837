"""Another process reads a file tier, whose records may be far away (NFS)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.files.tier import FileTier
from tiers.offline import file_reader
from tiers.offline.file_reader import FileReader
from tiers.offline.offline_folder import ListedRecord
from tiers.offline.remove import remove_files
from tiers.record import Identity
from tiers.testing import KIB, MIB, OK, aligned, key_of, put

KEYS = [key_of(number) for number in range(8)]


async def filled(tier: FileTier) -> None:
    await tier.open()
    assert await put(tier, KEYS, 8 * KIB) == [OK] * 8
    await tier.aclose()


async def test_a_removal_reads_the_headers_of_its_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kvtiers clear`` opens the folder again for every batch, and a server that starts waits."""
    await filled(FileTier(tmp_path, 16 * MIB))
    read: list[str] = []
    read_head = file_reader._read_head

    def noted(path: Path) -> ListedRecord | None:
        read.append(path.name)
        return read_head(path)

    monkeypatch.setattr(file_reader, "_read_head", noted)
    reader = FileReader(tmp_path)
    assert reader.find(KEYS[3]) is not None
    assert remove_files(reader, KEYS[3:4], 0.0) == 1
    assert read == [reader.path_of(KEYS[3]).name]


async def test_records_can_be_read_that_were_written_after_the_folder_was_opened(
    tmp_path: Path,
) -> None:
    tier = FileTier(tmp_path, 16 * MIB)
    await tier.open()
    reader = FileReader(tmp_path)
    assert reader.owner is None
    assert await put(tier, KEYS, 8 * KIB) == [OK] * 8
    found = reader.find(KEYS[0])
    assert found is not None
    assert reader.load([found], [aligned(8 * KIB)]) == [True]
    assert reader.owner == Identity()
    await tier.aclose()
