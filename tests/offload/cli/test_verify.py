"""``kvtiers verify`` finds damaged records and nothing else, in idle folders and beside a live
writer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.admin.verify import RateLimit, VerifyResult, repair, scrub
from offload.cli.verify import REMARK_LINES_MAX
from offload.namespaces.inventory import RankFolder, find_namespaces
from tests.offload.cli.rank_folders import (
    OTHER,
    RECORD_NAMESPACE,
    ROOT,
    SIZE,
    damage,
    flip,
    kvtiers,
    make_rank_folder,
    open_index,
    payload_offset,
    records_of,
    writer,
)
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.index import Changes
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import Checker, ListedRecord, RecordHealth
from tiers.testing import key_of

Edit = Callable[[dict[bytes, bytes]], dict[bytes, bytes | None]]


def verify(root: Path, *options: object) -> dict:
    """The result for the only rank folder below a path."""
    result = kvtiers("verify", root, "--json", *options)
    answer = result.json
    [found] = answer["rank_folders"]
    assert result.err == "", "no progress bar without a terminal"
    assert (result.code, answer["ok"]) == (0 if not found["damaged"] else 1, result.code == 0)
    return found


def names(*numbers: int) -> set[str]:
    return {key_of(number).hex() for number in numbers}


def only_rank_folder(root: Path) -> RankFolder:
    [namespace] = find_namespaces(root)
    [rank_folder] = namespace.rank_folders
    return rank_folder


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_damaged_records_are_found_and_removed(tmp_path: Path, kind: str) -> None:
    folder = make_rank_folder(tmp_path, range(40), kind=kind)
    assert verify(tmp_path)["good"] == 40
    for number in (3, 17, 39):
        damage(folder, number)
    kept = verify(tmp_path, "--check-only")
    assert (set(kept["damaged"]), kept["removed"]) == (names(3, 17, 39), 0)
    found = verify(tmp_path)
    assert (found["records"], found["good"], found["removed"]) == (40, 37, 3)
    assert set(found["damaged"]) == names(3, 17, 39)
    again = verify(tmp_path)
    assert (again["records"], again["good"], again["damaged"]) == (37, 37, [])
    if kind == "lmdb":  # the folder is intact and clean: nothing is dropped or moved aside
        assert set(records_of(folder)) == {
            key_of(number) for number in set(range(40)) - {3, 17, 39}
        }
        assert not list(folder.glob("quarantine*"))


def swapped(values: dict[bytes, bytes]) -> dict[bytes, bytes | None]:
    return {key_of(1): values[key_of(2)], key_of(2): values[key_of(1)]}


def with_byte(at: int, change: int = 1) -> Edit:
    def edit(values: dict[bytes, bytes]) -> dict[bytes, bytes | None]:
        value = bytearray(values[key_of(1)])
        value[at] ^= change
        return {key_of(1): bytes(value)}

    return edit


def cut_off(values: dict[bytes, bytes]) -> dict[bytes, bytes | None]:
    return {key_of(1): values[key_of(1)][:-5]}


USE = 8
EDITS = {
    "two records swapped": (swapped, {1, 2}),
    "another rank": (with_byte(USE + 6), {1}),
    "another epoch": (with_byte(USE + 16), {1}),
    "another namespace": (with_byte(USE + 40), {1}),
    "another tag": (with_byte(USE + 72), {1}),
    "an enormous length": (with_byte(USE + 31, 0x7F), {1}),
    "compressed, it says": (with_byte(USE + 5), {1}),
    "a place beyond the file": (with_byte(USE + 88 + 6), {1}),
    "a value cut off": (cut_off, {1}),
}


@pytest.mark.parametrize("name", EDITS)
def test_the_content_of_the_index_is_checked_too(tmp_path: Path, name: str) -> None:
    edit, bad = EDITS[name]
    folder = make_rank_folder(tmp_path, range(5))
    edits = edit(records_of(folder))
    index = open_index(folder)
    index.apply(Changes(edits=edits))
    index.close()
    found = verify(tmp_path)
    assert set(found["damaged"]) == names(*bad)
    assert found["removed"] == len(bad)
    assert verify(tmp_path)["good"] == 5 - len(bad)


def test_a_file_record_with_a_damaged_header(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3), kind="file")
    first, second, _ = sorted(folder.glob("epoch-0/*"))
    flip(first, 0)  # the magic
    flip(second, 90)  # its key
    found = verify(tmp_path)
    assert {bytes.fromhex(key).decode() for key in found["damaged"]} == {first.name, second.name}
    assert not first.exists()
    assert verify(tmp_path)["good"] == 1


def test_without_the_check_of_payloads_damage_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(make_rank_folder(tmp_path, range(5)), 2)
    monkeypatch.setattr(LmdbReader, "load", lambda self, found, into: [True] * len(found))
    assert verify(tmp_path)["damaged"] == []
    monkeypatch.undo()
    assert set(verify(tmp_path)["damaged"]) == names(2)


REPLACE = """
import asyncio, sys
from tiers.lmdb.tier import LmdbTier
from tests.offload.cli.rank_folders import CAPACITY, RECORD_NAMESPACE, SIZE
from tiers.testing import key_of, put
async def main(folder):
    tier = LmdbTier(folder, CAPACITY, namespace=RECORD_NAMESPACE, reserve_bytes=0,
                    grow_bytes=1 << 20, record_bytes=SIZE)
    await tier.open()
    await tier.delete([key_of(n) for n in range(40)])
    await tier.aclose()  # so that the places are free
    await tier.open()
    await put(tier, [key_of(n) for n in range(100, 140)], SIZE)
    await tier.aclose()
