"""``verify`` and ``inspect`` describe a rank's folder as a starting server would treat it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from offload.errors import OffloadError
from offload.namespaces.epoch_file import EPOCH_NAME, bump_epoch
from offload.namespaces.manifest import MANIFEST_NAME, Namespace, write_manifest
from offload.worker.tier_factory import TierSpec, make_tier
from tests.offload.cli.rank_folders import kvtiers
from tests.offload.worker.reopening_child import NAMESPACE, places
from tiers.base import TierInfo, TierIoError, WriteOutcome
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.testing import key_of, payload_of

KEYS = [key_of(number) for number in range(8)]
SIZE = 8192

Damage = Callable[[Path], object]
"""A function that gets the folder of a namespace."""


def rank_of(home: Path) -> Path:
    return home / "replica-0" / "rank-0"


async def start(root: Path, **options: Any) -> tuple[TierInfo, int]:
    """The keys that a server finds at its start, and the number of folders that were set aside. The
    server stores ``KEYS`` and ends."""
    [spec] = places(root, **options).specs()
    try:
        tier = make_tier(spec, 4096)
        try:
            info = await tier.open()
            outcomes = await tier.write(KEYS, [payload_of(key, SIZE) for key in KEYS])
            assert outcomes == [WriteOutcome.OK] * len(KEYS)
            return info, spec.set_aside + tier.stats()["quarantined"]
        finally:
            await tier.aclose()
    finally:
        release(spec)


def release(spec: TierSpec) -> None:
    """Release the claim, as the end of a process does."""
    assert spec.claim is not None
    spec.claim.close()


def edited(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    def damage(home: Path) -> None:
        path = home / name
        path.write_bytes(edit(path.read_bytes()))

    return damage


def removed(name: str) -> Damage:
    return lambda home: (home / name).unlink()


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def of_another_rank(home: Path) -> None:
    """Run ``cp -r rank-1 rank-0``, as a user who restores a copy does."""
    rank_of(home).rename(home / "replica-0" / "rank-1")
    shutil.copytree(home / "replica-0" / "rank-1", rank_of(home))


def with_the_manifest_of(fields: dict[str, str]) -> Damage:
    def damage(home: Path) -> None:
        (home / MANIFEST_NAME).unlink()
        write_manifest(home, Namespace.of(fields))

    return damage


def instead_a_file(home: Path) -> None:
    shutil.rmtree(home)
    home.write_text("x")


def instead_a_link(home: Path) -> None:
    home.rename(home.with_name("elsewhere"))
    home.symlink_to("elsewhere")


REPLICA, RANK = "replica-0", "replica-0/rank-0"


def garbled(content: bytes) -> bytes:
    """LMDB's two meta pages, and the same noise in each run."""
    return content[:8192] + Random(0).randbytes(len(content) - 8192)


FOLDERS: dict[str, tuple[Damage, str]] = {
    "a flipped manifest": (edited(MANIFEST_NAME, flipped), "is not a manifest"),
    "a changed manifest": (
        edited(MANIFEST_NAME, lambda content: content.replace(b'"a"', b'"b"')),
        "its fields do not match its namespace",
    ),
    "no manifest": (removed(MANIFEST_NAME), "has no manifest"),
    "another's manifest": (with_the_manifest_of({"model": "b"}), "manifest of another namespace"),
    "a broken epoch": (edited(f"{REPLICA}/{EPOCH_NAME}", flipped), "epoch is damaged"),
    "no epoch": (removed(f"{REPLICA}/{EPOCH_NAME}"), "its epoch file is missing"),
    "a file": (instead_a_file, "is not a folder"),
    "a link": (instead_a_link, "is not a folder"),
}
LMDB: dict[str, tuple[Damage, str]] = {
    "an empty index": (edited(f"{RANK}/data.mdb", lambda _: b""), "data.mdb is empty, beside"),
    "no index": (removed(f"{RANK}/data.mdb"), "data.mdb is missing, beside"),
    "a cut index": (edited(f"{RANK}/data.mdb", lambda found: found[:9000]), "not a complete index"),
    "a garbled index": (
        edited(
            f"{RANK}/data.mdb", lambda found: found[:8192] + Random(0).randbytes(len(found) - 8192)
        ),
        "structural faults",
    ),
    "no payloads": (removed(f"{RANK}/{PAYLOAD_NAME}"), f"its {PAYLOAD_NAME} is missing"),
    "another's payloads": (
        edited(f"{RANK}/{PAYLOAD_NAME}", lambda found: found[:8] + bytes(16) + found[24:]),
        "is not the one that its index names",
    ),
    "not written by kvtiers": (
        edited(f"{RANK}/{PAYLOAD_NAME}", lambda found: b"x" * 4096 + found[4096:]),
        "was not written by kvtiers",
    ),
    "another rank": (of_another_rank, ""),
}
FILE: dict[str, tuple[Damage, str]] = {
    "an epoch that is no number": (edited(f"{RANK}/epoch", lambda _: b"x"), "not readable"),
    "no epoch of the tier": (removed(f"{RANK}/epoch"), "its epoch file is missing"),
    "an epoch that is not there": (edited(f"{RANK}/epoch", lambda _: b"6"), "epoch-6 is missing"),
}
CASES = [
    *((kind, name) for kind in ("lmdb", "file") for name in FOLDERS),
    *(("lmdb", name) for name in LMDB if name != "another rank"),
    *(("file", name) for name in FILE),
]
BY_NAME = FOLDERS | LMDB | FILE


