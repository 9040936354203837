"""``scripts/block_path.py`` counts the calls of every thread on the way of a chunk."""

from __future__ import annotations

import sys

import pytest

from tests.scripts import load_script


def test_both_ways_are_counted_on_all_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["block_path.py", "--list"])
    load_script("block_path").main()
    there, back = capsys.readouterr().out.split("back: ")
    assert "  tiers.lmdb.writes\n" in there
    assert "  tiers.lmdb.commit_thread\n" in there, "another thread"
    assert "  tiers.lmdb.reads\n" not in there
    assert "  tiers.lmdb.reads\n" in back
    assert "  tiers.copy.host_engine\n" in back, "another thread"
