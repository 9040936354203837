"""``kvtiers inspect`` on idle folders and on one to which another process writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import Counter

from tests.offload.cli.rank_folders import (
    CAPACITY,
    FIELDS,
    OTHER,
    ROOT,
    SIZE,
    kvtiers,
    make_rank_folder,
    open_index,
    rank_folder_of,
    writer,
)
from tests.offload.cli.test_top import Server, serving
from tiers.lmdb.index import Changes
from tiers.lmdb.records.record_table import with_use
from tiers.testing import key_of


def only_rank_folder(root: Path) -> dict:
    [namespace] = kvtiers("inspect", root, "--json").json["namespaces"]
    [found] = namespace["rank_folders"]
    return found


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_counts_and_sizes_of_an_idle_folder(tmp_path: Path, kind: str) -> None:
    began_ns = time.time_ns()
    make_rank_folder(tmp_path, range(7), kind=kind)
    found = only_rank_folder(tmp_path)
    assert (found["kind"], found["records"], found["payload_bytes"]) == (kind, 7, 7 * SIZE)
    assert (found["smallest_bytes"], found["largest_bytes"]) == (SIZE, SIZE)
    assert found["capacity_bytes"] == CAPACITY
    assert began_ns <= found["oldest_use_ns"] < found["newest_use_ns"]
    assert found["ages"]["1h"] == 7
    assert sum(found["ages"].values()) == 7
    assert (found["owner_pid"], found["hits"], found["problem"]) == (None, None, "")
    assert found["file_bytes"] >= 7 * SIZE


@pytest.mark.parametrize("content", [None, b"", b"much", b"-5", b"\xff", b"9" * 5000])
def test_a_file_tier_without_a_recorded_capacity(tmp_path: Path, content: bytes | None) -> None:
    """A tier of an earlier version, or with a damaged file: the capacity is unknown, and nothing
    else is affected."""
    file = make_rank_folder(tmp_path, range(3), kind="file") / "capacity"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    found = only_rank_folder(tmp_path)
    assert (found["capacity_bytes"], found["records"], found["problem"]) == (None, 3, "")
    assert " ? " in kvtiers("inspect", tmp_path).out
    make_rank_folder(tmp_path, range(4), kind="file")  # the process that opens it records the time
    assert only_rank_folder(tmp_path)["capacity_bytes"] == CAPACITY


def test_hits_are_read_from_the_server(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(2))
    server = Server()
    server.fill()
    server.add(Counter, "vllm:kvtiers_hit_tokens", 400, "lmdb")
    with serving([server.page]) as address:
        found = kvtiers("inspect", tmp_path, "--server", address, "--json").json
        shown = kvtiers("inspect", tmp_path, "--server", address).out
    assert found["server"]["url"] == f"http://{address}/metrics"
    lmdb = {"name": "lmdb", "hit_tokens": 400, "loaded_tokens": 640, "missed_tokens": 0}
    assert lmdb in found["server"]["tiers"]
    assert "lmdb: 400 tokens hit, 640 loaded, 0 missed" in shown
    assert "server" not in kvtiers("inspect", tmp_path, "--json").json
    for wrong, code in ((address, 1), ("no server", 2)):
        result = kvtiers("inspect", tmp_path, "--server", wrong)
        assert (result.code, result.out) == (code, ""), result.err


def test_namespaces_say_how_they_differ_from_the_one_used_last(tmp_path: Path) -> None:
    older = make_rank_folder(tmp_path, range(2))
    newer = make_rank_folder(tmp_path, range(3), fields=OTHER)
    for path in (older.parents[1], *older.parents[1].rglob("*")):
        os.utime(path, (1, 1))
    result = kvtiers("inspect", tmp_path, "--json")
    # inspecting does not count as a use: the order stays
    result = kvtiers("inspect", tmp_path, "--json")
    by_model = {namespace["model"]: namespace for namespace in result.json["namespaces"]}
    assert by_model["tiny/llama"]["differs"] == [["model.name", "'tiny/llama'", "'tiny/qwen'"]]
    assert by_model["tiny/qwen"]["differs"] == []
    assert by_model["tiny/qwen"]["name"] == newer.parents[1].name
    text = kvtiers("inspect", tmp_path).out
    assert "tiny/llama" in text
    assert "model.name is 'tiny/llama', not 'tiny/qwen'" in text


def test_every_folder_inside_a_path_works(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(4))
    make_rank_folder(tmp_path, range(9), rank=1)
    for path in (folder, folder.parent, folder.parents[1], tmp_path):
        [namespace] = kvtiers("inspect", path, "--json").json["namespaces"]
        ranks = {found["rank"]: found["records"] for found in namespace["rank_folders"]}
        assert ranks == ({0: 4} if path == folder else {0: 4, 1: 9})
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    [namespace] = kvtiers("inspect", bare, "--json").json["namespaces"]
    assert namespace["rank_folders"][0]["records"] == 4


def test_small_numbers_of_early_stores_are_not_shown_as_ages(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    index = open_index(folder)
    values = {key: value for table in index.tables() for key, value in table.items()}
    index.apply(Changes(edits={key_of(0): with_use(values[key_of(0)], 17)}))
    index.close()
    found = only_rank_folder(tmp_path)
    assert found["ages"]["unknown"] == 1
    assert found["ages"]["1h"] == 2


def test_a_damaged_index_is_reported_and_does_no_harm(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(50))
    content = (folder / "data.mdb").read_bytes()
    for damaged in (content[:9000], content[:8192], b"x" * 20_000, content[:4096] + bytes(40_960)):
        (folder / "data.mdb").write_bytes(damaged)
        result = kvtiers("inspect", tmp_path, "--json")
        assert result.code == 1
        assert "damaged: " in result.json["namespaces"][0]["rank_folders"][0]["problem"]
        assert (folder / "data.mdb").read_bytes() == damaged


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing", "does not exist"), ("file", "is not a folder"), ("empty", "contains no records")],
)
def test_a_wrong_folder_is_named(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    result = kvtiers("inspect", tmp_path / path)
    assert result.code == 2
    assert words in result.err
    assert str(tmp_path / path) in result.err
    assert "Give the path of a tier" in result.err


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_inspect_while_another_process_writes(tmp_path: Path, kind: str) -> None:
    with writer(tmp_path, kind) as live:
        for _ in range(8):
            result = kvtiers("inspect", tmp_path, "--json")
            [namespace] = result.json["namespaces"]
            [found] = namespace["rank_folders"]
            assert result.code == 0
            # the latest deletions may not have been written yet
            assert 150 <= found["records"] <= 300
            assert found["owner_pid"] == live.pid
            assert namespace["owners"][0]["engine"] == "child"
        rounds, reads, wrong, failures = live.stop()
    assert rounds > 0
    assert reads > 200
    assert (wrong, failures) == (0, 0)
    assert only_rank_folder(tmp_path)["records"] == pytest.approx(200, abs=8)


def test_inspecting_changes_nothing(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(5))
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock.mdb"}
    assert kvtiers("inspect", tmp_path).code == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock.mdb"} == before


def test_help_does_not_import_the_heavy_parts() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from offload.cli import app;"
        "assert 'inspect' in CliRunner().invoke(app, ['--help']).stdout;"
        "print([n for n in ('torch', 'vllm', 'numpy', 'lmdb', 'policies') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_the_help_of_commands_is_whole_in_80_columns_and_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from offload.cli import COMMANDS, app\n"
        "for name in set(COMMANDS) - {'bench'}:\n"
        "    result = CliRunner().invoke(app, [name, '--help'], env={'TERMINAL_WIDTH': '80'})\n"
        "    assert result.exit_code == 0, (name, result.output)\n"
        "    assert max(map(len, result.output.splitlines())) <= 80, name\n"
        "    assert '\u2026' not in result.output, (name, result.output)\n"
        "print([n for n in ('torch', 'vllm') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [("kvtiers in", "inspect"), ("kvtiers verify --ch", "--check-only"), ("kvtiers x", "")],
)
def test_the_shell_completes_commands_and_their_options(words: str, found: str) -> None:
    code = "import sys; sys.argv[0] = 'kvtiers'; from offload.cli import main; main()"
    env = os.environ | {
        "_KVTIERS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == found, done.err


def test_the_namespace_folder_matches_the_manifest(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(1))
    assert rank_folder_of(tmp_path, FIELDS) == folder
    folder.parents[1].rename(tmp_path / ("0" * 32))
    result = kvtiers("inspect", tmp_path, "--json")
    assert result.code == 1
    assert "another namespace" in result.json["namespaces"][0]["problem"]


ADDRESS = "127.0.0.1:50051"
COMMANDS = {
    "inspect": [],
    "verify": [],
    "clear": ["--all", "--yes"],
    "export": ["export.kvt"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", [ADDRESS, f"mooncake://{ADDRESS}", "config.json"])
def test_a_mooncake_store_cannot_be_inspected_and_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tiers = [{"type": "mooncake", "master": ADDRESS}, {"type": "lmdb", "path": "/mnt/kv"}]
    config = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"tiers": tiers}}
    Path("config.json").write_text(json.dumps(config))
    done = kvtiers(command, given, *COMMANDS[command])
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "is the address of a Mooncake store" in done.err
    assert "http://127.0.0.1:9003/metrics/summary" in done.err
    assert "restart the master" in done.err
    assert ("Give the path of a tier: /mnt/kv." in done.err) == (given == "config.json")
    assert sorted(os.listdir()) == ["config.json"]


def test_an_import_into_an_address_makes_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("export.kvt").write_bytes(b"")
    done = kvtiers("import", "export.kvt", ADDRESS)
    assert done.code == 2
    assert "is the address of a Mooncake store" in done.err
    assert os.listdir() == ["export.kvt"]


def test_other_files_are_not_taken_for_configurations(tmp_path: Path) -> None:
    for text in ("", "[1]", '{"tiers": 3}', '{"tiers": [3]}', "\x00", "[" * 10**5):
        (tmp_path / "file").write_text(text)
        done = kvtiers("inspect", tmp_path / "file")
        assert done.code == 2
        assert "is not a folder" in done.err
