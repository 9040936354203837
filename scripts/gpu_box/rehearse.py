"""Unpacks the carries in a scratch environment and imports vLLM's GPU runner there, without a
network.

    python scripts/gpu_box/rehearse.py [--torch 2.11.0] [--triton 3.6.0] [--wheels FOLDER]

The environment is made first, with the target's torch and Triton and the packages of
``present.txt`` that vLLM needs (from a registry, or from ``--wheels`` alone). The other steps run
in a network namespace without interfaces, if the kernel allows it. Prints how long each part took.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEEDED = ("transformers", "numpy", "pytest", "psutil", "llvmlite", "typer", "rich", "aiofiles")


def step(name: str, command: Sequence[str | Path], **options: object) -> None:
    """Run a command and print how long it took; ends the program if it fails."""
    began = time.monotonic()
    words = [str(word) for word in command]
    code = subprocess.run(words, **options).returncode  # type: ignore[call-overload]  # any option
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--triton", default="3.6.0")
    parser.add_argument("--wheels", type=Path, help="take packages from here alone")
    parser.add_argument("--keep", type=Path, help="make the environment here and keep it")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="gpu-box-"))
    try:
        python = folder / "venv/bin/python"
        if not python.exists():
            step("environment", [sys.executable, "-m", "venv", folder / "venv"])
            source = ["--no-index", "--find-links", options.wheels] if options.wheels else []
            wanted = [f"torch=={options.torch}", f"triton=={options.triton}", *NEEDED]
            install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
            step("torch and the packages that the machine has", [*install, *source, *wanted])
        env = os.environ | {"GPU_BOX_SITE": str(folder / "site"), "PYTHONPATH": str(ROOT)}
        probe = [python, HERE / "probes/vllm_import.py"]
        step("unpacking and importing", [*offline(), *probe], cwd=ROOT, env=env)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
