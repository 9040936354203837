"""The code of the guide "write a policy" runs as printed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/write-a-policy.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the guide's files, and the trace that one of them makes."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for block in blocks:
        named = re.match(r"# (\w+\.py)\n", block)
        (tmp_path / (named[1] if named else "from_python.py")).write_text(block)
    run(tmp_path, "make_trace.py")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_policy_passes_the_kit(folder: Path) -> None:
    output = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_policy.py")
    assert " passed" in output


def test_the_snippet_prints_a_ratio(folder: Path) -> None:
    assert "% of the prompt tokens" in run(folder, "from_python.py")


def test_the_simulator_finds_it_by_name(folder: Path) -> None:
    text = re.search(r"kvtiers simulate (.*?)```", GUIDE.read_text(), re.DOTALL)
    assert text
    arguments = text[1].replace("\\\n", " ").split()
    # -P, because the console script does not import modules from the current folder either
    output = run(folder, "-P", "-m", "policies.simulation.cli", *arguments, "--jobs", "1")
    assert "my_policy:MruPolicy" in output
    assert (folder / "hits.png").exists()


def test_the_registry_finds_it_by_name(folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    from policies.registry import make_policy

    assert type(make_policy({"name": "my_policy:MruPolicy"})).__name__ == "MruPolicy"
    sys.modules.pop("my_policy", None)
