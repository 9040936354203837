"""``./run serve MODEL [flags]``: ``vllm serve`` with this connector unless the flags name one."""

from __future__ import annotations

import json
import os
import sys

DEFAULT = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
}


def main(arguments: list[str]) -> None:
    """Replace this process by ``vllm serve``."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: ./run serve MODEL [any vllm flags]")
    model, flags = arguments[0], arguments[1:]
    # First, so that a configuration of the user's, in whatever spelling, comes later and wins.
    ours = [] if _has_config_file(flags) else ["--kv-transfer-config", json.dumps(DEFAULT)]
    command = [sys.executable, "-m", "demo.vllm_cli", "serve", model, *ours, *flags]
    os.execv(sys.executable, command)


def _has_config_file(flags: list[str]) -> bool:
    """True if a file holds flags, which the defaults on the command line would override."""
    return any(flag.split("=")[0] == "--config" for flag in flags)


if __name__ == "__main__":
    main(sys.argv[1:])
