"""Edits of folders that no server uses are divided into batches, between which a server can start.

A batch has one record here, because its time is over as soon as it begins.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.admin import offline_edits
from offload.namespaces.claims import locked
from offload.namespaces.folders import ClaimedFolder, claim_rank_folder
from offload.namespaces.inventory import find_namespaces
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import FIELDS, damage, kvtiers, make_rank_folder, use_records
from tests.offload.cli.test_clear import grow_old
from tiers.offline import remove
from tiers.testing import key_of

Between = list[Callable[[], object]]


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Batches of one record. The functions in this list run between two batches, one each time."""
    todo: Between = []
    monkeypatch.setattr(offline_edits, "HOLD_S", 0.0)
    monkeypatch.setattr(remove, "REMOVED_AT_ONCE", 1)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _s: todo.pop(0)())
    monkeypatch.setattr(offline_edits, "time", clock)
    return todo


def left(root: Path) -> set[int]:
    """The records in the only folder of a path."""
    [namespace] = find_namespaces(root)
    reader = namespace.rank_folders[0].open()
    keys = {record.key for batch in reader.batches() for record in batch}
    reader.close()
    return {number for number in range(20) if key_of(number) in keys}


def lock(root: Path) -> None:
    with locked(root):
        pass


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("command", ["clear", "verify"])
def test_a_server_can_start_between_two_batches(
    tmp_path: Path, between: Between, command: str, kind: str
) -> None:
    folder = make_rank_folder(tmp_path, range(10), kind=kind)
    for number in range(3, 7):
        if command == "verify":
            damage(folder, number)
    if command == "clear":
        grow_old(folder, range(3, 7))
    between += [lambda: lock(tmp_path)] * 3
    options = ["--unused-for", "1d", "--yes"] if command == "clear" else []
    result = kvtiers(command, tmp_path, *options, "--json")
    assert result.code == int(command == "verify"), result.err
    assert left(tmp_path) == {0, 1, 2, 7, 8, 9}
    assert between == []


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("command", ["clear", "verify"])
def test_a_server_that_starts_between_two_batches_ends_the_edit(
    tmp_path: Path, between: Between, command: str, kind: str
) -> None:
    folder = make_rank_folder(tmp_path, range(10), kind=kind)
    for number in range(3, 7):
        damage(folder, number)
    grow_old(folder, range(3, 7))
    started: list[ClaimedFolder] = []

    def start() -> None:
        claim: dict[str, Any] = {"replica": 0, "rank": 0, "engine": "t"}
        started.append(claim_rank_folder(tmp_path, Namespace.of(FIELDS), **claim))

    between += [lambda: lock(tmp_path), start]
    options = ["--unused-for", "1d", "--yes"] if command == "clear" else []
    result = kvtiers(command, tmp_path, *options, "--json")
    for claimed in started:
        claimed.close()
    assert result.code == 1
    assert len(left(tmp_path)) == 8
    if command == "verify":
        assert result.json["rank_folders"][0]["removed"] == 2
    else:
        [found] = result.json["namespaces"]
        assert found["in_use_by"] != []
        assert (found["removed"], found["records"], found["removed_records"]) == (False, 4, 2)


def test_clear_says_how_many_records_it_removed_before_a_server_started(
    tmp_path: Path, between: Between
) -> None:
    grow_old(make_rank_folder(tmp_path, range(10)), range(3, 7))
    started: list[ClaimedFolder] = []
    claim: dict[str, Any] = {"replica": 0, "rank": 0, "engine": "t"}
    between += [lambda: started.append(claim_rank_folder(tmp_path, Namespace.of(FIELDS), **claim))]
    result = kvtiers("clear", tmp_path, "--unused-for", "1d", "--yes")
    started[0].close()
    assert result.code == 1
    assert f"in use by pid {os.getpid()}: only 1 of 4 records removed. To empty" in result.err


@pytest.mark.parametrize("command", ["clear", "verify"])
def test_records_removed_before_the_whole_folder_was_removed_are_counted(
    tmp_path: Path, between: Between, command: str
) -> None:
    folder = make_rank_folder(tmp_path, range(10))
    for number in range(3, 7):
        damage(folder, number)
    grow_old(folder, range(3, 7))
    between += [lambda: lock(tmp_path), lambda: shutil.rmtree(folder.parents[1])]
    options = ["--unused-for", "1d", "--yes"] if command == "clear" else []
    found = kvtiers(command, tmp_path, *options, "--json").json
    if command == "clear":
        [namespace] = found["namespaces"]
        assert (namespace["removed"], namespace["records"]) == (True, 2)
    else:
        assert found["rank_folders"][0]["removed"] == 2


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_records_that_a_batch_has_not_removed_are_checked_again(
    tmp_path: Path, between: Between, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The time of the first batch is over when it has checked all records and removed one. A server
    that starts then uses one of the others."""
    folder = make_rank_folder(tmp_path, range(10), kind=kind)
    grow_old(folder, range(3, 7))
    used: list[int] = []

    def use() -> None:
        used.append(min(left(tmp_path) & {3, 4, 5, 6}))
        use_records(tmp_path, used, kind)

    give_removals_until(monkeypatch, 0.0)
    monkeypatch.setattr(offline_edits, "HOLD_S", 1e9)
    between += [use, *[lambda: lock(tmp_path)] * 2]
    result = kvtiers("clear", tmp_path, "--unused-for", "1d", "--yes", "--json")
    assert result.json["namespaces"][0]["records"] == 3
    assert left(tmp_path) == {0, 1, 2, 7, 8, 9, *used}


def give_removals_until(monkeypatch: pytest.MonkeyPatch, until: float) -> None:
    """Let the functions of ``tiers.offline.remove`` have time until then."""

    def timed(function: Any) -> Any:
        return lambda *arguments: function(*arguments[:-1], until)

    for name in ("remove_from_lmdb", "remove_files"):
        monkeypatch.setattr(offline_edits, name, timed(getattr(remove, name)))


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_the_checks_of_a_batch_end_in_time(
    tmp_path: Path, between: Between, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Checks of damaged records read their payloads, which takes longer than removing them."""
    folder = make_rank_folder(tmp_path, range(10), kind=kind)
    grow_old(folder, range(3, 7))
    give_removals_until(monkeypatch, math.inf)
    between += [lambda: lock(tmp_path)] * 3
    assert kvtiers("clear", tmp_path, "--unused-for", "1d", "--yes").code == 0
    assert left(tmp_path) == {0, 1, 2, 7, 8, 9}
    assert between == []


def test_an_index_is_checked_again_only_if_it_has_changed(
    tmp_path: Path, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check takes seconds if the index is large, and a server that starts waits for it."""
    folder = make_rank_folder(tmp_path, range(10))
    grow_old(folder, range(3, 7))
    checked: list[Path] = []
    check_file = offline_edits.check_file

    def noted(path: Path) -> Any:
        checked.append(path)
        return check_file(path)

    monkeypatch.setattr(offline_edits, "check_file", noted)
    counts: list[int] = []
    steps: Between = [lambda: lock(tmp_path), lambda: use_records(tmp_path, [0]), lambda: None]
    between += [lambda step=step: (counts.append(len(checked)), step()) for step in steps]  # type: ignore[misc]  # mypy does not infer defaults
    assert kvtiers("clear", tmp_path, "--unused-for", "1d", "--yes").code == 0
    assert left(tmp_path) == {0, 1, 2, 7, 8, 9}
    assert (counts, checked) == ([0, 0, 1], [folder])
