"""Ctrl-C on a terminal ends every command with exit code 130, without output, and leaves nothing
behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offload import cli
from policies.simulation.trace import TraceWriter
from policies.testing import synthetic_trace
from tests.offload.cli.rank_folders import ROOT, make_rank_folder
from tests.offload.cli.terminal import CTRL_C, on_a_terminal
from tests.offload.cli.test_top import Server, serving

TRACEBACK = "Traceback"


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


@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupting_simulate_in_one_process_and_in_several(tmp_path: Path, jobs: int) -> None:
    """It is interrupted at the first sign of progress, because a busy machine may show no other."""
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
        terminal.wait_for("querying vLLM")
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
