"""Reads the lists of packages, and names the contents of the carries.

Needs only Python, so that it runs with the target's version of it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FACTS = "gpu_box.json"
"""In every carry: which carries belong together, for which Python, and what the machine must
have."""


def normal(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(path: Path) -> dict[str, str]:
    """The packages of a list, by name: each with its version, if one is given."""
    lines = path.read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    return {normal(line.partition("==")[0]): line for line in found}


def check_python(packed_for: str) -> None:
    """End the program if the carries are for another version of Python than this one."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if packed_for != mine:
        sys.exit(
            f"the carries are for Python {packed_for}, and this is {mine}: run this with "
            f"python{packed_for}, or pack.py --python {mine}"
        )
