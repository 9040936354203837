"""``./run serve MODEL [flags]``: ``vllm serve`` with this connector unless the flags name one."""

from __future__ import annotations

import json
import os
import sys

DEFAULT = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main(arguments: list[str]) -> None:
    """Replace this process by ``vllm serve``."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: ./run serve MODEL [any vllm flags]")
    if not any(argument.startswith("--kv-transfer-config") for argument in arguments):
        arguments = [*arguments, "--kv-transfer-config", json.dumps(DEFAULT)]
    command = [sys.executable, "-m", "demo.vllm_cli", "serve", *arguments]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
