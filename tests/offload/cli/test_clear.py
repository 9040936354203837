"""``kvtiers clear`` removes exactly what it reports, even beside a live writer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.namespaces.claims import LOCK_NAME, locked
from offload.namespaces.cleanup import make_space, remove_namespace
from offload.namespaces.folders import share_rank_folder
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import (
    FIELDS,
    OTHER,
    ROOT,
    SIZE,
    Result,
    kvtiers,
    make_rank_folder,
    open_index,
    rank_folder_of,
    records_of,
    use_records,
    wait_until_open,
    writer,
)
from tests.patience import PATIENCE_S
from tiers.files.record_files import record_name
from tiers.lmdb.index import Changes
from tiers.lmdb.records.record_table import with_use
from tiers.testing import key_of

THIRD = {"model": {"name": "tiny/llama"}, "parallel": {"tp": 2}}
NAMES = {
    key: Namespace.of(fields).name
    for key, fields in {"llama": FIELDS, "qwen": OTHER, "llama2": THIRD}.items()
}
DAY_NS = 86_400 * 10**9
NOBODY = 65_534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three namespaces, two of them of one model."""
    for fields in (FIELDS, OTHER, THIRD):
        make_rank_folder(tmp_path / "kv", range(4), fields=fields)
    return tmp_path / "kv"


def left(root: Path) -> set[str]:
    """Short names of the existing namespaces; nothing else may be in the folder."""
    names = {path.name for path in root.iterdir()} - {".kvtiers.lock"}
    return {short for short, name in NAMES.items() if name in names} | (names - set(NAMES.values()))


