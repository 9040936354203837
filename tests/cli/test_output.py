"""A full disk or a closed pipe below the standard output of ``kvtiers``, as a shell gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.cli.world import ROOT, make_store

FULL = "kvtiers: the output cannot be written: No space left on device\n"


def run(output: int | IO[str], *words: object, unbuffered: str = "") -> tuple[int, str]:
    """The exit code, and what is on stderr."""
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
def test_a_full_disk_below_the_output(tmp_path: Path, words: list[str], unbuffered: str) -> None:
    folder = make_store(tmp_path, range(3))
    command, *options = words
    with open("/dev/full", "w") as full:
        found = run(full, command, tmp_path, *options, unbuffered=unbuffered)
    assert found == (1, FULL)
    assert folder.exists(), "removed what it could not even list"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_pipe_that_nobody_reads(tmp_path: Path, unbuffered: str) -> None:
    make_store(tmp_path, range(3))
    reader, pipe = os.pipe()
    os.close(reader)
    try:
        assert run(pipe, "inspect", tmp_path, "--json", unbuffered=unbuffered) == (1, "")
    finally:
        os.close(pipe)
