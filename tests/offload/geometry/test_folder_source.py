"""Records of another geometry are read exactly, whether their owner is running or not, and never
written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from offload.namespaces.epoch_file import bump_epoch
from offload.namespaces.folders import replica_folder
from tests.offload.geometry.engines_on_disk import (
    KEYS,
    geometry_of,
    namespace_of,
    opened,
    payload,
    places,
    read,
    release,
    state_of,
    write,
)
from tiers.base import ReadOutcome, TierClosedError, WriteOutcome
from tiers.testing import all_keys


@pytest.mark.parametrize("kind", ["lmdb", "file", "shared", "shared_file"])
@pytest.mark.parametrize(("stored", "now"), [(2, 1), (1, 2), (4, 2), (2, 4)])
async def test_records_of_other_ranks_are_read(
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
            size = payload(geometry_of(now, rank), KEYS[0]).nbytes
            if options.get("shared"):
                assert await tier.present([*KEYS, b"z" * 36]) == [True] * len(KEYS) + [False]
            else:
                assert sorted(await all_keys(tier)) == [(key, size) for key in KEYS]
            for key in KEYS:
                assert await read(tier, key, now, rank) is ReadOutcome.OK
            assert await read(own, KEYS[0], now, rank) is ReadOutcome.MISS
        release(specs)
    assert state_of(theirs) == before


async def test_encrypted_records_need_their_key(tmp_path: Path) -> None:
    secrets = [tmp_path / "right", tmp_path / "wrong"]
    for number, secret in enumerate(secrets):
        secret.write_bytes(bytes(range(number, number + 32)).hex().encode())
        secret.chmod(0o600)
    await write(tmp_path / "kv", 2, encryption={"key_file": str(secrets[0])})
    for secret, outcome in zip(secrets, (ReadOutcome.OK, ReadOutcome.MISS), strict=True):
        key = {"encryption": {"key_file": str(secret)}, "capacity": "640MiB"}
        specs = places(tmp_path / "kv", 1, how="translate", **key).specs()
        async with opened(specs, 1) as tier:
            assert await read(tier, KEYS[0], 1) is outcome
        release(specs)
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert await read(tier, KEYS[0], 1) is ReadOutcome.MISS
    release(specs)


async def test_nothing_is_ever_written_or_deleted_and_nothing_is_found_after_a_reset(
    tmp_path: Path,
) -> None:
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


async def test_chunks_that_only_some_ranks_have_are_absent(tmp_path: Path) -> None:
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


async def test_damage_is_detected(tmp_path: Path) -> None:
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
from tests.offload.geometry.engines_on_disk import KEYS, opened, places, payload, geometry_of
async def main():
    path = Path(sys.argv[1])
    shared = bool(int(sys.argv[2]))
    specs = [places(path, 2, rank, shared=shared).specs() for rank in range(2)]
    async with opened(specs[0], 0) as one, opened(specs[1], 0) as two:
        print("ready", flush=True)
        for line in sys.stdin:
            what = line.strip()
            for rank, tier in enumerate((one, two)):
                if what == "evict":
                    await tier.delete(KEYS[:3])
                    new = bytes([6]) * 32 + KEYS[0][-4:]
                    await tier.write([new], [payload(geometry_of(2, rank), new)])
                elif what == "reset":
                    await tier.reset(1)
            print("done", flush=True)
asyncio.run(main())
"""


@contextmanager
def live_owner(path: Path, shared: bool) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(path), str(int(shared))]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield owner
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_live_owner_that_evicts_resets_and_is_killed(tmp_path: Path, shared: bool) -> None:
    """Removed records are misses; no bytes that are read are ever wrong (see ``read``)."""
    await write(tmp_path / "kv", 2, shared=shared)
    new = bytes([6]) * 32 + KEYS[0][-4:]
    with live_owner(tmp_path / "kv", shared) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None

        def order(what: str) -> None:
            print(what, file=owner.stdin, flush=True)
            assert owner.stdout is not None
            assert owner.stdout.readline() == "done\n"

        assert owner.stdout.readline() == "ready\n"
        large = {"capacity": "640MiB", "shared": shared}
        specs = places(tmp_path / "kv", 1, how="translate", **large).specs()
        async with opened(specs, 1) as tier:
            assert [await read(tier, key, 1) for key in KEYS] == [ReadOutcome.OK] * 6
            order("evict")
            found = [await read(tier, key, 1) for key in KEYS]
            assert found == [ReadOutcome.MISS] * 3 + [ReadOutcome.OK] * 3
            if shared:
                assert await tier.present([new, *KEYS]) == [True] + [False] * 3 + [True] * 3
                assert await read(tier, new, 1) is ReadOutcome.OK
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


async def test_records_that_do_not_match_their_description_are_not_read(tmp_path: Path) -> None:
    """The owner's next start uses other kernels: its geometry is written before its records
    disappear."""
    await write(tmp_path / "kv", 2)
    for rank in range(2):
        other = replace(geometry_of(2, rank), records=b"other kernels...")
        release(places(tmp_path / "kv", 2, rank, geometry=other).specs())
    specs = places(tmp_path / "kv", 1, how="translate", capacity="640MiB").specs()
    async with opened(specs, 1) as tier:
        assert await all_keys(tier) == []
    release(specs)
