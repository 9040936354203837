"""``kvtiers export`` and ``import``: bytes are restored exactly, and damaged or foreign records are
refused one by one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offload.admin.verify import RateLimit
from offload.namespaces.inventory import find_namespaces
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import (
    CAPACITY,
    FIELDS,
    OTHER,
    ROOT,
    SIZE,
    damage,
    flip,
    kvtiers,
    make_rank_folder,
    payload_offset,
    rank_folder_of,
    writer,
)
from tests.offload.cli.test_verify import RESET
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.offline.archive import ARCHIVE_HEAD_BYTES, Frame, PortableError, read_frames
from tiers.offline.offline_folder import Checker, RecordHealth
from tiers.testing import key_of, payload_of

NAME = Namespace.of(FIELDS).name


def contents(root: Path, key_file: str = "") -> dict[tuple[int, bytes], bytes]:
    """Payloads by rank and key, in the order of use; verifies every record."""
    found: list[tuple[int, int, bytes, bytes]] = []
    [namespace] = find_namespaces(root)
    for rank_folder in namespace.rank_folders:
        outside = rank_folder.open(key_file)
        checker = Checker(outside)
        for batch in outside.batches():
            for record in batch:
                health, payload = checker.check(record)
                assert health is RecordHealth.GOOD
                found.append((rank_folder.rank, record.use_ns, record.key, payload.tobytes()))
        outside.close()
    return {(rank, key): payload for rank, _, key, payload in sorted(found)}


def export(root: Path, file: Path, *options: object) -> dict:
    result = kvtiers("export", root, file, *options, "--json")
    assert result.code == 0, result.err
    return result.json


def frames(file: Path) -> list[Frame]:
    return list(read_frames(io.BytesIO(file.read_bytes())))


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("into", ["lmdb", "file"])
def test_round_trip(tmp_path: Path, kind: str, into: str) -> None:
    make_rank_folder(tmp_path / "a", [5, 3, 8, 1], kind=kind)
    make_rank_folder(tmp_path / "a", range(6), kind=kind, rank=1)
    file = tmp_path / "kv.export"
    exported = export(tmp_path / "a", file)
    assert [one["records"] for one in exported["rank_folders"]] == [4, 6]
    assert exported["file_bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    result = kvtiers(
        "import", file, tmp_path / "b", "--capacity", "24MiB", "--type", into, "--json"
    )
    assert (result.code, result.json["complete"]) == (0, True)
    assert [one["written"] for one in result.json["rank_folders"]] == [4, 6]
    before, after = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert list(before) == list(after), "the order of use has changed"
    assert before == after
    assert {key for _, key in after} >= {key_of(8)}
    assert after[0, key_of(8)] == payload_of(key_of(8), SIZE).tobytes()
    assert kvtiers("verify", tmp_path / "b").code == 0
    again = kvtiers("import", file, tmp_path / "b", "--json")  # the folder records its capacity
    assert [one["present"] for one in again.json["rank_folders"]] == [4, 6]
    assert contents(tmp_path / "b") == after


def test_a_server_finds_what_was_imported(tmp_path: Path) -> None:
    """The child opens the folder as a server does, and reads back everything that it holds."""
    make_rank_folder(tmp_path / "a", range(20))
    export(tmp_path / "a", tmp_path / "f")
    assert kvtiers("import", tmp_path / "f", tmp_path / "b", "--capacity", CAPACITY).code == 0
    assert not list((tmp_path / "b").rglob("quarantine*"))
    with writer(tmp_path / "b") as live:
        *_, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)
    kept = contents(tmp_path / "b")
    assert all((0, key_of(number)) in kept for number in range(20))


def test_export_beside_a_writer(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(10))
    with writer(tmp_path / "a") as live:
        for number in range(3):
            exported = export(tmp_path / "a", tmp_path / f"f{number}", "--rate", "0")
            [found] = exported["rank_folders"]
            assert found["damaged"] == 0
            assert found["records"] >= 10
        rounds, reads, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)
    assert rounds > 0
    assert reads > 200
    for frame in frames(tmp_path / "f2"):
        if frame.record is not None:
            expected = payload_of(frame.record.key, SIZE)
            assert np.array_equal(frame.record.payload, expected)
    assert kvtiers("import", tmp_path / "f2", tmp_path / "b", "--capacity", "24MiB").code == 0
    assert len(contents(tmp_path / "b")) == found["records"]


def test_an_export_interrupted_by_a_reset_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_rank_folder(tmp_path / "a", range(40))

    def reset_once(rate_limit: RateLimit, byte_count: int) -> float:
        monkeypatch.undo()
        subprocess.run([sys.executable, "-c", RESET, str(folder)], cwd=ROOT, check=True)
        return 0.0

    monkeypatch.setattr(RateLimit, "delay_s", reset_once)
    result = kvtiers("export", tmp_path / "a", tmp_path / "f")
    assert result.code == 1
    assert "was reset during the export" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_import_does_not_wait_for_a_server(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(3))
    export(tmp_path / "a", tmp_path / "f")
    with writer(tmp_path / "b") as live:
        result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--capacity", "24MiB")
        assert result.code == 1
        assert f"in use by pid {live.pid}" in result.err
        *_, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)


def test_damaged_records_are_left_out_of_the_export(tmp_path: Path) -> None:
    damage(make_rank_folder(tmp_path / "a", range(5)), 2)
    result = kvtiers("export", tmp_path / "a", tmp_path / "f", "--json")
    assert result.code == 1
    [found] = result.json["rank_folders"]
    assert (found["records"], found["damaged"]) == (4, 1)
    keys = {frame.record.key for frame in frames(tmp_path / "f") if frame.record}
    assert keys == {key_of(number) for number in (0, 1, 3, 4)}


def test_one_damaged_record_of_an_export_is_refused(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(6))
    export(tmp_path / "a", tmp_path / "f")
    records = [frame for frame in frames(tmp_path / "f") if frame.kind == "R"]
    flip(tmp_path / "f", records[2].at + ARCHIVE_HEAD_BYTES + 2000)  # payload
    flip(tmp_path / "f", records[4].at + ARCHIVE_HEAD_BYTES + 20)  # key
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--capacity", "24MiB", "--json")
    assert (result.code, result.json["complete"]) == (1, False)
    [found] = result.json["rank_folders"]
    assert (found["written"], found["damaged"]) == (4, 2)
    before, after = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {key for _, key in after} == {key_of(number) for number in (0, 1, 3, 5)}
    assert all(before[where] == payload for where, payload in after.items())


@pytest.mark.parametrize("where", ["head", "middle", "end"])
def test_everything_after_a_damaged_header_is_lost(tmp_path: Path, where: str) -> None:
    make_rank_folder(tmp_path / "a", range(6))
    export(tmp_path / "a", tmp_path / "f")
    records = [frame for frame in frames(tmp_path / "f") if frame.kind == "R"]
    if where == "head":
        flip(tmp_path / "f", records[3].at + 9)
    else:
        content = (tmp_path / "f").read_bytes()
        cut = records[3].at + (ARCHIVE_HEAD_BYTES + 500 if where == "middle" else 0)
        (tmp_path / "f").write_bytes(content[:cut])
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--capacity", "24MiB", "--json")
    assert result.code == 1
    assert str(records[3].at) in result.json["problem"]
    assert result.json["rank_folders"][0]["written"] == 3
    assert len(contents(tmp_path / "b")) == 3


def test_any_flipped_bit_of_an_export_is_detected(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(2))
    export(tmp_path / "a", tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    step = max(1, len(whole) // 150)
    for at in [*range(0, 700, 3), *range(700, len(whole), step)]:
        changed = bytearray(whole)
        changed[at] ^= 4
        try:
            frames = list(read_frames(io.BytesIO(bytes(changed))))
        except PortableError:
            continue
        assert any(frame.about is None and frame.record is None for frame in frames), at


def test_encrypted_stores_are_exported_and_imported(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("cd" * 32)
    key_file.chmod(0o600)
    make_rank_folder(tmp_path / "a", range(3), key_file=str(key_file), compress=True)
    make_rank_folder(tmp_path / "plain", range(3))
    other = tmp_path / "other"
    other.write_text("ab" * 32)
    other.chmod(0o600)
    for key in ([], ["--key-file", other]):
        left_out = kvtiers("export", tmp_path / "a", tmp_path / "no", "--overwrite", "--json", *key)
        assert left_out.code == 1
        assert left_out.json["rank_folders"][0]["unread"] == 3
    export(tmp_path / "a", tmp_path / "f", "--key-file", key_file)
    for root, key, words in (
        ("a", [], "encrypted: give"),
        ("a", [other], "other does not have the key of all records of the target"),
        ("plain", [key_file], "not encrypted"),
    ):
        options = ["--key-file", *key] if key else []
        result = kvtiers("import", tmp_path / "f", tmp_path / root, *options, "--json")
        assert words in result.json["rank_folders"][0]["refused"]
    assert len(contents(tmp_path / "plain")) == 3
    assert len(contents(tmp_path / "a", str(key_file))) == 3
    options = ["--capacity", "24MiB", "--key-file", key_file, "--compress"]
    assert kvtiers("import", tmp_path / "f", tmp_path / "b", *options).code == 0
    assert contents(tmp_path / "b", str(key_file)) == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "16MiB"], "records would be dropped"),
        (["--type", "file"], "is of type lmdb"),
    ],
)
def test_an_import_that_would_harm_a_store_is_refused(
    tmp_path: Path, options: list[str], words: str
) -> None:
    make_rank_folder(tmp_path / "a", range(3))
    make_rank_folder(tmp_path / "b", range(50, 54))
    export(tmp_path / "a", tmp_path / "f")
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--json", *options)
    [found] = result.json["rank_folders"]
    assert (result.code, found["left"]) == (1, 3)
    assert words in found["refused"]
    assert len(contents(tmp_path / "b")) == 4
    assert kvtiers("import", tmp_path / "f", tmp_path / "b").code == 0
    assert len(contents(tmp_path / "b")) == 7


def everything(root: Path) -> dict[Path, bytes]:
    """Every file except those that only record readers or the last user."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "lock.mdb"]
    return {path: path.read_bytes() for path in files if path.suffix not in (".claim", ".lock")}


