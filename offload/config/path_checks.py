"""Finds paths that a tier must not use, because a tier fills its folder and removes files from it.

Reads only; blocks on the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.namespaces.claims import LOCK_NAME, entries
from offload.namespaces.cleanup import QUARANTINE, TRASH
from offload.namespaces.manifest import NAME

SYSTEM_FOLDERS = frozenset(
    (
        *("/", "/home", "/root", "/run", "/tmp", "/usr", "/var", "/dev/shm", "/usr/local"),
        *("/var/cache", "/var/lib", "/var/log", "/var/spool", "/var/tmp"),
    )
)
"""System folders; a folder below one of them can be used."""
SYSTEM_TREES = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/sbin", "/usr/bin",
                "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/usr/share")  # fmt: skip
"""Folders that a tier must not use, and must not be below, except in ``/dev/shm``."""
_SHARED_MEMORY = "/dev/shm"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_NOT_CONTENT = frozenset(("lost+found", LOCK_NAME))
_OWN = "Give the tier its own empty folder, for example {0}."
SHOWN_PATHS_MAX = 3


def path_problem(path: str | Path) -> tuple[str, str] | None:
    """Say why a tier must not use this path, and what to do; ``None`` if it may."""
    return location_problem(path) or content_problem(path)


def location_problem(path: str | Path) -> tuple[str, str] | None:
    """Check the location only, as ``path_problem`` does."""
    real = os.path.realpath(path)
    fix = _OWN.format(Path(real) / "kvtiers")
    if real in SYSTEM_FOLDERS:
        return f"{path} is a system folder", fix
    is_system = any(f"{real}/".startswith(f"{tree}/") for tree in SYSTEM_TREES)
    if is_system and not real.startswith(f"{_SHARED_MEMORY}/"):
        return f"{path} belongs to the system", _OWN.format("/var/cache/kvtiers")
    if os.path.dirname(real) == "/home" or real == os.path.realpath(os.path.expanduser("~")):
        return f"{path} is a home folder", fix
    for folder in (Path(real), *Path(real).parents):
        if _is_model(folder):
            relation = "is" if folder == Path(real) else "lies in"
            fix = _OWN.format("/var/cache/kvtiers")
            return f"{path} {relation} the folder of a model ({folder})", fix
    return None


def content_problem(path: str | Path) -> tuple[str, str] | None:
    """Check the contents only, as ``path_problem`` does: files, none of which belong to kvtiers."""
    folder = Path(path)
    names = [name for name in entries(folder) if name not in _NOT_CONTENT]
    if not names or any(map(_is_ours, names)) or LOCK_NAME in entries(folder):
        return None
    shown = ", ".join(names[:SHOWN_PATHS_MAX])
    more = f" and {len(names) - SHOWN_PATHS_MAX:,} more" if len(names) > SHOWN_PATHS_MAX else ""
    what = f"{path} is not empty, and contains no kvtiers data: {shown}{more}"
    return what, _OWN.format(folder / "kvtiers")


def _is_ours(name: str) -> bool:
    return bool(NAME.fullmatch(name) or QUARANTINE.fullmatch(name) or TRASH.fullmatch(name))


def _is_model(folder: Path) -> bool:
    """Return True if the folder contains a model's configuration and weights."""
    if not os.path.isfile(folder / "config.json"):
        # Path.is_file raises if the file may not be read
        return False
    return any(name.endswith(_WEIGHTS) for name in entries(folder))
