"""Rehearses on a machine without a network or a GPU: collects the GPU tests in a scratch
environment, unpacks the carries and imports vLLM's GPU runner there, and configures engines as if
there were a GPU.

    python scripts/gpu_box/rehearse.py [--wheels FOLDER] [--keep FOLDER]

Run it with the target's version of Python. It first installs the packages that vLLM needs and the
target has: those of ``present.txt``, in the versions given there (from a registry, or only from
``--wheels``). Their other dependencies are removed again. The other steps run in a network
namespace without interfaces, if the kernel allows it. Prints how long each step took.
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
"""The packages of ``present.txt`` that kvtiers and its tests import."""
NO_DRIVER = """
int cuGetProcAddress_v2(void) { return 100; }
int cuPointerGetAttribute(void) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
"""
"""A stand-in for the driver with the functions to which vLLM's extension is linked. 100 means that
there is no device."""


def step(name: str, command: Sequence[str | Path], **options: Any) -> None:
    """Run a command and print how long it took. Exits if it fails."""
    began = time.monotonic()
    code = subprocess.run([str(word) for word in command], **options).returncode
    ended = "done" if code == 0 else "failed"
    print(f"{name}: {ended} in {time.monotonic() - began:.0f} s", flush=True)
    if code:
        sys.exit(code)


def offline() -> list[str]:
    """The prefix that runs a command without a network. Empty if that is not allowed."""
    command = ["unshare", "--net", "--map-root-user"]
    works = shutil.which("unshare") and subprocess.run([*command, "true"]).returncode == 0
    if not works:
        print("no network namespace can be created here: the import can use the network")
    return command if works else []


def packed() -> dict[str, Any]:
    """Read the description of the carries that ``pack.py`` wrote. Exits if they are for another
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
    """On a machine without a driver, build a stand-in library whose calls all fail, so that vLLM's
    extension can be loaded. Returns the search path for libraries."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libcuda.so.1")
        return path
    except OSError:
        print("there is no driver here: a stand-in for libcuda.so.1 fails every call")
    folder.mkdir(exist_ok=True)
    source = folder / "no_driver.c"
    source.write_text(NO_DRIVER)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    return os.pathsep.join(filter(None, [str(folder), path]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--wheels", type=Path, help="take packages only from here")
    parser.add_argument("--keep", type=Path, help="create the environment here and keep it")
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
        command = [*cut_off, python, "-m", "pytest", "tests/gpu", "-q", "--collect-only"]
        command += ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
        step("collecting the GPU tests", command, cwd=ROOT, env=env)
        step("unpacking and importing", [*cut_off, *probe], cwd=ROOT, env=env)
        command = [*cut_off, python, HERE / "probes/rivals.py", "--model=llama-8b", "--check"]
        step("starting bench serve", command, cwd=ROOT, env=env)
        # vLLM connects to itself, so the namespace needs its loopback interface.
        script = f'ip link set lo up; exec "{python}" "{HERE / "pretend.py"}"'
        command = [*cut_off, "sh", "-c", script]
        step("configuring engines and building models", command, cwd=ROOT, env=env)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
