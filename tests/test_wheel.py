"""Wheel and source distribution: their contents, and the wheel in use outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("offload", "policies", "tiers")
SOURCES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("SECURITY.md", "LICENSE", "docs", "examples", *PACKAGES),
)
DATA = ("share/kvtiers/alerts.yaml", "share/kvtiers/grafana.json")

pytestmark = pytest.mark.thorough


def run(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a user starts it, with nothing of this checkout in its environment."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because a build writes beside its sources."""
    place = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)
    return place


def build_wheel(sources: Path, place: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = run(*build, "-w", place, folder=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = place.glob("kvtiers-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(place)!r})"
    done = run(sys.executable, "-c", program, folder=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = place.glob("kvtiers-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; other packages come from the one that runs the tests."""
    place = tmp_path_factory.mktemp("environment")
    done = run(sys.executable, "-m", "venv", "--without-pip", place / "venv", folder=place)
    assert done.returncode == 0, done.stderr
    python = place / "venv" / "bin" / "python"
    below = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=place
    )
    (Path(below.stdout.strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    done = run(*pip, "--ignore-installed", "--no-index", wheel, folder=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return python.parent


def test_the_wheel_contains_what_runs_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        text = file.read(metadata).decode()
    tops = {name.split("/")[0] for name in names if not name.startswith("kvtiers-")}
    assert tops == set(PACKAGES)
    data = sorted(name.partition(".data/data/")[2] for name in names if ".data/" in name)
    assert data == sorted(DATA)
    for name in ("offload/py.typed", "offload/connector/contract/declared.toml"):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for field in ("Author: ", "Keywords: ", "Classifier: Operating System :: POSIX :: Linux"):
        assert f"\n{field}" in text, field


def test_the_source_distribution_makes_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    for name in ("SECURITY.md", "docs/guides/serve.md", "examples/custom_tier.py"):
        assert (unpacked / name).is_file(), name
    assert not (unpacked / "tests").exists()
    again = build_wheel(unpacked, tmp_path)
    contents = []
    for one in (wheel, again):
        with zipfile.ZipFile(one) as archive:
            contents.append({info.filename: info.CRC for info in archive.infolist()})
    assert contents[0] == contents[1]


def test_the_dashboard_is_installed_where_the_guide_says(installed: Path) -> None:
    for name in DATA:
        kept = ROOT / "docs/dashboards" / Path(name).name
        assert (installed.parent / name).read_bytes() == kept.read_bytes()


def test_commands_run_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import offload; print(offload.__file__)",
                folder=tmp_path)  # fmt: skip
    assert where.stdout.startswith(str(installed.parent)), where.stdout + where.stderr
    kvtiers = installed / "kvtiers"
    assert run(kvtiers, "--version", folder=tmp_path).stdout.startswith("kvtiers ")
    checked = run(kvtiers, "check", '{"cpu": {"capacity": "64MiB"}}', folder=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "the configuration fits this machine" in checked.stdout
    served = run(kvtiers, "serve", "m", "--kv-cpu", "64MiB", "--dry-run", folder=tmp_path)
    assert served.stdout.startswith("vllm serve m --kv-transfer-config")
    missing = run(kvtiers, "doctor", "/no/such/model", folder=tmp_path)
    assert missing.returncode == 3
    assert "Verdict  unknown: there is no such model here" in missing.stdout


def test_vllm_finds_the_connector_by_both_names(installed: Path, tmp_path: Path) -> None:
    program = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F\n"
        "found = {F.get_connector_class_by_name(n) for n in ('KvTiersConnector', "
        "'OffloadConnector')}\n"
        "print(*(one.__module__ + ':' + one.__qualname__ for one in found))\n"
    )
    done = run(installed / "python", "-c", program, folder=tmp_path)
    last = done.stdout.strip().splitlines()[-1:]
    assert last == ["offload.connector.connector:KvTiersConnector"], done.stderr
