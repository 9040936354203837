"""Reads the lists of packages, and describes the carries (the archives that ``pack.py`` writes).

Needs only the standard library, so that it runs with the target's Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FACTS = "gpu_box.json"
"""The file in every carry that says which carries belong together, for which Python they are, and
what the machine must have."""
NOT_YET = 75
"""The exit code of a probe for which something has not arrived (EX_TEMPFAIL)."""


def normal(name: str) -> str:
    """The normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(path: Path) -> dict[str, str]:
    """The packages of a list, by name, with the version if one is given."""
    lines = path.read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    return {normal(line.partition("==")[0]): line for line in found}


def check_python(packed_for: str) -> None:
    """Exit if the carries are for another version of Python than this one."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if packed_for != mine:
        sys.exit(
            f"the carries are for Python {packed_for}, but this is Python {mine}: run this with "
            f"python{packed_for}, or pack.py with --python {mine}"
        )
