"""Every option of a configured tier reaches the tier itself."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.config.schema import OffloadConfig, parse_config, tier_names
from offload.config.tier_capacity import SMALL_FILES_BYTES, check_capacity
from offload.config.tier_types import TIER_TYPES
from offload.worker import tier_factory
from offload.worker.tier_factory import TierSpec, make_tier
from tiers.base import ReadOutcome, WriteOutcome
from tiers.files.tier import FileTier
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.tier import LmdbTier
from tiers.testing import aligned

RECORD = 64 * 1024
CAPACITY = 64 << 20


def spec(tmp_path: Path, epoch: int = 0, **options: Any) -> TierSpec:
    """A tier in ``tmp_path``, as the connector would describe it."""
    table = {"type": "lmdb", "path": str(tmp_path), "capacity": CAPACITY, "reserve": 0} | options
    config = parse_config({"cpu": {"capacity": 1 << 20}, "tiers": [table]})
    folder = tmp_path / "rank-0"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = tier_names(config)[0]
    return TierSpec("$.tiers[0]", name, config.tiers[0], folder, CAPACITY, b"n" * 16, 0, epoch)


def payload(seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 255, RECORD, dtype=np.uint8)


async def write_one(tier: Any, key: bytes, data: Any) -> None:
    await tier.open()
    assert await tier.write([key], [data]) == [WriteOutcome.OK]
    await tier.aclose()


async def read_one(tier: Any, key: bytes) -> tuple[ReadOutcome, Any]:
    into = np.zeros(RECORD, dtype=np.uint8)
    await tier.open()
    outcome = (await tier.read([key], [into]))[0]
    await tier.aclose()
    return outcome, into


def test_every_type_of_tier_can_be_created() -> None:
    assert tier_factory._MAKERS.keys() == TIER_TYPES.keys()


def test_options_reach_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LmdbOptions] = []

    def lmdb(*place: Any, options: LmdbOptions) -> LmdbTier:
        made.append(options)
        return LmdbTier(*place, options=options)

    monkeypatch.setattr(tier_factory, "LmdbTier", lmdb)
    given = spec(tmp_path, io_threads=7, recovery="strict", direct_io="off", compression="zstd")
    tier = make_tier(given, RECORD)
    assert isinstance(tier, LmdbTier)
    [options] = made
    assert options.io_threads == 7
    assert options.recovery is Recovery.STRICT
    assert options.direct_io is False
    assert options.compress is True
    assert options.reserve_bytes == 0
    assert options.record_bytes == RECORD
    assert (options.namespace, options.epoch) == (b"n" * 16, 0)


KINDS = [{"type": "lmdb"}, {"type": "lmdb", "shared": True}, {"type": "file"}]


@pytest.mark.parametrize("kind", KINDS, ids=["lmdb", "shared lmdb", "file"])
@pytest.mark.parametrize(
    ("slot", "smallest", "ranks"),
    [(4096, 4096, 1), (1 << 20, 4096, 2), (65536, 65536, 4), (3 << 20, 1 << 20, 1)],
)
async def test_the_smallest_capacity_in_the_message_holds_a_chunk(
    tmp_path: Path, kind: dict[str, Any], slot: int, smallest: int, ranks: int
) -> None:
    """A capacity that is refused as far too small would hold none."""

    def asked(capacity: int | str) -> OffloadConfig:
        table = {"path": str(tmp_path), "capacity": capacity, "reserve": 0} | kind
        return parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [table]})

    async def stored(config: OffloadConfig) -> WriteOutcome:
        share = config.tiers[0].capacity // ranks - SMALL_FILES_BYTES
        folder = tmp_path / str(share)
        tier = make_tier(
            TierSpec("", "tier", config.tiers[0], folder, share, b"n" * 16, 0, 0), smallest
        )
        await tier.open()
        [outcome] = await tier.write([b"k" * 36], [aligned(slot)])
        await tier.aclose()
        return outcome

    [problem] = check_capacity(asked(1), slot, ranks, smallest)
    assert problem.where == "$.tiers[0].capacity"
    least = asked(problem.fix.removeprefix("Give at least ").removesuffix("."))
    assert check_capacity(least, slot, ranks, smallest) == []
    assert await stored(least) is WriteOutcome.OK
    if kind["type"] == "lmdb":
        less = asked(least.tiers[0].capacity // 3 * 2)
        assert len(check_capacity(less, slot, ranks, smallest)) == 1
        outcome = WriteOutcome.FULL
        with contextlib.suppress(ValueError):  # it does not even open
            outcome = await stored(less)
        assert outcome is WriteOutcome.FULL


def test_a_file_tier_is_created(tmp_path: Path) -> None:
    table = {"type": "file", "path": str(tmp_path), "capacity": CAPACITY}
    config = parse_config({"cpu": {"capacity": 1 << 20}, "tiers": [table, table | {"path": "/x"}]})
    assert tier_names(config) == ["file", "file2"]
    made = TierSpec("", "file", config.tiers[0], tmp_path, CAPACITY, b"n" * 16, 0, 0)
    assert isinstance(make_tier(made, RECORD), FileTier)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_an_encrypted_tier_contains_no_plain_text(tmp_path: Path, encrypted: bool) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(os.urandom(32).hex() + "\n")
    key_file.chmod(0o600)
    options = {"encryption": {"key_file": str(key_file)}} if encrypted else {}
    data = payload()
    await write_one(make_tier(spec(tmp_path / "kv", **options), RECORD), b"k" * 36, data)
    stored = b"".join(f.read_bytes() for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert (data.tobytes()[1000:1064] in stored) is not encrypted
    outcome, back = await read_one(make_tier(spec(tmp_path / "kv", **options), RECORD), b"k" * 36)
    assert outcome is ReadOutcome.OK
    assert np.array_equal(back, data)


async def test_an_epoch_begun_elsewhere_discards_records_even_after_recovery_off(
    tmp_path: Path,
) -> None:
    """The scheduler raises the epoch in the file; the tier may be killed before it gets the
    reset."""
    key = b"k" * 36
    off = make_tier(spec(tmp_path, recovery="off"), RECORD)
    await off.open()
    await off.aclose()
    await write_one(make_tier(spec(tmp_path), RECORD), key, payload())
    assert (await read_one(make_tier(spec(tmp_path), RECORD), key))[0] is ReadOutcome.OK
    assert (await read_one(make_tier(spec(tmp_path, epoch=1), RECORD), key))[0] is ReadOutcome.MISS
