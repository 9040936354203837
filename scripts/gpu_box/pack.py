"""Packs everything that a machine with only torch needs to serve with vLLM, in portions of limited
size.

    python scripts/gpu_box/pack.py [--out .gpu_box] [--wheel vllm-0.32.0-....whl] [--limit-mib 56]

Needs pip and a registry (or ``--wheel`` and ``--wheels`` with files that are here). Takes from
vLLM's wheel its Python files and the one compiled extension that uses only torch's stable ABI, so
that it runs with the machine's torch, and every package that vLLM needs and ``present.txt`` does
not list. Writes ``carry-N.tar.xz``; the probe ``vllm-import`` unpacks them.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM = "vllm==0.32.0"
EXTENSIONS = ("_C_stable_libtorch.abi3.so",)
OURS = ("lmdb", "msgspec", "xxhash", "aiofiles", "typer", "rich")
MIB = 2**20
ELSEWHERE = re.compile(r"extra\s*==|win32|Windows|darwin|Darwin|aarch64|python_version\s*<")


def normal(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {normal(line) for line in lines if line and not line.startswith("#")}


def requirements(wheel: Path) -> Iterable[str]:
    """The packages that a wheel needs on Linux, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        found = HeaderParser().parsestr(archive.read(name).decode())
    for line in found.get_all("Requires-Dist", []):
        condition = line.partition(";")[2]
        if re.search(
            r"extra\s*==|win32|Windows|darwin|Darwin|aarch64|python_version\s*<", condition
        ):
            continue
        yield line.partition(";")[0].strip()


def download(requirement: str, folder: Path, python: str) -> Path:
    """Fetch the wheel of one package for the target's Python."""
    before = set(folder.glob("*.whl"))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, requirement], check=True)
    new = set(folder.glob("*.whl")) - before
    if not new:  # it has already been downloaded
        name = normal(re.split(r"[\s<>=!~\[(;]", requirement)[0])
        new = {path for path in before if normal(path.name.split("-")[0]) == name}
    return new.pop()


def closure(vllm: Path, folder: Path, absent_from: set[str], python: str) -> list[Path]:
    """The wheels of everything that vLLM and kvtiers need and the machine lacks."""
    wheels: list[Path] = []
    todo = [*requirements(vllm), *OURS]
    seen: set[str] = set(absent_from)
    while todo:
        requirement = todo.pop()
        name = normal(re.split(r"[\s<>=!~\[(;]", requirement)[0])
        if name in seen:
            continue
        seen.add(name)
        wheel = download(requirement, folder, python)
        print(f"{wheel.name} ({wheel.stat().st_size / MIB:.1f} MiB)", flush=True)
        wheels.append(wheel)
        todo += requirements(wheel)
    return wheels


def unpack(wheel: Path, to: Path, *, extensions: tuple[str, ...] | None = None) -> None:
    """Unpack a wheel; of its compiled files keep only ``extensions``, if they are given."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_compiled = name.endswith((".so", ".a", ".cubin")) or ".so." in name
            if extensions is None or not is_compiled or name.endswith(extensions):
                archive.extract(name, to)


def portions(tree: Path, out: Path, limit: int) -> list[Path]:
    """Pack a tree into archives of at most ``limit`` bytes each."""
    for old in out.glob("carry-*.tar.xz"):
        old.unlink()
    # Compress each file alone and fast: an upper bound of its share of an archive.
    sizes = {
        path: len(lzma.compress(path.read_bytes(), preset=1)) + 200
        for path in tree.rglob("*")
        if path.is_file()
    }
    bins: list[tuple[int, list[Path]]] = []
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        fitting = (n for n, (used, _) in enumerate(bins) if used + sizes[path] <= limit)
        number = next(fitting, len(bins))
        if number == len(bins):
            bins.append((0, []))
        used, paths = bins[number]
        bins[number] = used + sizes[path], [*paths, path]
    carries = []
    for number, (_, paths) in enumerate(bins, 1):
        carry = out / f"carry-{number}.tar.xz"
        with tarfile.open(carry, "w:xz", preset=6) as archive:
            for path in paths:
                archive.add(path, path.relative_to(tree))
        if carry.stat().st_size > limit:
            sys.exit(f"{carry} has {carry.stat().st_size:,} bytes, more than {limit:,}")
        carries.append(carry)
    return carries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / ".gpu_box")
    parser.add_argument("--wheel", type=Path, help="vLLM's wheel for CUDA, if it is already here")
    parser.add_argument("--wheels", type=Path, help="folder for downloads")
    parser.add_argument("--present", type=Path, default=HERE / "present.txt")
    parser.add_argument("--python", default="3.12", help="of the target")
    parser.add_argument("--limit-mib", type=float, default=56.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        folder = options.wheels or Path(scratch) / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        vllm = options.wheel or download(VLLM, folder, options.python)
        absent_from = names_in(options.present) | names_in(HERE / "needless.txt") | {"vllm"}
        tree = Path(scratch) / "tree"
        unpack(vllm, tree, extensions=EXTENSIONS)
        for wheel in closure(vllm, folder, absent_from, options.python):
            unpack(wheel, tree)
        for carry in portions(tree, options.out, int(options.limit_mib * MIB)):
            print(f"{carry}: {carry.stat().st_size / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
