"""Unpacks the carries in a scratch environment, imports vLLM's GPU runner there, and configures
engines as if there were a GPU, without a network and without a GPU.

    python scripts/gpu_box/rehearse.py [--wheels FOLDER] [--keep FOLDER]

Run it with the target's version of Python. First it installs what the target has of the packages
that vLLM needs: those of ``present.txt`` in the versions named there (from a registry, or from
``--wheels`` alone); what comes along with them is removed again. The other steps run in a network
namespace without interfaces, if the kernel allows it. Prints how long each part took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contents import FACTS, HERE, check_python, listed, normal

ROOT = HERE.parents[1]
PRESENT = HERE / "present.txt"
OURS = ("torch", "triton", "numpy", "pytest", "psutil", "llvmlite", "matplotlib")
"""The packages of that list that kvtiers and its tests import."""
NO_DRIVER = """
int cuGetProcAddress_v2(void) { return 100; }
int cuPointerGetAttribute(void) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
"""
"""The functions of the driver to which vLLM's extension is linked; 100: there is no device."""


def step(name: str, command: Sequence[str | Path], **options: Any) -> None:
    """Run a command and print how long it took; ends the program if it fails."""
    began = time.monotonic()
    code = subprocess.run([str(word) for word in command], **options).returncode
    ended = "done" if code == 0 else "failed"
    print(f"{name}: {ended} in {time.monotonic() - began:.0f} s", flush=True)
    if code:
        sys.exit(code)


def offline() -> list[str]:
    """The prefix that cuts a command off from the network; empty if that is not allowed."""
    command = ["unshare", "--net", "--map-root-user"]
    works = shutil.which("unshare") and subprocess.run([*command, "true"]).returncode == 0
    if not works:
        print("no network namespace can be made here: the import is not cut off")
    return command if works else []


def packed() -> dict[str, Any]:
    """The facts that ``pack.py`` left about the carries. Ends the program if they do not fit this
    Python."""
    carry = ROOT / ".gpu_box/carry-1.zip"
    if not carry.exists():
        sys.exit(f"{carry} is missing: run {HERE / 'pack.py'} first")
    with zipfile.ZipFile(carry) as archive:
        facts: dict[str, Any] = json.loads(archive.read(FACTS))
    check_python(facts["python"])
    return facts


def environment(python: Path, needed: Sequence[str], wheels: Path | None) -> None:
    """Install the packages that the target has, and nothing else."""
    step("environment", [sys.executable, "-m", "venv", python.parents[1]])
    have = listed(PRESENT)
    names = dict.fromkeys([*OURS, *map(normal, needed)])
    wanted = [have[name] for name in names]
    source = ["--no-index", "--find-links", str(wheels)] if wheels else []
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--only-binary=:all:", "--no-compile", *source]
    step("the packages that the machine has", [*install, *wanted])
    done = subprocess.run([*pip, "list", "--format=json"], stdout=subprocess.PIPE, check=True)
    names_here = {normal(one["name"]) for one in json.loads(done.stdout)}
    surplus = sorted(names_here - set(have) - {"pip"})
    if surplus:
        step(f"without {', '.join(surplus)}", [*pip, "uninstall", "--quiet", "--yes", *surplus])


def stand_in(folder: Path) -> str:
    """Without a driver: a library in its name that refuses every call, so that vLLM's extension can
    be loaded. Returns the search path for libraries."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libcuda.so.1")
        return path
    except OSError:
        print("there is no driver here: a stand-in for libcuda.so.1 refuses every call")
    folder.mkdir(exist_ok=True)
    source = folder / "no_driver.c"
    source.write_text(NO_DRIVER)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    return os.pathsep.join(filter(None, [str(folder), path]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="take packages from here alone")
    parser.add_argument("--keep", type=Path, help="make the environment here and keep it")
    options = parser.parse_args()
    facts = packed()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="gpu-box-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = folder / "venv/bin/python"
        if not python.exists():
            environment(python, facts["present"], options.wheels)
        env = os.environ | {
            "GPU_BOX_SITE": str(folder / "site"),
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": stand_in(folder / "driver"),
        }
        probe = [python, HERE / "probes/vllm_import.py"]
        cut_off = offline()
        step("unpacking and importing", [*cut_off, *probe], cwd=ROOT, env=env)
        # vLLM connects to itself, so the namespace needs its loopback interface.
        script = f'ip link set lo up; exec "{python}" "{HERE / "pretend.py"}"'
        command = [*cut_off, "sh", "-c", script]
        step("configuring engines and building models", command, cwd=ROOT, env=env)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