asyncio.run(main(sys.argv[1]))
"""


def test_an_overwritten_extent_is_not_damage(tmp_path: Path) -> None:
    """The record was found, then removed, and its extent overwritten, before it was read."""
    folder = make_rank_folder(tmp_path, range(40))
    outside = LmdbReader(folder, is_owned=False)
    before = [record for batch in outside.batches() for record in batch]
    command = [sys.executable, "-c", REPLACE, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    checker = Checker(outside)
    healths = [checker.check(record)[0] for record in before]
    # A check without the second lookup would have only this:
    scratch = memory(SIZE)
    assert sum(outside.load([record], [scratch])[0] for record in before) < 40
    assert set(healths) <= {RecordHealth.GONE, RecordHealth.GOOD}
    assert RecordHealth.GONE in healths
    now = [record for batch in outside.batches() for record in batch]
    assert [checker.check(record)[0] for record in now] == [RecordHealth.GOOD] * 40
    outside.close()


RESET = REPLACE.replace("delete([key_of(n) for n in range(40)])", "reset(1)")


def test_a_concurrent_reset_is_not_damage(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(40))
    outside = LmdbReader(folder, is_owned=False)
    before = [record for batch in outside.batches() for record in batch]
    assert RESET != REPLACE
    subprocess.run([sys.executable, "-c", RESET, str(folder)], cwd=ROOT, check=True)
    checker = Checker(outside)
    # The epoch is that of the last lookup, so the first record may still be read in its earlier
    # state.
    assert {checker.check(record)[0] for record in before[1:]} == {RecordHealth.GONE}
    now = [record for batch in outside.batches() for record in batch]
    assert [checker.check(record)[0] for record in now] == [RecordHealth.GOOD] * 40
    assert outside.epoch == 1
    outside.close()


def memory(size: int):
    import numpy as np

    return np.empty(size, np.uint8)


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_verify_beside_a_writer_reports_and_disturbs_nothing(tmp_path: Path, kind: str) -> None:
    with writer(tmp_path, kind) as live:
        seen = gone = 0
        for _ in range(6):
            found = verify(tmp_path, "--rate", "0")
            assert (found["damaged"], found["owner_pid"]) == ([], live.pid)
            assert found["good"] + found["gone"] == found["records"]
            seen, gone = seen + found["records"], gone + found["gone"]
        rounds, reads, wrong, failures = live.stop()
    assert seen > 600
    assert (wrong, failures) == (0, 0)
    assert rounds > 0
    assert reads > 200
    assert verify(tmp_path)["good"] == pytest.approx(200, abs=8)


def test_damage_beside_a_writer_is_reported_and_left_to_it(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(6))  # not read by the writer
    places = {number: payload_offset(folder, number) for number in range(6)}
    with writer(tmp_path) as live:
        for number in (1, 4):
            flip(folder / PAYLOAD_NAME, places[number] + 7)
        found = verify(tmp_path, "--rate", "0")
        assert set(found["damaged"]) == names(1, 4)
        assert (found["removed"], found["owner_pid"]) == (0, live.pid)
        text = kvtiers("verify", tmp_path, "--rate", "0").out
        assert f"pid {live.pid} uses it" in text
        *_, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)
    after = verify(tmp_path)
    assert (set(after["damaged"]), after["removed"]) == (names(1, 4), 2)
    assert verify(tmp_path)["damaged"] == []


def scrubbed_with_damage(root: Path) -> VerifyResult:
    """The result for a rank folder with a damaged record, before the repair."""
    damage(make_rank_folder(root, range(6)), 2)
    result = VerifyResult(only_rank_folder(root))
    reader = result.rank_folder.open()
    scrub(result, reader, rate_limit=RateLimit(0), advance=lambda count: None)
    reader.close()
    return result


def test_a_server_that_starts_during_verify_keeps_its_index(tmp_path: Path) -> None:
    result = scrubbed_with_damage(tmp_path)
    assert len(result.damaged) == 1
    with writer(tmp_path) as live:
        repair(result, "")
        assert (result.removed, result.owner_pid) == (0, live.pid)
        *_, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)


def test_a_folder_that_is_removed_during_verify_is_reported(tmp_path: Path) -> None:
    result = scrubbed_with_damage(tmp_path)
    shutil.rmtree(result.rank_folder.folder)
    repair(result, "")
    assert result.removed == 0
    assert "was removed before its damaged records were" in result.problem


def test_encrypted_records_need_their_key(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    key_file.chmod(0o600)
    root = tmp_path / "kv"
    folder = make_rank_folder(root, range(4), key_file=str(key_file), compress=True)
    found = verify(root)
    assert (found["unread"], found["good"], found["damaged"]) == (4, 0, [])
    other = tmp_path / "other key"
    other.write_text("cd" * 32)
    other.chmod(0o600)
    result = kvtiers("verify", root, "--key-file", other, "--json")
    [found] = result.json["rank_folders"]
    assert (result.code, result.json["ok"]) == (1, False)
    assert (found["unread"], found["damaged"], found["removed"]) == (4, [], 0)
    text = f"4 encrypted records were not read: {other} does not have their key"
    assert text in kvtiers("verify", root, "--key-file", other).out
    damage(folder, 3)
    found = verify(root, "--key-file", key_file)
    assert (found["unread"], found["good"], set(found["damaged"])) == (0, 3, names(3))
    assert verify(root, "--key-file", key_file)["good"] == 3


def test_every_store_below_a_path(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(3))
    make_rank_folder(tmp_path, range(4), rank=1)
    damage(make_rank_folder(tmp_path, range(5), fields=OTHER), 0)
    result = kvtiers("verify", tmp_path, "--json")
    assert result.code == 1
    assert sorted(found["good"] for found in result.json["rank_folders"]) == [3, 4, 4]


def test_many_damaged_rank_folders_do_not_flood_the_screen(tmp_path: Path) -> None:
    """Problems of a whole folder come first; all folders together have a limit of lines."""
    for name in ("a", "b", "c"):
        folder = make_rank_folder(tmp_path, range(15), fields={"model": {"name": name}})
        for number in range(12):
            damage(folder, number)
    (folder / PAYLOAD_NAME).unlink()
    result = kvtiers("verify", tmp_path, "--check-only")
    below = result.out.splitlines()[7:]  # the table has a header and three rows
    assert len(below) == REMARK_LINES_MAX + 1
    assert sum("is missing" in line for line in below[:3]) == 1
    assert sum("damaged: key" in line for line in below) == REMARK_LINES_MAX - 1
    assert below[-1] == "and 5 more lines (--json has everything)"


def test_a_store_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    other = make_rank_folder(tmp_path, range(4), fields=OTHER)
    damage(other, 1)
    for break_it, words in (
        (lambda: flip(folder / PAYLOAD_NAME, 10), "is not the one that its index names"),
        (lambda: (folder / PAYLOAD_NAME).unlink(), "is missing"),
        (lambda: (folder / "data.mdb").write_bytes(b"x" * 8192), "damaged: "),
    ):
        break_it()
        result = kvtiers("verify", tmp_path, "--json", "--check-only")
        assert (result.code, result.json["ok"]) == (1, False)
        found = {one["namespace"]: one for one in result.json["rank_folders"]}
        assert words in found[folder.parents[1].name]["problem"]
        assert found[folder.parents[1].name]["damaged"] == []
        assert set(found[other.parents[1].name]["damaged"]) == names(1)
        assert words in kvtiers("verify", tmp_path, "--check-only").out.replace("\n", " ")


def test_bad_input_is_reported_at_once(tmp_path: Path) -> None:
    result = kvtiers("verify", tmp_path / "x", "--rate", "8G")
    assert result.code == 2
    for words in ("2 problems", '--rate: has an ambiguous unit. (got "8G")', "does not exist"):
        assert words.replace(". (", " (") in result.err, words


def test_pace_limits_the_rate() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    rate_limit = RateLimit(1000, lambda: now[0], sleep)
    for _ in range(50):
        rate_limit.spend(100)
    assert sum(slept) == pytest.approx(5.0)
    now[0] += 60  # unused time is not saved up
    slept.clear()
    for _ in range(50):
        rate_limit.spend(100)
    assert sum(slept) == pytest.approx(5.0)


def test_the_records_of_these_tests_are_as_described(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(2))
    outside = LmdbReader(folder, is_owned=False)
    found: list[ListedRecord] = [record for batch in outside.batches() for record in batch]
    assert {record.key for record in found} == {key_of(0), key_of(1)}
    assert outside.owner.namespace == RECORD_NAMESPACE
    outside.close()
