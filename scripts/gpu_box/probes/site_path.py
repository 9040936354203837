"""The folder with the carried packages, and settings for a machine without a network. Imports only
the standard library, so that other modules can import it first."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

SITE = Path(os.environ.get("GPU_BOX_SITE") or Path(tempfile.gettempdir()) / "kvtiers-gpu-box/site")
"""Outside the checkout, so that it survives if the checkout is replaced between two commands."""


ALONE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Without a network, libraries must not look for this machine's address, models or servers."""


def use_site() -> None:
    """Prefer the carried packages, in this process and in the processes that it starts."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    if SITE.is_dir() and str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(SITE), os.environ.get("PYTHONPATH")])
        )
