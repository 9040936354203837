"""``scripts/block_path.py`` counts the calls of every thread on the way of a chunk."""

from __future__ import annotations

import re
import sys

import pytest

from tests.scripts import load_script

TO_THE_DISK_MAX, BACK_MAX = (49, 302), (55, 355)
"""The numbers of modules and of changes of module, of which the second varies with the number of
steps. Lower them when the code allows."""


def counts(line: str) -> tuple[int, int]:
    modules, changes, _calls = map(int, re.findall("[0-9]+", line))
    return modules, changes


def test_both_ways_are_counted_on_all_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["block_path.py", "--list"])
    load_script("block_path").main()
    there, back = capsys.readouterr().out.split("back: ")
    for lines, (modules_max, changes_max) in ((there, TO_THE_DISK_MAX), (back, BACK_MAX)):
        modules, changes = counts(lines.splitlines()[0])
        assert modules <= modules_max
        assert changes <= changes_max
    assert "  tiers.lmdb.writes\n" in there
    assert "  tiers.lmdb.commit_thread\n" in there, "another thread"
    assert "  tiers.lmdb.reads\n" not in there
    assert "  tiers.lmdb.reads\n" in back
    assert "  tiers.copy.host_engine\n" in back, "another thread"
