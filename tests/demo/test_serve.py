"""``./run serve``: what it installs, refuses and starts, with the real scripts in a copy of the
checkout, where ``nvidia-smi`` and the environment's Python are stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.serve import too_large
from tests.bare_checkout import copy_to, script
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
H200 = "580.159.04, 9.0"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that ./run needs, set up for CUDA."""
    copy = copy_to(tmp_path / "checkout")
    gpu(copy, H200)
    script(copy / ".venv-cuda/bin/python", 'echo "in $PWD: $*"; echo "path $PYTHONPATH"')
    return copy


def gpu(checkout: Path, answer: str) -> None:
    """A machine whose GPU reports this driver and compute capability."""
    script(
        checkout / "bin/nvidia-smi",
        f'case "$1" in --list-gpus) echo "GPU 0" ;; *) echo "{answer}" ;; esac',
    )


def bash(checkout: Path, command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd or checkout,
        env={**os.environ, "PATH": f"{checkout}/bin:{os.environ['PATH']}", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def stamp_of(checkout: Path) -> str:
    setup = "command=serve; . scripts/setup.sh; install_vllm_cuda() { :; }; setup cuda"
    done = bash(checkout, setup)
    assert done.returncode == 0, done.stderr
    return (checkout / ".venv-cuda/kvtiers.stamp").read_text()


def installed(checkout: Path) -> list[str]:
    """The arguments of each call of pip; all calls but the last fail."""
    pip = 'pip_install() { echo "$*"; [ "$1 $2 $3" != \'-e .[vllm] -c\' ]; }'
    done = bash(checkout, f". scripts/setup.sh; {pip}; install_vllm_cuda")
    return [line for line in done.stdout.splitlines() if not line.startswith("---")]


def test_serving_installs_the_pinned_versions_and_no_development_tools(checkout: Path) -> None:
    first, second = installed(checkout)
    assert first == "-e .[vllm] -c requirements/cuda.txt"
    assert second == "-e .[vllm] vllm==0.32.0"


def test_the_constraints_are_complete() -> None:
    """One version of everything, including torch and vLLM's own pins."""
    lines = (ROOT / "requirements/cuda.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pinned if line.count("==") != 1] == []
    names = [line.split("==")[0].lower() for line in pinned]
    assert len(names) == len(set(names)) > 100
    assert {"vllm", "torch", "triton", "transformers", "numpy", "lmdb", "llvmlite"} <= set(names)
    assert [line for line in pinned if "+" in line] == [], "builds that exist only on one index"


@pytest.mark.parametrize("file", ["requirements/cuda.txt", "pyproject.toml", "scripts/setup.sh"])
def test_changed_constraints_cause_a_new_installation(checkout: Path, file: str) -> None:
    before = stamp_of(checkout)
    assert stamp_of(checkout) == before
    (checkout / file).write_text((checkout / file).read_text() + "\n# changed\n")
    assert stamp_of(checkout) != before


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("570.86.10, 9.0", "the NVIDIA driver is 570.86.10; .* needs 580 or later"),
        ("580.65, 7.5", "the GPU has compute capability 7.5; .* need 8.0"),
        ("", "nvidia-smi finds no NVIDIA GPU"),
    ],
)
def test_a_machine_that_cannot_serve_is_refused_before_anything_is_installed(
    checkout: Path, answer: str, words: str
) -> None:
    gpu(checkout, answer)
    script(checkout / "bin/nvidia-smi", f'[ -n "{answer}" ] || exit 9; echo "{answer}"')
    done = bash(checkout, "KVTIERS_VARIANT=cuda ./run serve model")
    assert done.returncode == 1
    assert not (checkout / ".venv-cuda/kvtiers.stamp").exists()
    assert re.search(words, done.stderr.replace("\n", " ")), done.stderr
    assert "KVTIERS_VARIANT=cpu ./run serve" in done.stderr


def test_a_relative_path_is_relative_to_the_caller(checkout: Path, tmp_path: Path) -> None:
    stamp_of(checkout)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = bash(checkout, "../checkout/run serve models/mine --config my.yaml", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert f"in {elsewhere}: -P -m demo.serve models/mine --config my.yaml" in done.stdout
    assert f"path {checkout}" in done.stdout


def test_modules_in_the_callers_folder_are_not_imported(checkout: Path, tmp_path: Path) -> None:
    """The folder may contain anything, for example a user's file named like a module that vLLM
    imports."""
    stamp_of(checkout)
    script(checkout / ".venv-cuda/bin/python", f'exec {sys.executable} "$@"')
    for package in ("demo", "offload", "policies", "tiers"):
        (checkout / package).symlink_to(ROOT / package)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "typer.py").write_text("raise SystemExit('imported from the current folder')\n")
    done = bash(checkout, "../checkout/run serve m --kv-cpu 64MiB --dry-run", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm serve m ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """30 GiB of weights, according to the file's length."""
    for number in range(3):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(10 * GIB)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "gpus", "fits"),
    [
        ([], [24 * GIB], False),
        ([], [80 * GIB], True),
        (["--tensor-parallel-size", "2"], [24 * GIB] * 2, True),
        (["-tp=2"], [12 * GIB] * 2, False),
        (["--cpu-offload-gb", "20"], [24 * GIB], True),
        ([], [], True),
    ],
)
def test_a_model_that_is_too_large_for_the_gpu_is_refused_with_numbers(
    model: Path, flags: list[str], gpus: list[int], fits: bool
) -> None:
    said = too_large(model, flags, gpus)
    assert (said == "") is fits
    if not fits:
        assert "30,720 MiB" in said
        assert "24,576 MiB" in said
        assert "--tensor-parallel-size" in said


def test_a_model_from_a_hub_is_left_to_vllm() -> None:
    assert too_large(Path("Qwen/Qwen3-8B"), [], [GIB]) == ""
