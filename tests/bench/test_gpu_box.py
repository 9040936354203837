"""The GPU box without a GPU: probes that hang, crash or fail cost only themselves, and the copy
probes run over the libcuda in host memory, which is found under the name of the real one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.libcuda import ROOT, build
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.thorough

BOX = ROOT / "scripts/gpu_box"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
LEAVES_A_CHILD = (
    "import os, subprocess, sys, pathlib; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)']); "
    "pathlib.Path(os.environ['CHILD']).write_text(str(child.pid))"
)
WRITES = "import os, pathlib; pathlib.Path(os.environ['PROBE_RESULT']).write_text('{\"a\": 1}')"


def box(command: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BOX / f"{command}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=PATIENCE_S,
    )


def schedule(path: Path, *probes: tuple[str, str, float, list[str]]) -> Path:
    entries = []
    for name, code, limit_s, needs in probes:
        command = json.dumps(["python", "-c", code])
        entries.append(
            f'[[probe]]\nname = "{name}"\nabout = "{name}"\nlimit_s = {limit_s}\n'
            f"needs = {json.dumps(needs)}\ncommand = {command}\n"
        )
    path.write_text("\n".join(entries))
    return path


def results(out: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in out.glob("*.json")]
    return {one["name"]: one for one in found if "name" in one}


def test_a_probe_that_hangs_or_crashes_costs_only_itself(tmp_path: Path) -> None:
    plan = schedule(
        tmp_path / "plan.toml",
        ("hangs", HANGS, 0.5, []),
        ("crashes", CRASHES, 60, []),
        ("fails", "raise SystemExit('no such device')", 60, []),
        ("needs-it", "pass", 60, ["fails"]),
        ("works", WRITES, 60, []),
    )
    out = tmp_path / "out"
    done = box("run", out, "--schedule", plan)
    assert done.returncode == 1
    found = results(out)
    assert {name: one["status"] for name, one in found.items()} == {
        "hangs": "stopped after 0 s",
        "crashes": "signal 11",
        "fails": "exit 1",
        "works": "ok",
    }
    assert "skipped: fails has not succeeded" in done.stdout
    assert found["works"]["numbers"] == {"a": 1}
    assert "no such device" in found["fails"]["tail"]
    assert "1 of 5 succeeded" in done.stdout


def test_a_second_run_continues_where_the_first_ended(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write('NAME ')"
    plan = schedule(
        tmp_path / "plan.toml",
        ("a", note.replace("NAME", "a"), 60, []),
        ("b", note.replace("NAME", "b") + "; raise SystemExit(3)", 60, []),
        ("c", note.replace("NAME", "c"), 60, []),
    )
    out = tmp_path / "out"
    assert "skipped: no time left" in box("run", out, "--schedule", plan, "--budget", 0).stdout
    box("run", out, "a", "b", "--schedule", plan)
    assert ran.read_text() == "a b "
    box("run", out, "--schedule", plan)
    assert ran.read_text() == "a b c "
    box("run", out, "--schedule", plan, "--again")
    assert ran.read_text() == "a b c b "


def test_no_process_of_a_probe_is_left(tmp_path: Path) -> None:
    plan = schedule(tmp_path / "plan.toml", ("leaves", LEAVES_A_CHILD, 60, []))
    child = tmp_path / "child"
    assert box("run", tmp_path / "out", "--schedule", plan, CHILD=str(child)).returncode == 0
    path = Path("/proc") / child.read_text() / "stat"
    deadline = time.monotonic() + PATIENCE_S
    while path.exists() and path.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_schedule_is_valid_and_its_scripts_exist() -> None:
    done = box("run", "/nonexistent", "--help")
    assert done.returncode == 0
    probes = tomllib.loads((BOX / "schedule.toml").read_text())["probe"]
    names = [probe["name"] for probe in probes]
    assert len(names) == len(set(names))
    for number, probe in enumerate(probes):
        assert set(probe.get("needs", [])) <= set(names[:number])
        for word in probe["command"]:
            assert not word.startswith("scripts/") or (ROOT / word).exists()
    limits = sum(probe["limit_s"] for probe in probes)
    assert limits < 60 * 60, "all limits together, should every probe reach its own"


def test_portions_contain_the_python_files_and_one_extension_within_the_limit(
    tmp_path: Path,
) -> None:
    """A miniature of vLLM's wheel: its other compiled files are left out."""
    wheel = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    noise = random.Random(1)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm-0.32.0.dist-info/METADATA", "Name: vllm\nRequires-Dist: torch\n")
        archive.writestr("vllm/__init__.py", "version = 1\n" * 1000)
        archive.writestr("vllm/_C.abi3.so", noise.randbytes(400_000))
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", noise.randbytes(200_000))
        for number in range(4):
            archive.writestr(f"vllm/data{number}.json", noise.randbytes(100_000).hex())
    present = tmp_path / "present.txt"
    present.write_text("# the rest\ntorch\nlmdb\nmsgspec\nxxhash\naiofiles\ntyper\nrich\n")
    out, limit_mib = tmp_path / "out", 0.25
    options = ["--out", out, "--wheel", wheel, "--present", present, "--limit-mib", limit_mib]
    done = box("pack", *options)
    assert done.returncode == 0, done.stderr
    carries = sorted(out.glob("carry-*.tar.xz"))
    assert len(carries) > 1
    assert [path for path in carries if path.stat().st_size > limit_mib * 2**20] == []
    names = []
    for carry in carries:
        with tarfile.open(carry) as archive:
            names += archive.getnames()
    assert len(names) == len(set(names)) == 7
    assert "vllm/_C_stable_libtorch.abi3.so" in names
    assert "vllm/_C.abi3.so" not in names
    assert sorted(out.iterdir()) == carries, "something else is left"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1, as on a machine with a GPU."""
    folder = tmp_path_factory.mktemp("driver")
    build(folder / "libcuda.so.1")
    return folder


def test_the_copy_probes_run_over_the_libcuda_in_host_memory(tmp_path: Path, driver: Path) -> None:
    """The loader finds libcuda.so.1 through its own search. The measured numbers have no meaning
    here."""
    plan = tmp_path / "plan.toml"
    scripts = {"machine": [], "ways": [], "descriptors": ["1024", "2048"], "pinning": ["64"]}
    plan.write_text(
        "\n".join(
            f'[[probe]]\nname = "{name}"\nabout = "{name}"\nlimit_s = {PATIENCE_S}\n'
            f"command = {json.dumps(['python', f'scripts/gpu_box/probes/{name}.py', *arguments])}\n"
            for name, arguments in scripts.items()
        )
    )
    out = tmp_path / "out"
    done = box("run", out, "--schedule", plan, LD_LIBRARY_PATH=str(driver), PROBE_SMALL="1")
    found = results(out)
    assert done.returncode == 0, {n: one["tail"][-800:] for n, one in found.items()}
    machine, ways = found["machine"]["numbers"], found["ways"]["numbers"]
    assert machine["batched call"] is True
    assert machine["host pointers (attribute 91)"] is True
    assert {name.split(", ")[1] for name in ways} == {"store", "load"}
    assert found["descriptors"]["numbers"]["copies per call"] == 1024
    assert len(found["pinning"]["numbers"]) == 10

    done = box("report", out, "--schedule", plan, "--to", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "results/gpu.md").read_text()
    assert "| machine | machine | ok |" in page
    assert "* copies per call: 1024" in page
