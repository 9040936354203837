"""Ctrl-C on a terminal ends every command with exit code 130, without output, and leaves nothing
behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import cli
from offload.admin.export import export_namespace
from offload.admin.verify import RateLimit
from offload.namespaces.claims import LOCK_NAME, locked
from offload.namespaces.folders import claim_rank_folder
from offload.namespaces.inventory import find_namespaces
from offload.namespaces.manifest import Namespace
from policies.simulation.trace import TraceWriter
from policies.testing import synthetic_trace
from tests.offload.cli.rank_folders import (
    FIELDS,
    ROOT,
    damage,
    kvtiers,
    make_rank_folder,
    records_of,
    wait_until_open,
)
from tests.offload.cli.terminal import CTRL_C, on_a_terminal
from tests.offload.cli.test_crafted_exports import MANIFEST, SIZE, STORE, frame, record
from tests.offload.cli.test_top import Server, serving
from tiers.offline import archive as portable
from tiers.offline import file_reader
from tiers.offline.offline_folder import ListedRecord

TRACEBACK = "Traceback"


def whole_records(root: Path) -> int:
    """The number of records below a path, all of which are intact."""
    result = kvtiers("verify", root, "--json")
    if "contains no records" in result.err:
        return 0
    found = result.json["rank_folders"]
    records = sum(one["records"] for one in found)
    assert (result.code, sum(one["good"] for one in found)) == (0, records), result.out
    return int(records)


def test_interrupting_top() -> None:
    server = Server()
    server.fill()
    with serving([server.page]) as address, on_a_terminal("top", address) as terminal:
        terminal.wait_for("corrupt records 3")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_the_question_of_clear_removes_nothing(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    with on_a_terminal("clear", tmp_path, "--all") as terminal:
        terminal.wait_for("Remove this? [y/N]: ")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert folder.exists()
    assert TRACEBACK not in terminal.shown


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1), (b"\x04", 1)])
def test_clear_accepts_an_answer(tmp_path: Path, answer: bytes, code: int) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    with on_a_terminal("clear", tmp_path, "--all") as terminal:
        terminal.wait_for("Remove this? [y/N]: ")
        terminal.press(answer)
        assert terminal.end() == code
    assert folder.exists() == bool(code)


def test_interrupting_verify_at_one_byte_per_second(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(3))
    with on_a_terminal("verify", tmp_path, "--rate", "1") as terminal:
        terminal.wait_for("rank-0")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_verify_before_it_removes_damaged_records(tmp_path: Path) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    damage(folder, 1)
    with locked(tmp_path), on_a_terminal("verify", tmp_path) as terminal:
        wait_until_open(terminal.process, tmp_path / LOCK_NAME)
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown
    assert len(records_of(folder)) == 3


def test_interrupting_clear_before_it_removes_anything(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(3))
    with locked(tmp_path), on_a_terminal("clear", tmp_path, "--all", "--yes") as terminal:
        terminal.wait_for("removing")
        wait_until_open(terminal.process, tmp_path / LOCK_NAME)
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown
    assert whole_records(tmp_path) == 3


@pytest.mark.parametrize("existing", [None, b"of an earlier export"])
def test_interrupting_export_leaves_only_an_earlier_file(
    tmp_path: Path, existing: bytes | None
) -> None:
    make_rank_folder(tmp_path / "kv", range(3))
    file = tmp_path / "out.kvt"
    if existing is not None:
        file.write_bytes(existing)
    options = ["--rate", "1", "--overwrite"]
    with on_a_terminal("export", tmp_path / "kv", file, *options) as terminal:
        terminal.wait_for("export")
        assert [path.name for path in tmp_path.glob("*.part")] == ["out.kvt.part"]
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown
    assert {path.name for path in tmp_path.iterdir()} == {"kv"} | (
        {"out.kvt"} if existing else set()
    )
    assert existing is None or file.read_bytes() == existing


def test_interrupting_export_while_it_lists_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the batch that it was listing. A folder may have a million files."""
    make_rank_folder(tmp_path, range(4), kind="file")
    monkeypatch.setattr(file_reader, "LISTED_AT_ONCE", 1)
    [namespace] = find_namespaces(tmp_path)
    [rank_folder] = namespace.rank_folders
    reader = rank_folder.open()
    batches, listed = reader.batches, list[ListedRecord]()

    def interrupted() -> Iterator[list[ListedRecord]]:
        for batch in batches():
            if not listed:
                os.kill(os.getpid(), signal.SIGINT)
            listed.extend(batch)
            yield batch

    monkeypatch.setattr(reader, "batches", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    limit: dict[str, Any] = {"rate_limit": RateLimit(0), "advance": lambda _count: None}
    try:
        with pytest.raises(KeyboardInterrupt), (tmp_path / "out.kvt").open("wb") as file:
            export_namespace(namespace, [(rank_folder, reader)], file, **limit)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(listed) == 1


def exported(root: Path, records: int) -> Path:
    """An export with small records, which take long to import for their size."""
    file = root / "in.kvt"
    with file.open("wb") as out:
        out.write(portable.MAGIC + frame("M", MANIFEST) + frame("S", STORE))
        for number in range(records):
            out.write(record(number, SIZE))
        out.write(frame("E", {"records": records}))
    return file


@pytest.mark.parametrize(("kind", "count"), [("lmdb", 10_000), ("file", 3_000)])
def test_an_interrupted_import_can_be_repeated(tmp_path: Path, kind: str, count: int) -> None:
    """The import is interrupted at the first sign of progress, because a busy machine may show no
    other."""
    file, root = exported(tmp_path, count), tmp_path / "kv"
    options = ["--type", kind, "--capacity", "1GiB"]
    with on_a_terminal("import", file, root, *options) as terminal:
        terminal.wait_for("import")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown
    if root.exists():
        assert whole_records(root) < count
    assert kvtiers("import", file, root, *options).code == 0
    assert whole_records(root) == count


def test_interrupting_import_while_another_process_locks_the_path(tmp_path: Path) -> None:
    file, root = exported(tmp_path, 1), tmp_path / "kv"
    root.mkdir(mode=0o700)
    options = ["--capacity", "16MiB"]
    with locked(root), on_a_terminal("import", file, root, *options) as terminal:
        wait_until_open(terminal.process, root / LOCK_NAME)
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown
    assert [path.name for path in root.iterdir()] == [LOCK_NAME]


@pytest.mark.parametrize("command", ["top", "inspect"])
def test_interrupting_a_wait_for_a_server_that_does_not_answer(
    tmp_path: Path, command: str
) -> None:
    make_rank_folder(tmp_path, range(3))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        words = ["top", address] if command == "top" else ["inspect", tmp_path, "--server", address]
        with on_a_terminal(*words) as terminal:
            terminal.wait_for("has not answered")
            terminal.press(CTRL_C)
            assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_plan(tmp_path: Path) -> None:
    options = ["--token-bytes", "128KiB", "--cpu", "8GiB", "--mix", "users=500,turns=20"]
    with on_a_terminal("plan", *options) as terminal:
        terminal.wait_for("simulated requests")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_why_while_it_reads(tmp_path: Path) -> None:
    pipe = tmp_path / "requests.jsonl"
    os.mkfifo(pipe)
    with on_a_terminal("why", pipe) as terminal, pipe.open("wb"):  # waits for the reader
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_check_while_it_reads() -> None:
    with on_a_terminal("check", "-") as terminal:
        terminal.press(b"{\n")
        terminal.wait_for("{\r\n")  # the echo: the terminal has taken it in
        terminal.wait_until_read()
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_serve_while_it_waits_for_another_server(tmp_path: Path) -> None:
    root, model = tmp_path / "kv", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with claim_rank_folder(root, Namespace.of(FIELDS), replica=0, rank=0, engine="e"):
        tiers = ["--kv-cpu", "16MiB", "--kv-disk", f"{root}:16MiB"]
        with on_a_terminal("serve", model, *tiers) as terminal:
            terminal.wait_for("for it to end")
            terminal.press(CTRL_C)
            assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupting_simulate_in_one_process_and_in_several(tmp_path: Path, jobs: int) -> None:
    """The command is interrupted at the first sign of progress, because a busy machine may show no
    other."""
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, "synthetic", 16) as writer:
        for request in synthetic_trace(7, requests=30_000).requests:
            writer.write(request)
    options = ["--policy", "lru", "--policy", "gdsf", "--jobs", jobs]
    with on_a_terminal("simulate", path, *options) as terminal:
        terminal.wait_for(" 0%")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_bench_waits_for_the_benchmark_to_clean_up(tmp_path: Path) -> None:
    with on_a_terminal("bench", "tiers", "--folder", tmp_path, "--systems", "raw") as terminal:
        terminal.wait_for("0/")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_doctor_although_a_library_catches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "vllm"
    package.mkdir(parents=True)
    wait = "try:\n    print('importing')\n    time.sleep(1e6)\nexcept BaseException:\n    pass\n"
    (package / "__init__.py").write_text(f"import time\n{wait}")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    (tmp_path / "config.json").write_text("{}")  # without it, vLLM would not be imported
    with on_a_terminal("doctor", tmp_path) as terminal:
        terminal.wait_for("importing")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_interrupting_outside_the_part_that_typer_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130


def test_interrupting_doctor_while_it_queries_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # without it, vLLM would not be queried
    with on_a_terminal("doctor", tmp_path) as terminal:
        terminal.wait_for("importing vLLM")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert TRACEBACK not in terminal.shown


def test_work_on_a_folder_begins_with_everything_imported() -> None:
    """An interrupt within an import can come out of it as another error."""
    program = (
        "import sys\n"
        "from offload.cli.common import guarded_work, progress_bar\n"
        "with guarded_work('export'):\n"
        "    before = set(sys.modules)\n"
        "    with progress_bar(is_bytes=True): pass\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('rich')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