@pytest.mark.parametrize(
    ("there", "capacity"),
    [("nothing", ""), ("nothing", "1EiB"), ("a tier", "1EiB"), ("a tier", "1GiB")],
)
def test_an_impossible_capacity_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: str, there: str
) -> None:
    """An index for 1 EiB fits nowhere, and one for 1 GiB does not fit on a disk that is nearly
    full."""
    make_rank_folder(tmp_path / "a", range(3))
    make_rank_folder(tmp_path / "a", range(3), rank=1)
    export(tmp_path / "a", tmp_path / "f")
    (tmp_path / "b").mkdir()
    if there == "a tier":
        make_rank_folder(tmp_path / "b", range(50, 54))
        make_rank_folder(tmp_path / "b", range(50, 54), rank=1)
    before = everything(tmp_path / "b")
    options = ["--capacity", capacity] if capacity else []
    if capacity == "1GiB":
        nearly_full = list(os.statvfs(tmp_path))
        nearly_full[4] = 100  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(nearly_full))
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--json", *options)
    assert result.code == 1
    assert [found["left"] for found in result.json["rank_folders"]] == [3, 3]
    for found in result.json["rank_folders"]:
        assert "--capacity: the index" in found["refused"] or "give --capacity" in found["refused"]
    monkeypatch.undo()
    assert everything(tmp_path / "b") == before
    assert capacity or list((tmp_path / "b").iterdir()) == []
    options = [] if there == "a tier" else ["--capacity", CAPACITY]
    assert kvtiers("import", tmp_path / "f", tmp_path / "b", *options).code == 0