def contents(root: Path) -> dict[str, bytes]:
    """Every file except locks and claims."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in files
        if not path.name.endswith((".lock", ".claim", "lock.mdb"))
    }


def judged(root: Path, command: str, *options: str) -> tuple[int, list[str]]:
    """Exit code of a command, and the problems that it names for namespaces and rank folders."""
    result = kvtiers(command, root, *options, "--json")
    found = result.json
    if command == "verify":
        problems, folders = list(found["namespaces"].values()), found["rank_folders"]
    else:
        problems = [namespace["problem"] for namespace in found["namespaces"]]
        folders = [one for namespace in found["namespaces"] for one in namespace["rank_folders"]]
    return result.code, problems + [folder["problem"] for folder in folders]


@pytest.mark.parametrize("kind", ["lmdb", "file"])
async def test_an_intact_store_is_intact_for_every_command(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The control for the tests below."""
    assert (await start(tmp_path, type=kind))[1] == 0
    for command in ("verify", "inspect"):
        code, problems = judged(tmp_path, command)
        assert (code, set(problems)) in ((0, {""}), (0, set()))
    for options in ({}, {"recovery": "strict"} if kind == "lmdb" else {}):
        info, set_aside = await start(tmp_path, type=kind, **options)
        assert (info.record_count, set_aside) == (len(KEYS), 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_verify_and_inspect_report_what_a_start_would_discard(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, words = BY_NAME[name]
    await start(tmp_path, type=kind)
    damage(tmp_path / NAMESPACE.name)
    caplog.clear()
    for command, options in (("inspect", []), ("verify", ["--check-only"]), ("verify", [])):
        code, problems = judged(tmp_path, command, *options)
        assert code == 1, command
        assert any(words in problem for problem in problems), (command, problems)
    if kind == "lmdb":
        before = contents(tmp_path)
        with pytest.raises((TierIoError, OffloadError), match=words):
            await start(tmp_path, type=kind, recovery="strict")
        assert contents(tmp_path) == before
    info, set_aside = await start(tmp_path, type=kind)
    assert (info.record_count, set_aside) == (0, 1)
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert words in line
    assert judged(tmp_path, "verify")[0] == judged(tmp_path, "inspect")[0] == 0
    info, set_aside = await start(tmp_path, type=kind)
    assert (info.record_count, set_aside) == (len(KEYS), 0)


@pytest.mark.parametrize("name", ["an empty index", "no index", "no payloads"])
async def test_verify_and_inspect_on_a_store_that_was_shared(tmp_path: Path, name: str) -> None:
    damage, words = LMDB[name]
    await start(tmp_path, shared=True)
    assert judged(tmp_path, "verify")[0] == judged(tmp_path, "inspect")[0] == 0
    damage(tmp_path / NAMESPACE.name)
    for command in ("inspect", "verify"):
        code, problems = judged(tmp_path, command)
        assert code == 1
        assert any(words in problem for problem in problems)
    with pytest.raises(TierIoError, match=words):
        await start(tmp_path, shared=True, recovery="strict")
    info, set_aside = await start(tmp_path, shared=True)
    assert (info.record_count, set_aside) == (0, 1)


@pytest.mark.parametrize("kind", ["lmdb", "file"])
async def test_records_of_a_later_epoch_than_recorded_are_damage(tmp_path: Path, kind: str) -> None:
    """A copy that was not made at a single moment (``test_tier_folders`` has the start)."""
    await start(tmp_path, type=kind)
    file = tmp_path / NAMESPACE.name / REPLICA / EPOCH_NAME
    early = file.read_bytes()
    bump_epoch(file.parent)
    await start(tmp_path, type=kind)
    assert judged(tmp_path, "verify")[0] == 0
    file.write_bytes(early)
    for command in ("inspect", "verify"):
        code, problems = judged(tmp_path, command)
        assert code == 1
        assert any("of epoch 2, beyond epoch 0" in problem for problem in problems)
    if kind == "lmdb":
        with pytest.raises(TierIoError, match="of epoch 2, beyond epoch 0"):
            await start(tmp_path, type=kind, recovery="strict")
    info, set_aside = await start(tmp_path, type=kind)
    assert (info.record_count, set_aside) == (0, 1)


@pytest.mark.parametrize(("kind", "was_shared"), [("lmdb", False), ("lmdb", True), ("file", False)])
async def test_records_of_replaced_weights_are_not_damage(
    tmp_path: Path, kind: str, was_shared: bool
) -> None:
    """The server was killed after a reset: the commands report that none of the records will be
    used, and no damage."""
    await start(tmp_path, type=kind, shared=was_shared)
    await start(tmp_path, type=kind)
    bump_epoch(tmp_path / NAMESPACE.name / REPLICA)
    for command in ("inspect", "verify"):
        result = kvtiers(command, tmp_path, "--json")
        found = result.json["rank_folders" if command == "verify" else "namespaces"][0]
        [folder] = [found] if command == "verify" else found["rank_folders"]
        assert (result.code, folder["standing"], folder["problem"]) == (0, "stale", "")
        assert "none of its records will be used" in folder["remark"]
        assert "none of its records will be used" in kvtiers(command, tmp_path).out
    assert await start(tmp_path, type=kind, **_strict(kind)) is not None
    assert kvtiers("verify", tmp_path, "--json").json["rank_folders"][0]["standing"] == "whole"


def _strict(kind: str) -> dict[str, str]:
    return {"recovery": "strict"} if kind == "lmdb" else {}


@pytest.mark.parametrize("kind", ["lmdb", "file"])
async def test_the_records_of_another_rank_are_damage(tmp_path: Path, kind: str) -> None:
    await start(tmp_path, type=kind)
    replica = tmp_path / NAMESPACE.name / REPLICA
    shutil.copytree(replica / "rank-0", replica / "rank-1")
    for command in ("inspect", "verify"):
        code, problems = judged(tmp_path, command)
        assert code == 1
        assert [problem for problem in problems if "rank 0" in problem]


def test_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    [spec] = places(tmp_path).specs()
    release(spec)
    path = tmp_path / NAMESPACE.name / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
    before = contents(tmp_path)
    for command in ("inspect", "verify"):
        code, problems = judged(tmp_path, command)
        assert code == 1
        assert any("newer than this build" in problem for problem in problems)
    with pytest.raises(OffloadError, match="newer than this build"):
        places(tmp_path).specs()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("name", [MANIFEST_NAME, EPOCH_NAME])
def test_what_cannot_be_read_is_left_alone(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands name the file and the error, as a server does that refuses to start."""
    root, export = tmp_path / "tier", tmp_path / "export"
    asyncio.run(start(root, type=kind))
    assert kvtiers("export", root, export).code == 0
    real, before = os.open, contents(root)

    def stale(file: Any, *arguments: Any, **options: Any) -> int:
        if Path(file).name == name and "rank-" not in str(file):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(file, *arguments, **options)

    words = f"{name} cannot be read: Stale file handle"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale)
        with pytest.raises(OffloadError, match=words):
            asyncio.run(start(root, type=kind))
        for command, options in (("inspect", []), ("verify", ["--check-only"]), ("verify", [])):
            code, problems = judged(root, command, *options)
            assert code == 1, command
            assert any(problem.endswith(words) for problem in problems), (command, problems)
        [namespace] = kvtiers("inspect", root, "--json").json["namespaces"]
        assert [one["standing"] for one in namespace["rank_folders"]] == ["unreadable"]
        for words_of in (("export", root, tmp_path / "other"), ("import", export, root)):
            result = kvtiers(*words_of)
            assert result.code
            assert words in result.err
        assert kvtiers("clear", root, "--set-aside", "--yes").code == 0
    assert contents(root) == before
    info, set_aside = asyncio.run(start(root, type=kind))
    assert (info.record_count, set_aside) == (len(KEYS), 0)
