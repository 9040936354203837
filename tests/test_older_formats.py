"""Tiers and an export that an older kvtiers has written are read, record by record.

``tests/data/tiers_of_cfc46e5.tar.xz`` was made with commit cfc46e5 (2026-11-22): a folder for each
kind of tier, of which one record of six has been deleted again, ``lmdb.export`` of the folder
``lmdb``, the key file of the encrypted tier, and the digests of all payloads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from offload.namespaces.folders import claim_rank_folder, share_rank_folder
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import FIELDS, RECORD_NAMESPACE, kvtiers
from tiers.base import ReadOutcome, Tier
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.tier import LmdbTier
from tiers.testing.records import aligned, all_keys

CAPACITY = 4 << 20
LMDB = {"reserve_bytes": 0, "grow_bytes": 1 << 20, "record_bytes": 4096}
TIERS: dict[str, tuple[type[Tier], dict[str, Any]]] = {
    "lmdb": (LmdbTier, LMDB),
    "lmdb-compressed": (LmdbTier, LMDB | {"compress": True}),
    "lmdb-encrypted": (LmdbTier, LMDB),
    "lmdb-shared": (SharedLmdbTier, LMDB),
    "file": (FileTier, {}),
    "file-shared": (SharedFileTier, {}),
}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "data/tiers_of_cfc46e5.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def digests(older: Path, kind: str) -> dict[bytes, tuple[int, str]]:
    """The lengths and digests of a tier's payloads, by key."""
    found = json.loads((older / "digests.json").read_text())[kind]
    return {bytes.fromhex(key): tuple(each) for key, each in found.items()}


async def contents(tier: Tier, expected: Iterable[tuple[bytes, int]]) -> dict[bytes, Any]:
    """The lengths and digests that an opened tier returns for these keys."""
    found: dict[bytes, Any] = {}
    for key, length in expected:
        into = aligned(length)
        [outcome] = await tier.read([key], [into])
        digest = hashlib.sha256(into.tobytes()).hexdigest()
        found[key] = (length, digest) if outcome is ReadOutcome.OK else outcome
    return found


@pytest.mark.parametrize("kind", TIERS)
async def test_a_tier_reads_what_an_older_one_has_written(older: Path, kind: str) -> None:
    make, options = TIERS[kind]
    if kind == "lmdb-encrypted":
        options = options | {"key_file": str(older / "key")}
    namespace, expected = Namespace.of(FIELDS), digests(older, kind)
    if "shared" in kind:
        claimed = share_rank_folder(older / kind, namespace, rank=0, engine="new")
    else:
        claimed = claim_rank_folder(older / kind, namespace, replica=0, rank=0, engine="new")
    with claimed:
        tier: Any = make(
            claimed.folder, CAPACITY, namespace=RECORD_NAMESPACE, epoch=claimed.epoch, **options
        )
        await tier.open()
        assert len(expected) == 5
        if "shared" not in kind:  # a shared tier is queried, not listed
            assert {key for key, _ in await all_keys(tier)} == set(expected)
        lengths = [(key, length) for key, (length, _) in expected.items()]
        assert await contents(tier, lengths) == expected
        deleted = (4).to_bytes(32, "big") + bytes(4)
        assert await contents(tier, [(deleted, 8192)]) == {deleted: ReadOutcome.MISS}
        await tier.aclose()
    assert not list((older / kind).rglob("quarantine*"))


@pytest.mark.parametrize("kind", TIERS)
def test_the_command_line_verifies_what_an_older_tier_has_written(older: Path, kind: str) -> None:
    options = ["--key-file", older / "key"] if kind == "lmdb-encrypted" else []
    result = kvtiers("verify", older / kind, *options, "--json")
    assert result.code == 0, result.err
    [folder] = result.json["rank_folders"]
    assert (folder["records"], folder["good"]) == (5, 5)


def test_an_older_export_is_imported(older: Path) -> None:
    result = kvtiers("import", older / "lmdb.export", older / "b", "--capacity", "4MiB", "--json")
    assert (result.code, result.json["complete"]) == (0, True)
    expected = digests(older, "lmdb")
    claimed = claim_rank_folder(older / "b", Namespace.of(FIELDS), replica=0, rank=0, engine="new")

    async def read() -> dict[bytes, Any]:
        tier = LmdbTier(
            claimed.folder, CAPACITY, namespace=RECORD_NAMESPACE, epoch=claimed.epoch, **LMDB
        )
        await tier.open()
        found = await contents(tier, [(key, length) for key, (length, _) in expected.items()])
        await tier.aclose()
        return found

    with claimed:
        assert asyncio.run(read()) == expected
