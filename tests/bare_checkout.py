"""A copy of the files that ``./run`` needs, with scripts in place of programs."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def script(path: Path, body: str) -> None:
    """Write a program in bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def copy_to(folder: Path) -> Path:
    """Copy the files into this new folder."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("run", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder
