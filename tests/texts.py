"""Compares messages with files: ``same_text(name, text)`` compares with
``tests/data/messages/<name>.txt``.

``KVTIERS_REWRITE=1 python -m pytest ...`` writes the files again; read the difference before
committing.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "messages"


def same_text(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("KVTIERS_REWRITE"):
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8"), name
