"""The output of ``kvtiers`` to a full disk, a closed pipe (as in a shell), or a narrow terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from policies.simulation.trace import TraceWriter
from tests.offload.cli.rank_folders import ROOT, kvtiers, make_rank_folder
from tests.offload.cli.test_plan import alternating

FULL = "kvtiers: cannot write the output: No space left on device\n"


def run(output: int | IO[str], *words: object, unbuffered: str = "") -> tuple[int, str]:
    """The exit code, and the text on stderr."""
    command = [sys.executable, "-m", "offload.cli", *map(str, words)]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["inspect", "--json"], ""), (["inspect", "--json"], "1"), (["clear", "--all", "--yes"], "")],
)
def test_output_to_a_full_disk(tmp_path: Path, words: list[str], unbuffered: str) -> None:
    folder = make_rank_folder(tmp_path, range(3))
    command, *options = words
    with open("/dev/full", "w") as full:
        found = run(full, command, tmp_path, *options, unbuffered=unbuffered)
    assert found == (1, FULL)
    assert folder.exists(), "it removed data that it could not even list"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_to_a_closed_pipe(tmp_path: Path, unbuffered: str) -> None:
    make_rank_folder(tmp_path, range(3))
    reader, pipe = os.pipe()
    os.close(reader)
    try:
        assert run(pipe, "inspect", tmp_path, "--json", unbuffered=unbuffered) == (1, "")
    finally:
        os.close(pipe)


def test_a_name_that_is_not_utf_8_is_printed(tmp_path: Path) -> None:
    """Python writes such a name only with an encoding that is not strict, as most are."""
    tier = {"type": "lmdb", "path": f"{tmp_path}/\udcffz", "capacity": "16MiB", "reserve": 0}
    given = json.dumps({"cpu": {"capacity": "64MiB"}, "tiers": [tier]})
    command = [sys.executable, "-m", "offload.cli", "check", given]
    for encoding in ("utf-8:strict", "utf-8:surrogateescape", "ascii"):
        env = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"lmdb {tmp_path}/\\udcffz: 16MiB\n".encode() in done.stdout


@pytest.mark.parametrize(
    ("words", "heading"),
    [
        (["inspect"], "of capacity"),
        (["verify"], "gone meanwhile"),
        (["clear", "--all", "--dry-run"], "last used"),
        (["simulate"], "FLOPs saved"),
        (["plan"], "loading pays"),
    ],
)
def test_a_narrow_terminal_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], heading: str
) -> None:
    """A size without its unit, or a number that is broken or cut off, would be misread. Each row is
    a block of lines there."""
    make_rank_folder(tmp_path / "kv", range(3))
    trace = alternating(40)
    with TraceWriter(tmp_path / "t.jsonl", trace.name, trace.block_tokens) as file:
        for request in trace.requests:
            file.write(request)
    command, *options = words
    requests = ["--trace", tmp_path / "t.jsonl"]
    arguments = {
        "simulate": [tmp_path / "t.jsonl", "--jobs", "1"],
        "plan": ["--token-bytes", "128KiB", "--cpu", "1GiB", *requests],
    }
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # this makes rich treat it as a terminal
    monkeypatch.setenv("COLUMNS", "60")
    result = kvtiers(command, *arguments.get(command, [tmp_path / "kv"]), *options)
    assert result.code == 0, result.err
    assert f"\n{heading}  " in result.out
    assert "┃" not in result.out
    assert "…" not in result.out