def age(folder: Path) -> None:
    """Make a namespace look as if it was last used in 1970."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1, 1))


def clear(root: Path, *options: object) -> Result:
    return kvtiers("clear", root, *options, "--yes")


def test_clear_by_name(root: Path) -> None:
    assert clear(root, "--namespace", NAMES["qwen"][:9]).code == 0
    assert left(root) == {"llama", "llama2"}
    assert len(records_of(root / NAMES["llama"] / "replica-0" / "rank-0")) == 4


def test_clear_by_model(root: Path) -> None:
    assert clear(root, "--model", "tiny/llama").code == 0
    assert left(root) == {"qwen"}


def test_only_data_that_matches_every_option_is_removed(root: Path) -> None:
    age(root / NAMES["llama"])
    age(root / NAMES["qwen"])
    assert clear(root, "--model", "tiny/llama", "--unused-for", "30d").code == 0
    assert left(root) == {"qwen", "llama2"}


def test_clear_everything(root: Path) -> None:
    assert clear(root, "--all").code == 0
    assert left(root) == set()


def test_a_dry_run_or_the_answer_no_removes_nothing(root: Path) -> None:
    listed = kvtiers("clear", root, "--all", "--dry-run", "--json")
    assert [one["removed"] for one in listed.json["namespaces"]] == [False] * 3
    assert kvtiers("clear", root, "--all").code == 2  # there is no terminal on which to answer yes
    assert left(root) == {"llama", "qwen", "llama2"}


def test_clear_damaged_files_that_were_moved_aside(root: Path) -> None:
    aside = root / f"quarantine-{NAMES['qwen']}-0123abcd"
    shutil.copytree(root / NAMES["qwen"], aside)
    assert clear(root, "--set-aside").code == 0
    assert left(root) == {"llama", "qwen", "llama2"}


def grow_old(folder: Path, numbers: range) -> None:
    """Make these records look as if they were last used two days ago."""
    if (folder / "data.mdb").exists():
        index = open_index(folder)
        values = {key: value for table in index.tables() for key, value in table.items()}
        use = int.from_bytes(values[key_of(numbers[0])][:8], "big") - 2 * DAY_NS
        keys = map(key_of, numbers)
        index.apply(Changes(edits={key: with_use(values[key], use) for key in keys}))
        index.close()
    else:
        for number in numbers:
            [path] = folder.glob(f"epoch-*/{record_name(key_of(number))}")
            use = path.stat().st_mtime_ns - 2 * DAY_NS
            os.utime(path, ns=(use, use))


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_clear_records_by_age(tmp_path: Path, kind: str) -> None:
    folder = make_rank_folder(tmp_path, range(10), kind=kind)
    grow_old(folder, range(3, 7))
    listed = kvtiers("clear", tmp_path, "--unused-for", "1d", "--dry-run", "--json").json
    assert listed["namespaces"][0]["records"] == 4
    result = clear(tmp_path, "--unused-for", "1d", "--json")
    [found] = result.json["namespaces"]
    assert (result.code, found["records"], found["removed"], found["whole"]) == (0, 4, True, False)
    kept = {key_of(number) for number in (0, 1, 2, 7, 8, 9)}
    if kind == "lmdb":
        assert set(records_of(folder)) == kept
    else:
        assert {p.name for p in folder.glob("epoch-0/*")} == {record_name(key) for key in kept}
    assert kvtiers("verify", tmp_path, "--json").json["rank_folders"][0]["good"] == 6
    assert "nothing matches these options" in clear(tmp_path, "--unused-for", "1d").out


@contextlib.contextmanager
def clearing(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Removes old records in another process. It is stopped after it has listed them and before it
    locks the path; inside the context, other processes can do anything."""
    command = [sys.executable, "-m", "offload.cli", "clear", root, "--unused-for", "1d", "--yes"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as undo:
        with locked(root):
            process = undo.enter_context(subprocess.Popen([*command, "--json"], cwd=ROOT, **pipes))
            undo.callback(process.kill)
            wait_until_open(process, root / LOCK_NAME)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process


def continued(process: subprocess.Popen[str]) -> Result:
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(process.returncode, out, err)


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_records_that_a_server_uses_after_they_were_listed_stay(tmp_path: Path, kind: str) -> None:
    make_rank_folder(tmp_path, range(10), kind=kind)
    grow_old(rank_folder_of(tmp_path), range(3, 7))
    with clearing(tmp_path) as process:
        use_records(tmp_path, [4, 5], kind)
        result = continued(process)
    [found] = result.json["namespaces"]
    assert (result.code, found["records"], found["removed"]) == (0, 2, True), result.err
    assert kvtiers("verify", tmp_path, "--json").json["rank_folders"][0]["good"] == 8


def test_a_namespace_that_is_removed_after_its_records_were_listed_stays_away(
    tmp_path: Path,
) -> None:
    """A folder without a manifest would be taken for a damaged namespace by the next server."""
    grow_old(make_rank_folder(tmp_path, range(10)), range(3, 7))
    with clearing(tmp_path) as process:
        assert remove_namespace(tmp_path, NAMES["llama"])
        result = continued(process)
    assert result.code == 0
    assert [one["records"] for one in result.json["namespaces"]] == [0]
    assert left(tmp_path) == set()


def test_records_of_unknown_age_stay(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    index = open_index(folder)
    values = {key: value for table in index.tables() for key, value in table.items()}
    edits = {key: with_use(value, 7) for key, value in values.items()}
    index.apply(Changes(edits=dict(edits)))
    index.close()
    assert "nothing matches these options" in clear(tmp_path, "--unused-for", "1d").out


def test_clear_beside_a_writer(root: Path) -> None:
    """While a server uses one namespace, others are removed; that one stays, whatever is
    requested."""
    with writer(root) as live:
        result = clear(root, "--all", "--json")
        assert result.code == 1
        by_name = {one["namespace"]: one for one in result.json["namespaces"]}
        assert by_name[NAMES["llama"]]["in_use_by"] == [live.pid]
        assert [by_name[NAMES[n]]["removed"] for n in ("llama", "qwen", "llama2")] == [
            False,
            True,
            True,
        ]
        assert left(root) == {"llama"}
        grown = clear(root, "--unused-for", "1s")
        assert grown.code in (0, 1)  # by then some of the untouched records may be old enough
        text = clear(root, "--namespace", NAMES["llama"])
        assert text.code == 1
        assert f"in use by pid {live.pid}: not removed" in text.err
        rounds, reads, wrong, failures = live.stop()
    assert (wrong, failures) == (0, 0)
    assert rounds > 0
    assert reads > 200
    assert clear(root, "--namespace", NAMES["llama"]).code == 0
    assert left(root) == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "what to remove: is missing. Give --namespace"),
        (["--namespace", "zz"], '--namespace: matches nothing (got "zz"). Known: '),
        (["--model", "x"], '--model: matches nothing (got "x"). Known: tiny/llama, tiny/qwen'),
        (["--unused-for", "7"], '--unused-for: is not a time (got "7"). Write 30s, 15m'),
        (["--all", "--json"], "--yes: is required with --json. Add --yes, or --dry-run to look"),
        (["--all"], "--yes: is required because there is no terminal to ask on. Add --yes, or"),
    ],
)
def test_bad_input_is_reported(root: Path, options: list[str], words: str) -> None:
    result = kvtiers("clear", root, *options)
    assert result.code == 2
    assert words in result.err
    assert left(root) == {"llama", "qwen", "llama2"}


def test_all_problems_at_once(tmp_path: Path) -> None:
    result = kvtiers("clear", tmp_path / "no", "--unused-for", "soon", "--json")
    assert result.code == 2
    assert "3 problems" in result.err


def test_the_folder_of_a_single_tier(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path / "kv", range(4))
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    assert "is the folder of a single tier" in clear(bare, "--all").err
    grow_old(bare, range(2))
    assert clear(bare, "--unused-for", "1d").code == 0
    assert set(records_of(bare)) == {key_of(2), key_of(3)}


