"""Hints for a user who gives a command something other than a tier's folder, for example the
address of a Mooncake store or a server's configuration. The command cannot read these, and explains
what to do instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(
    r"(?:[a-z]+:/{1,2})?(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", re.ASCII
)
CONFIG_BYTES_MAX = 1 << 20
STORE = "is the address of a Mooncake store: the commands that read records need a folder"
INSTEAD = (
    "Its master's page shows its contents (http://{host}:9003/metrics/summary, unless the master "
    "was started with another --metrics_port); kvtiers top URL shows what a server finds there. "
    "Servers check every record that they read. To empty the store, restart the master."
)


def not_a_folder(path: Path) -> tuple[str, str] | None:
    """Describe a path that users mistake for a tier's path, and say what to do instead."""
    # os.path, because the methods of Path raise where a parent may not be read
    if not os.path.exists(path):
        match = _ADDRESS.fullmatch(str(path))
        return (STORE, INSTEAD.format(host=match["host"])) if match else None
    tiers = list(_tiers(path)) if os.path.isfile(path) else []
    if not tiers:
        return None
    folders = [str(tier["path"]) for tier in tiers if "path" in tier]
    fixes = [f"Give the path of a tier: {', '.join(folders)}."] if folders else []
    for tier in tiers:
        match = _ADDRESS.fullmatch(str(tier.get("master", "")))
        if match:
            fixes.append(f"{match[0]} {STORE}. {INSTEAD.format(host=match['host'])}")
    return "is a configuration, not a tier's folder", " ".join(fixes)


def _tiers(path: Path) -> Iterator[dict[str, Any]]:
    """The tiers in a file with a kvtiers configuration, or with vLLM's configuration around it."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return
    for name in ("kv_transfer_config", "kv_connector_extra_config", "tiers"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    if isinstance(found, list):
        yield from (t for t in found if isinstance(t, dict) and ("path" in t or "master" in t))
