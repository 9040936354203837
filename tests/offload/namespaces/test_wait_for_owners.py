"""Restarts that overlap: a server waits for the previous one, which is a real process here."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.config.kv_transfer_config import transfer_config
from offload.config.machine_checks import load_config, patiently, same_server
from offload.errors import ConfigError, TierUnavailableError
from offload.namespaces import wait_for_owners
from offload.namespaces.claims import live_owners
from offload.namespaces.wait_for_owners import Patience
from offload.worker import tier_claim
from tests.offload.cli.rank_folders import ROOT
from tests.offload.worker.reopening_child import places
from tests.patience import PATIENCE_S

OLD_SERVER = """
import sys
from tests.offload.worker.reopening_child import places
[spec] = places(sys.argv[1]).specs()
print("ready", flush=True)
sys.stdin.read()
"""
CHECK = """
import json, sys
from offload.connector.plugin import end_if_wrong
end_if_wrong(json.loads(sys.argv[1]))
"""


@contextmanager
def old_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OLD_SERVER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def config(folder: Path, **more: object) -> dict:
    tier = {"type": "lmdb", "path": str(folder), "capacity": "16MiB", "reserve": 0}
    return {"cpu": {"capacity": "64MiB"}, "tiers": [tier | more]}


@pytest.mark.parametrize("early", ["kvtiers serve", "vllm serve"])
def test_the_first_process_of_a_new_server_waits_for_the_old_one(
    early: str, tmp_path: Path
) -> None:
    if early == "kvtiers serve":
        command = ["-m", "offload.cli", "serve", "m", "--kv-cpu", "64MiB", "--dry-run"]
        command += ["--kv-disk", f"{tmp_path}:16MiB"]
    else:
        command = ["-c", CHECK, json.dumps(transfer_config(config(tmp_path)))]
    with old_server(tmp_path) as old:
        new = subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
        try:
            assert new.stderr is not None
            line = new.stderr.readline()
            waiting = f"{tmp_path} is in use by pid {old.pid} (test): waiting up to"
            assert waiting in line
            old.kill()
            _, rest = new.communicate(timeout=PATIENCE_S)
        finally:
            new.kill()
            new.wait()
    assert new.returncode == 0, rest


def test_a_worker_waits_for_the_claim_of_an_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with old_server(tmp_path) as old:
        caplog.handler.addFilter(lambda record: old.kill() or True)
        with caplog.at_level(logging.WARNING, tier_claim.__name__):
            [spec] = places(tmp_path).specs()
    assert "for it to end" in caplog.text
    assert [owner.pid for owner in live_owners(tmp_path)] == [os.getpid()]
    assert spec.claim is not None
    spec.claim.close()


def test_waiting_for_an_owner_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_for_owners, "OWNERS_WAIT_S", 0.01)
    lines: list[str] = []
    with old_server(tmp_path) as old:
        with pytest.raises(ConfigError, match=f"in use by pid {old.pid}"):
            patiently(lambda: load_config(config(tmp_path)), Patience(lines.append))
        assert len(lines) == 1
        with pytest.raises(TierUnavailableError, match=f"in use by pid {old.pid}"):
            places(tmp_path).specs()


def test_a_server_with_another_problem_does_not_wait(tmp_path: Path) -> None:
    lines: list[str] = []
    wrong = config(tmp_path, policy="lur")
    with old_server(tmp_path), pytest.raises(ConfigError, match="2 problems"):
        patiently(lambda: load_config(wrong), Patience(lines.append))
    assert lines == []


def test_a_process_of_another_container_with_the_same_pid_is_not_a_relative(tmp_path: Path) -> None:
    """Each container numbers its processes separately."""
    with old_server(tmp_path) as old:
        assert load_config(config(tmp_path), same_server).warnings == (), "a child is a relative"
        [claim] = tmp_path.rglob("rank-0.claim")
        found = json.loads(claim.read_text())
        assert found["pid"] == old.pid
        claim.write_text(json.dumps(found | {"machine": "0123456789ab"}))
        with pytest.raises(ConfigError, match=f"{old.pid} of another container or machine"):
            load_config(config(tmp_path), same_server)