def test_records_of_another_form_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rank_folder(tmp_path / "a", range(3))
    export(tmp_path / "a", tmp_path / "f")
    monkeypatch.setattr("tests.offload.cli.rank_folders.RECORD_NAMESPACE", b"another form....")
    make_rank_folder(tmp_path / "b", range(2))
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--json")
    assert "another layout" in result.json["rank_folders"][0]["refused"]


def test_a_full_store_reports_how_many_records_were_left_out(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(150))
    export(tmp_path / "a", tmp_path / "f")
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", "--capacity", "4MiB", "--json")
    [found] = result.json["rank_folders"]
    assert result.code == 1
    assert found["written"] + found["left"] == 150
    assert 50 < found["written"] < 110
    assert len(contents(tmp_path / "b")) == found["written"]


def test_choosing_a_namespace(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(2))
    make_rank_folder(tmp_path / "a", range(3), fields=OTHER)
    result = kvtiers("export", tmp_path / "a", tmp_path / "f")
    assert result.code == 2
    assert "2 of them match" in result.err
    assert f"{NAME} (tiny/llama)" in result.err
    none = kvtiers("export", tmp_path / "a", tmp_path / "f", "--namespace", "zz", "--model", "m")
    assert none.code == 2
    assert '--namespace "zz" with --model "m": matches nothing. Known: ' in none.err
    assert export(tmp_path / "a", tmp_path / "f", "--model", "tiny/qwen")["model"] == "tiny/qwen"
    again = kvtiers("export", tmp_path / "a", tmp_path / "f", "--namespace", NAME[:6])
    assert again.code == 2
    assert "exists. Name another file, or give --overwrite." in again.err
    export(tmp_path / "a", tmp_path / "f", "--namespace", NAME[:6], "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "f"]


def test_bad_input_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"something else altogether")
    result = kvtiers("import", file, tmp_path / "b", "--capacity", "1GiB")
    assert result.code == 1
    assert "not an export of kvtiers" in result.err
    result = kvtiers("import", tmp_path / "no", tmp_path / ("a" * 32), "--type", "x")
    assert result.code == 2
    for words in (
        "3 problems",
        "no: does not exist",
        "is a namespace, or is inside one",
        '--type: is unknown (got "x")',
    ):
        assert words in result.err
    os.mkfifo(tmp_path / "pipe")
    result = kvtiers("import", tmp_path / "pipe", tmp_path / "b", "--capacity", "1GiB")
    assert "is not a file" in result.err
    result = kvtiers("export", tmp_path / "no", tmp_path / "x" / "y", "--rate", "fast")
    assert "3 problems" in result.err
    assert not (tmp_path / "b").exists()


def test_offsets_in_the_test_files_are_right(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(2))
    assert folder == rank_folder_of(tmp_path)
    at = payload_offset(folder, 1)
    content = (folder / PAYLOAD_NAME).read_bytes()
    assert content[at : at + SIZE] == payload_of(key_of(1), SIZE).tobytes()
