"""vLLM's general plugin: registers the connector by name, checks its configuration early, and lets
vLLM's configuration record the model's files before vLLM reads them.

``vllm serve`` loads the plugin before it reads its flags. A wrong configuration, or a vLLM that
lacks what the connector needs, then ends the server in the process that the user started, before
anything is loaded and with one message at the end of the log. Without this check, the engine's
process would find the error half a minute later, and vLLM would bury the message in the tracebacks
of several processes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from offload.config.kv_transfer_config import NAMES, check_transfer, ours
from offload.connector.contract.at_start import VersionError, check_installed
from offload.connector.model.files_at_start import remember_files
from offload.errors import WRONG_USAGE, ConfigError
from offload.namespaces.wait_for_owners import Patience


def register() -> None:
    """Register the connector. vLLM calls this in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        with contextlib.suppress(ValueError):  # already registered in this process
            KVConnectorFactory.register_connector(name, "offload.connector", name)
    remember_files()
    if is_first_process_of_a_server():
        check_when_read()


def is_first_process_of_a_server() -> bool:
    """True in the main process of ``vllm serve``, but not in its child processes, which have the
    same arguments."""
    program, *words = sys.argv or [""]
    is_serve = words[:1] == ["serve"] or Path(program).name == "api_server.py"
    return is_serve and multiprocessing.parent_process() is None


def check_when_read() -> None:
    """Make vLLM check every ``KVTransferConfig`` of this process when it creates one. vLLM has no
    hook between parsing its flags and starting the engine's process."""
    from vllm.config.kv_transfer import KVTransferConfig

    before = KVTransferConfig.__post_init__
    if hasattr(before, "is_checked"):
        return

    @functools.wraps(before)
    def checked(self: Any) -> None:
        before(self)
        end_if_wrong(vars(self))

    vars(checked)["is_checked"] = True
    KVTransferConfig.__post_init__ = checked


def end_if_wrong(transfer: dict[str, Any]) -> None:
    """End the process with one message if the configuration is wrong, or if the installed vLLM
    lacks what our connector needs. Wait for a server that holds a folder and may be about to end.
    """

    def say(line: str) -> None:
        print(f"kvtiers: {line}", file=sys.stderr, flush=True)

    try:
        if any(ours(transfer)):
            check_installed()
        check_transfer(transfer, Patience(say))
    except (ConfigError, VersionError) as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(WRONG_USAGE if isinstance(error, ConfigError) else 1) from None
