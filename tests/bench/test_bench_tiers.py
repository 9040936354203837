"""The tier benchmarks at a tiny size, so that they keep working."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tiers_optional import available

pytestmark = pytest.mark.thorough

REPOSITORY = Path(__file__).parents[2]


def test_the_command_runs_and_reports_every_phase(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "tiers", "--json", "--sizes", "64KiB"]
    command += ["--depths", "2", "--total", "1MiB", "--rounds", "1", "--folder", str(tmp_path)]
    command += ["--systems", "raw,lmdb,served,files,memcpy"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(report["rows"]) == 5 * 4
    assert all(row["values"]["GB/s"] > 0 for row in report["rows"])
    assert {row["series"] for row in report["rows"]} >= {"raw O_DIRECT", "lmdb tier"}
    assert not list(tmp_path.iterdir()), "the benchmark cleans up"


def test_churn_runs_and_reports_every_system(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "churn", "--json", "--size", "16KiB", "--cap", "100"]
    command += ["--systems", "raw,lmdb,files,lmcache", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert {row["series"] for row in report["rows"]} >= {"raw O_DIRECT", "lmdb tier", "file tier"}
    assert any("Not measured: lmcache" in note for note in report["notes"]) != bool(available())
    assert not list(tmp_path.iterdir()), "the benchmark cleans up"


def test_restart_runs_and_reports_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "restart", "--json", "--records", "3000"]
    command += ["--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    steps = {"open", "keys", "message", "scheduler's index", "all"}
    cases = {f"3,000 records, {end}" for end in ("closed", "killed")}
    found = {(row["case"], row["series"]) for row in report["rows"]}
    assert found == {(case, step) for case in cases for step in steps}
    assert not list(tmp_path.iterdir()), "the benchmark cleans up"


def test_shared_runs_and_reports_every_tier(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "shared", "--json", "--sizes", "64KiB"]
    command += ["--total", "1MiB", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    found = {(row["case"].split(",")[0], row["series"]) for row in report["rows"]}
    wanted = {("write", "lmdb tier"), ("read", "lmdb tier")}
    shared = ["shared lmdb tier"]
    if not any("Not measured: Mooncake" in note for note in report["notes"]):
        shared += ["Mooncake's client", "Mooncake tier"]
    wanted |= {(phase, name) for phase in ("write", "read", "lookup") for name in shared}
    assert found == wanted
    limited = [row for row in report["rows"] if row["series"] == "shared lmdb tier"]
    assert all(row["values"].get("share", 1) > 0 for row in limited)
    assert not list(tmp_path.iterdir()), "the benchmark cleans up"
