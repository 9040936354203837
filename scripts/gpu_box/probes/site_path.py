"""The folder with the carried packages. Imports only the standard library, so that other modules
can import it first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = Path(os.environ.get("GPU_BOX_SITE") or Path(__file__).resolve().parents[3] / ".gpu_box/site")


def use_site() -> None:
    """Prefer the carried packages, in this process and in the processes that it starts."""
    if SITE.is_dir() and str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(SITE), os.environ.get("PYTHONPATH")])
        )
