"""The GPU box without a GPU: probes that hang, crash or fail do not affect others, and the copy
probes run over the libcuda in host memory, which is found under the name of the real one.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.forks import is_alive
from tests.libcuda import ROOT, build
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.thorough

BOX = ROOT / "scripts/gpu_box"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
LEAVES_A_CHILD = (
    "import os, subprocess, sys, pathlib; child = subprocess.Popen("
    "[sys.executable, '-c', 'import time; time.sleep(1e6)'], start_new_session=True); "
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


def schedule(path: Path, *probes: tuple[str, str, float, list[str]], last: str = "") -> Path:
    entries = []
    for name, code, limit_s, needs in probes:
        command = json.dumps(["python", "-c", code])
        entries.append(
            f'[[probe]]\nname = "{name}"\nabout = "{name}"\nlimit_s = {limit_s}\n'
            f"needs = {json.dumps(needs)}\ncommand = {command}\n"
            f"last = {json.dumps(name == last)}\n"
        )
    path.write_text("\n".join(entries))
    return path


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_a_probe_that_hangs_or_crashes_does_not_stop_the_others(tmp_path: Path) -> None:
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
    assert {path.name for path in out.iterdir()} <= {"results.json", "logs.zip", "numbers.json"}
    with zipfile.ZipFile(out / "logs.zip") as logs:
        assert b"no such device" in logs.read("fails.1.txt")


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
    assert results(out) == {}
    box("run", out, "a", "b", "--schedule", plan)
    assert ran.read_text() == "a b "
    box("run", out, "--schedule", plan)
    assert ran.read_text() == "a b c "
    box("run", out, "--schedule", plan, "--again")
    assert ran.read_text() == "a b c b "
    with zipfile.ZipFile(out / "logs.zip") as logs:
        assert sorted(logs.namelist()) == ["a.1.txt", "b.1.txt", "b.2.txt", "c.1.txt"]


def test_a_run_on_another_machine_continues_with_the_results_that_came_back(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write('NAME ')"
    plan = schedule(
        tmp_path / "plan.toml", *((n, note.replace("NAME", n), 60.0, []) for n in ("a", "b"))
    )
    state = tmp_path / "state.json"
    box("run", tmp_path / "one", "a", "--schedule", plan, "--resume", state)
    assert results(tmp_path / "one") == json.loads(state.read_text())
    done = box("run", tmp_path / "two", "--schedule", plan, "--resume", state)
    assert done.returncode == 0
    assert (tmp_path / "ran").read_text() == "a b "
    assert {name: one["status"] for name, one in results(tmp_path / "two").items()} == {
        "a": "ok",
        "b": "ok",
    }
    assert results(tmp_path / "two") == json.loads(state.read_text())


@pytest.mark.parametrize("status", ["cut off after 9 s", "not yet"])
def test_a_probe_without_a_verdict_is_repeated(tmp_path: Path, status: str) -> None:
    plan = schedule(tmp_path / "plan.toml", ("a", "pass", 60, []))
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text(json.dumps({"a": {"name": "a", "status": status}}))
    assert box("run", out, "--schedule", plan).returncode == 0
    assert results(out)["a"]["status"] == "ok"


def test_the_end_of_the_budget_is_not_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that its own limit stops has failed. A probe is not begun in the last seconds."""
    monkeypatch.syspath_prepend(BOX)
    run = importlib.import_module("run")
    probe = run.Probe("hangs", [sys.executable, "-c", HANGS], 0.4, "")
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    assert run.run(probe, tmp_path, 9.0)["status"] == "stopped after 0 s"
    assert run.run(probe, tmp_path, 0.3)["status"] == "cut off after 0 s"
    assert run.why_not(probe, [], {}, 0.3) == ""
    assert run.why_not(probe, [], {}, 0.1) == "no time left"