def test_engines_that_share_get_no_advice_to_reset(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(2))
    with share_rank_folder(tmp_path, Namespace.of(FIELDS), rank=0, engine="e"):
        result = kvtiers("clear", tmp_path, "--all", "--yes")
    assert result.code == 1
    assert f"shared by pid {os.getpid()}: not removed" in result.err
    assert "POST" not in result.err
    assert kvtiers("clear", tmp_path, "--all", "--yes").code == 0


@contextlib.contextmanager
def as_nobody(root: Path) -> Iterator[None]:
    """An unprivileged user who owns this folder, because root may delete everything."""
    is_root = os.geteuid() == 0
    if is_root:
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_data_that_cannot_be_deleted_is_reported_and_tried_again(public_folder: Path) -> None:
    """A folder whose files cannot be deleted, as on a read-only or failing part of the disk."""
    root = public_folder / "kv"
    folder = make_rank_folder(root, range(4))
    make_rank_folder(root, range(4), fields=OTHER)
    kvtiers("inspect", root)  # imports everything that the commands need
    with as_nobody(root):
        folder.chmod(0o500)
        result = clear(root, "--namespace", NAMES["llama"])
        [trash] = root.glob(".trash-*")
        assert result.code == 1
        for words in (str(trash), "could not be deleted", "Permission denied", "run this again"):
            assert words in result.err
        assert "removed" not in result.out
        again = clear(root, "--namespace", NAMES["llama2"], "--json")
        assert again.code == 2, "there is no such namespace"
        seen = kvtiers("inspect", root, "--json")
        size = {one["name"]: one["disk_bytes"] for one in seen.json["namespaces"]}[trash.name]
        assert size >= 4 * SIZE
        assert f"{trash.name}" in kvtiers("inspect", root).out
        assert kvtiers("verify", root).code == 0
        again = clear(root, "--namespace", NAMES["qwen"], "--json")
        removed = {one["namespace"]: one for one in again.json["namespaces"]}
        assert (again.code, removed[trash.name]["left_bytes"]) == (1, size)
        assert (removed[NAMES["qwen"]]["removed"], removed[trash.name]["removed"]) == (True, False)
        listed = kvtiers("clear", root, "--all", "--dry-run")
        assert "remains of a removal" in listed.out.replace("\n", " ")
        (trash / "replica-0" / "rank-0").chmod(0o700)
        assert clear(root, "--all").code == 0
        assert left(root) == set()


def test_data_that_cannot_be_deleted_counts_at_start(
    public_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = public_folder / "kv"
    folder = make_rank_folder(root, range(4))
    own = Namespace.of(OTHER)
    capacity = 1 << 30
    with as_nobody(root):
        folder.chmod(0o500)
        for _ in range(2):  # every rank gets the same result
            left_bytes = capacity - make_space(root, own, capacity, others_share=0.0)
            [trash] = root.glob(".trash-*")
            assert left_bytes >= 4 * SIZE
            assert f"{trash} " in caplog.text
            assert "could not be deleted" in caplog.text
        (trash / "replica-0" / "rank-0").chmod(0o700)
        assert make_space(root, own, capacity, others_share=0.0) == capacity
        assert left(root) == set()


def test_a_link_or_file_in_place_of_a_namespace_is_removed_itself(root: Path) -> None:
    """Links and files are removed as such; the targets of links are not touched."""
    elsewhere = root.parent / "elsewhere"
    (root / NAMES["llama"]).rename(elsewhere)
    (root / NAMES["llama"]).symlink_to(elsewhere)
    shutil.rmtree(root / NAMES["qwen"])
    (root / NAMES["qwen"]).write_text("x")
    before = sorted(elsewhere.rglob("*"))
    assert clear(root, "--all").code == 0
    assert left(root) == set()
    assert sorted(elsewhere.rglob("*")) == before


def test_files_that_a_tier_moved_aside_are_shown_and_removed(root: Path) -> None:
    """The command also removes such files inside a namespace that a server uses."""
    folder = root / NAMES["llama"] / "replica-0" / "rank-0"
    (folder / "data.mdb").write_bytes(b"x" * 8192)
    make_rank_folder(root, range(2))
    [aside] = folder.glob("quarantine-*")
    [found] = [h for h in kvtiers("inspect", root, "--json").json["namespaces"]
               if h["name"] == NAMES["llama"]]  # fmt: skip
    assert found["rank_folders"][0]["aside_bytes"] >= 8192
    assert "moved aside as damaged" in kvtiers("inspect", root).out
    assert clear(root, "--set-aside", "--model", "tiny/qwen").code == 0
    assert aside.exists()
    with writer(root) as live:
        assert clear(root, "--set-aside").code == 0
        assert live.stop()[2:] == (0, 0)
    assert not aside.exists()
    assert left(root) == {"llama", "qwen", "llama2"}
