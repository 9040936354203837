"""Packs everything that a machine with only torch needs to serve with vLLM, into archives of
limited size ("carries").

    python scripts/gpu_box/pack.py [--out .gpu_box] [--wheel vllm-0.32.0-....whl] [--limit-mib 56]

Needs pip and a registry (or ``--wheel`` and ``--wheels`` with local files). Packs the Python files
of vLLM's wheel, the compiled extensions that run with the machine's torch (because they use torch's
stable ABI, or no torch), and every package that vLLM needs and ``present.txt`` does not list.
Writes ``carry-N.zip``, which the probe ``vllm-import`` unpacks. Carries are deflated like wheels:
LZMA would save a sixth of the size, but take minutes here and seconds on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from contents import FACTS, HERE, listed, normal
from packaging.requirements import Requirement

VLLM = Requirement("vllm==0.32.0")
EXTENSIONS = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/fs_io_C.abi3.so",
)
"""The compiled files to pack: kernels, except those for mixtures of experts; FlashAttention 3,
without which vLLM cannot be imported on CUDA; the I/O of vLLM's file tier."""
LEFT_OUT = ("vllm/vllm-rs", "pycountry/locales/")
"""Files to leave out: vLLM's front end in Rust, an executable of 50 MiB, and translated names of
countries."""
OURS = ("lmdb", "msgspec", "xxhash", "aiofiles", "typer", "rich")
MIB = 2**20


def requirements(wheel: Path, extras: Iterable[str], python: str) -> list[Requirement]:
    """The packages that a wheel, with these extras, needs on the target."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [
        one
        for one in found
        if one.marker is None
        or any(one.marker.evaluate(target | {"extra": extra}) for extra in ("", *extras))
    ]


def download(requirement: Requirement, folder: Path, python: str) -> Path:
    """Download the wheel of one package for the target's Python."""
    requirement.extras, requirement.marker = set(), None
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
    if subprocess.run([*command, str(requirement)]).returncode:
        sys.exit(f"pip could not download {requirement} for Python {python}")
    new = set(folder.glob("*.whl")) - before
    if not new:  # the wheel has already been downloaded
        name = normal(requirement.name)
        new = {path for path in before if normal(path.name.split("-")[0]) == name}
    return new.pop()


def closure(
    vllm: Path, folder: Path, have: set[str], without: set[str], python: str
) -> tuple[list[Path], list[str]]:
    """Return the wheels of all packages that vLLM and kvtiers need and the machine lacks, and the
    names of the needed packages that the machine has."""
    wheels: dict[str, Path] = {"vllm": vllm}
    found: set[str] = set()
    todo = [*requirements(vllm, (), python), *map(Requirement, OURS)]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name, extras = normal(requirement.name), sorted(requirement.extras)
        if name in without or (name, str(extras)) in seen:
            continue
        seen.add((name, str(extras)))
        if name in have:
            found.add(name)
            continue
        if name not in wheels:
            wheels[name] = wheel = download(requirement, folder, python)
            print(f"{wheel.name} ({wheel.stat().st_size / MIB:.1f} MiB)", flush=True)
        todo += requirements(wheels[name], extras, python)
    return list(wheels.values())[1:], sorted(found)


@dataclass(frozen=True)
class Entry:
    """One file of a wheel, to be packed."""

    wheel: Path
    name: str
    place: str
    """The path at which it is installed, relative to the folder of packages."""
    bytes: int
    """The compressed size, with the file's headers."""


def place(name: str) -> str:
    """The path at which a file of a wheel is installed. Empty for files that are left out, such as
    scripts, manuals and headers."""
    if name.startswith(LEFT_OUT):
        return ""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    kind, _, rest = rest.partition("/")
    return rest if kind in ("purelib", "platlib") else ""


def entries(wheel: Path, *, extensions: tuple[str, ...] | None = None) -> list[Entry]:
    """The files of a wheel. With ``extensions``, only these of its compiled files."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            is_compiled = name.endswith((".so", ".a", ".cubin")) or ".so." in name
            if is_compiled and extensions is not None and name not in extensions:
                continue
            if (at := place(name)) and not info.is_dir():
                found.append(Entry(wheel, name, at, info.compress_size + 2 * len(name) + 200))
    return found


def portions(files: list[Entry], limit: int) -> list[list[Entry]]:
    """Divide files into portions of at most ``limit`` bytes; the largest files come first."""
    found: list[list[Entry]] = []
    used: list[int] = []
    for one in sorted(files, key=lambda one: -one.bytes):
        fitting = (n for n, size in enumerate(used) if size + one.bytes <= limit)
        number = next(fitting, len(used))
        if number == len(used):
            found.append([])
            used.append(0)
        found[number].append(one)
        used[number] += one.bytes
    return found


def write(carry: Path, files: list[Entry], facts: str, limit: int) -> None:
    """Write one carry. Exits if it is too large."""
    with zipfile.ZipFile(carry, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FACTS, facts)
        for wheel in dict.fromkeys(one.wheel for one in files):
            with zipfile.ZipFile(wheel) as source:
                for one in files:
                    if one.wheel == wheel:
                        archive.writestr(one.place, source.read(one.name))
    size = carry.stat().st_size
    if size > limit:
        sys.exit(f"{carry} has {size:,} bytes, more than {limit:,}")
    print(f"{carry}: {size / MIB:.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / ".gpu_box")
    parser.add_argument("--wheel", type=Path, help="vLLM's wheel for CUDA, if it is already here")
    parser.add_argument("--wheels", type=Path, help="folder for downloads")
    parser.add_argument("--present", type=Path, default=HERE / "present.txt")
    parser.add_argument("--python", default="3.12", help="Python version of the target")
    parser.add_argument("--limit-mib", type=float, default=56.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("carry-*.zip"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        folder = options.wheels or Path(scratch) / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        vllm = options.wheel or download(VLLM, folder, options.python)
        have, without = set(listed(options.present)), set(listed(HERE / "needless.txt"))
        files = entries(vllm, extensions=EXTENSIONS)
        wheels, found = closure(vllm, folder, have, without, options.python)
        for wheel in wheels:
            files += entries(wheel)
        limit = int(options.limit_mib * MIB)
        parts = portions(files, limit * 99 // 100)
        names = [f"carry-{number}.zip" for number in range(1, len(parts) + 1)]
        carried = [wheel.name for wheel in (vllm, *wheels)]
        facts = {"python": options.python, "carries": names, "wheels": carried, "present": found}
        for name, part in zip(names, parts, strict=True):
            write(options.out / name, part, json.dumps(facts, indent=1), limit)


if __name__ == "__main__":
    main()