def test_dangerous_probes_wait_for_all_that_can_still_run(tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    waits = f"import os; raise SystemExit(0 if os.path.exists({str(arrived)!r}) else 75)"
    plan = schedule(
        tmp_path / "plan.toml",
        ("fails", "raise SystemExit(1)", 60, []),
        ("never", "pass", 60, ["fails"]),
        ("waits", waits, 60, []),
        ("then", "pass", 60, ["waits"]),
        ("danger", "pass", 60, []),
        last="danger",
    )
    out = tmp_path / "out"
    assert "skipped: comes last, after waits, then" in box("run", out, "--schedule", plan).stdout
    assert results(out)["waits"]["status"] == "not yet"
    assert "danger" not in results(out)
    arrived.touch()
    box("run", out, "--schedule", plan)
    assert results(out)["danger"]["status"] == "ok"
    assert "never" not in results(out)


def test_a_name_that_is_not_a_probe_is_refused(tmp_path: Path) -> None:
    plan = schedule(tmp_path / "plan.toml", ("a", "pass", 60, []))
    done = box("run", tmp_path / "out", "b", "--schedule", plan)
    assert done.returncode == 2
    assert "has no probe b" in done.stderr


def test_a_name_may_come_after_options(tmp_path: Path) -> None:
    plan = schedule(tmp_path / "plan.toml", ("a", "pass", 60, []), ("b", "pass", 60, []))
    assert box("run", tmp_path / "out", "--schedule", plan, "b").returncode == 0
    assert list(results(tmp_path / "out")) == ["b"]


def test_a_report_without_results_says_what_to_give(tmp_path: Path) -> None:
    done = box("report", tmp_path / "out")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "give the folder or the results.json of run.py" in done.stderr


def test_no_process_of_a_probe_is_left(tmp_path: Path) -> None:
    """Processes in another session, such as the engines of ``bench serve``, are ended too."""
    plan = schedule(tmp_path / "plan.toml", ("leaves", LEAVES_A_CHILD, 60, []))
    child = tmp_path / "child"
    assert box("run", tmp_path / "out", "--schedule", plan, CHILD=str(child)).returncode == 0
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_is_terminated_ends_its_probe(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    write = f"import os; open({str(pid)!r} + '~', 'w').write(str(os.getpid())); "
    write += f"os.rename({str(pid)!r} + '~', {str(pid)!r}); "
    plan = schedule(tmp_path / "plan.toml", ("hangs", write + HANGS, 1e6, []))
    command = [sys.executable, BOX / "run.py", tmp_path / "out", "--schedule", plan]
    run = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not pid.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.terminate()
        assert run.wait(PATIENCE_S) == 1
    finally:
        run.kill()
        run.wait()
    assert not (Path("/proc") / pid.read_text() / "environ").exists()


def test_a_process_that_cannot_be_killed_delays_the_others_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process inside a driver that hangs behaves like this."""
    monkeypatch.syspath_prepend(BOX)
    run = importlib.import_module("run")
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    monkeypatch.setattr(run, "_processes", lambda _: [2**22 + 1])  # a number that none can have
    probe = run.Probe("hangs", [sys.executable, "-c", "pass"], 60.0, "")
    result = run.run(probe, tmp_path, 60.0)
    assert result["status"] == "ok; 1 of its processes cannot be killed"


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
    assert all(probe["limit_s"] <= 500 for probe in probes), "a call may end after 10 minutes"
    dangerous = [probe["name"] for probe in probes if probe.get("last")]
    assert dangerous == ["descriptors-8192", "descriptors-65536"] == names[-2:]


COLLECT = """
import json, sys
import pytest

class Plugin:
    def pytest_collection_finish(self, session):
        found.append([item.nodeid for item in session.items])

found = []
for arguments in json.loads(sys.argv[1]):
    pytest.main([*arguments, "-q", "--collect-only", "-p", "no:cacheprovider"], [Plugin()])
print("FOUND", json.dumps(found), sep="")
"""


def test_the_gpu_tests_are_divided_among_four_probes() -> None:
    """Every test runs in exactly one of them, and a way of copying in only one."""
    probes = tomllib.loads((BOX / "schedule.toml").read_text())["probe"]
    commands = [probe["command"] for probe in probes if "pytest" in probe["command"]]
    arguments = [command[command.index("pytest") + 1 :] for command in commands]
    arguments.append(["tests/gpu", "-o", "addopts=--import-mode=importlib"])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
    )
    *parts, everything = json.loads(done.stdout.rpartition("FOUND")[2])
    assert sorted(name for part in parts for name in part) == sorted(everything)
    for part, way in zip(parts, ("by-batch", "by-kernel", "by-each", ""), strict=True):
        assert all(way in name for name in part)
        assert len(part) > 3


METADATA = """Name: vllm
Requires-Dist: torch==2.13.0
Requires-Dist: numba==0.65.0
Requires-Dist: one[fast]
Requires-Dist: elsewhere; sys_platform == "win32"
Requires-Dist: three; platform_machine == "x86_64" or platform_machine == "aarch64"
Requires-Dist: sounds; extra == "audio"
"""
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ONE = (
    "Name: one\nRequires-Dist: two; extra == 'fast'\nRequires-Dist: four; python_version < '3.0'\n"
)


def wheel(folder: Path, name: str, metadata: str, files: dict[str, bytes | str]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        info = f"{name}-1.0.dist-info"
        facts = {f"{info}/METADATA": f"Metadata-Version: 2.1\nVersion: 1.0\n{metadata}"}
        for at, content in {**facts, f"{info}/WHEEL": WHEEL, **files}.items():
            archive.writestr(at, content)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A miniature of vLLM's wheel, and a few packages that it needs."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    noise = random.Random(1)
    files = {
        "vllm/__init__.py": "version = 1\n" * 1000,
        "vllm/_C_stable_libtorch.abi3.so": noise.randbytes(200_000),
        "vllm/_moe_C_stable_libtorch.abi3.so": noise.randbytes(200_000),
        "vllm/fs_io_C.abi3.so": noise.randbytes(1000),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": noise.randbytes(1000),
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": noise.randbytes(1000),
        "vllm/vllm-rs": noise.randbytes(200_000),
        "vllm/libs/libother.so.1": noise.randbytes(200_000),
        **{f"vllm/data{n}.json": noise.randbytes(100_000).hex() for n in range(4)},
    }
    wheel(folder, "vllm", METADATA, files)
    wheel(folder, "one", ONE, {"one.py": "", "one-1.0.data/purelib/more.py": ""})
    wheel(folder, "two", "Name: two\n", {"two.cpython-312.so": b"", "two-1.0.data/scripts/two": ""})
    wheel(folder, "three", "Name: three\nRequires-Dist: one\n", {"three.py": ""})
    return folder


def pack(tmp_path: Path, wheels: Path) -> tuple[list[Path], subprocess.CompletedProcess[str]]:
    present = tmp_path / "present.txt"
    present.write_text("# the rest\ntorch==2.11.0\nlmdb\nmsgspec\nxxhash\naiofiles\ntyper\nrich\n")
    out, limit_mib = tmp_path / "out", 0.25
    vllm = next(wheels.glob("vllm-*.whl"))
    options = ["--out", out, "--wheel", vllm, "--wheels", wheels, "--present", present]
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    options += ["--limit-mib", limit_mib, "--python", mine]
    done = box("pack", *options, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    carries = sorted(out.glob("carry-*.zip"))
    assert [path for path in carries if path.stat().st_size > limit_mib * 2**20] == []
    assert sorted(out.iterdir()) == carries, "a probe's process is still running"
    return carries, done


def test_portions_contain_what_the_machine_lacks_within_the_limit(
    tmp_path: Path, wheels: Path
) -> None:
    """The portions contain vLLM's compiled files that run with any torch, but no other files with
    similar names. They also contain the requirements of vLLM that are neither installed nor
    needless, including requirements of an extra or with a marker."""
    carries, done = pack(tmp_path, wheels)
    assert done.returncode == 0, done.stderr
    assert len(carries) > 1
    names: list[str] = []
    for carry in carries:
        with zipfile.ZipFile(carry) as archive:
            packed = set(archive.namelist())
            assert json.loads(archive.read("gpu_box.json"))["carries"] == [p.name for p in carries]
            assert json.loads(archive.read("gpu_box.json"))["present"].count("torch") == 1
            names += sorted(packed - {"gpu_box.json"})
    assert sorted(names) == sorted(
        [
            *(f"{n}-1.0.dist-info/METADATA" for n in ("vllm", "one", "two", "three")),
            *(f"{n}-1.0.dist-info/WHEEL" for n in ("vllm", "one", "two", "three")),
            *("one.py", "more.py", "two.cpython-312.so", "three.py", "vllm/__init__.py"),
            *("vllm/_C_stable_libtorch.abi3.so", "vllm/fs_io_C.abi3.so"),
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
            *(f"vllm/data{number}.json" for number in range(4)),
        ]
    )


def test_carries_are_unpacked_as_they_arrive(tmp_path: Path, wheels: Path) -> None:
    carries, done = pack(tmp_path, wheels)
    assert done.returncode == 0, done.stderr
    here = tmp_path / "here"
    here.mkdir()
    code = (
        "import sys, pathlib; sys.path[:0] = [sys.argv[1]]; import vllm_import; "
        "vllm_import.CARRIES = pathlib.Path(sys.argv[2]); print(vllm_import.unpack())"
    )

    def unpack() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(BOX / "probes"), str(here)],
            capture_output=True,
            text=True,
            env={**os.environ, "GPU_BOX_SITE": str(tmp_path / "site")},
            timeout=PATIENCE_S,
            cwd=ROOT,
        )
        assert done.returncode in (0, 75), done.stderr
        return done.stdout if done.returncode else ""

    assert "run pack.py" in unpack()
    for number, carry in enumerate(carries, 1):
        carry.rename(here / carry.name)
        missing = ", ".join(path.name for path in carries[number:])
        assert (f"not here yet: {missing};" in unpack()) is (number < len(carries))
        (here / carry.name).unlink()  # the next call may bring only the next carry
    assert unpack() == ""
    assert (tmp_path / "site/vllm/_C_stable_libtorch.abi3.so").stat().st_size == 200_000


RIGHT = {"loaded_tokens": 900.0, "verified_chunks": 30.0, "vllm:num_preemptions": 2.0}


@pytest.mark.parametrize(
    ("counters", "complaint"),
    [
        ({}, ""),
        ({"loaded_tokens": 100.0}, "100 tokens were loaded, fewer than 500"),
        ({"verified_chunks": 0.0}, "nothing was verified"),
        ({"unverified_chunks": 1.0}, "loads were not verified"),
        ({"differing_chunks": 1.0}, "loaded bytes differ from what was computed"),
        ({"load_failures": 1.0}, "loads failed"),
        ({"vllm:num_preemptions": 0.0}, "no request was preempted"),
    ],
)
def test_the_serving_probe_fails_if_nothing_was_restored_or_compared(
    counters: dict[str, float],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(BOX / "probes")
    monkeypatch.setenv("GPU_BOX_SITE", str(tmp_path / "none"))
    wrong = importlib.import_module("serve").wrong
    found: dict[str, Any] = {
        "distinct tokens": 1000,
        "counters, cold": {},
        "counters, warm": RIGHT | counters,
        "counters, wrong bits": {"differing_chunks": 1.0},
    }
    assert wrong(found) == [complaint] * bool(complaint)
    found["counters, wrong bits"] = {}
    assert "wrong bits were not detected" in wrong(found)


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
    assert len(found["pinning"]["numbers"]) == 8

    guide = tmp_path / "gpu.md"
    places = ["--to", tmp_path / "results", "--guide", guide]
    guide.write_text("before\n")
    done = box("report", out, "--schedule", plan, *places)
    assert done.returncode != 0
    assert "lacks the lines" in done.stderr
    guide.write_text((ROOT / "docs/guides/gpu.md").read_text())
    for _ in range(2):
        done = box("report", out, "--schedule", plan, *places)
        assert done.returncode == 0, done.stderr
    text = guide.read_text()
    assert text.count("| machine | machine | ok |") == 1
    assert "[All numbers](results/gpu.md)" in text
    assert "Nothing yet." not in text
    assert "## What has not been measured" in text
    page = (tmp_path / "results/gpu.md").read_text()
    assert "| machine | machine | ok |" in page
    assert "* copies per call: 1024" in page
