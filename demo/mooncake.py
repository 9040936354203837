"""Runs a real Mooncake master as a separate process that can be killed. Used by the demo and the
tests."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo.ports import free_port

START_S = 300.0
LOG_CHARS = 2_000
NEEDS = (
    "Mooncake cannot be used here: {}. Run: pip install mooncake-transfer-engine-non-cuda; "
    "on Debian also: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
)


class MasterError(Exception):
    """Raised if the master did not start. The message ends with the last lines of its log."""


def why_not() -> str:
    """The reason why Mooncake cannot be used here, and the remedy. "" if it can."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return NEEDS.format(error)
    return ""


class Master:
    """A running ``mooncake_master``, on free ports that stay the same after a restart. It has a
    metadata server unless ``has_metadata`` is False: then its clients find each other without one.

    ``flags`` are appended to its command line.
    """

    def __init__(self, log: Path, *flags: str, has_metadata: bool = True) -> None:
        self._flags = flags
        self._has_metadata = has_metadata
        self.port, self.http, self.metrics = (free_port() for _ in range(3))
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def metadata(self) -> str:
        """The URL of its metadata server, or the word for none."""
        return (
            "P2PHANDSHAKE" if not self._has_metadata else f"http://127.0.0.1:{self.http}/metadata"
        )

    def tier(self, segment: str = "256MiB") -> dict[str, Any]:
        """An entry of ``tiers`` in the connector's configuration."""
        return {
            "type": "mooncake",
            "master": self.address,
            "metadata": self.metadata,
            "segment": segment,
            "host": "127.0.0.1",
        }

    def start(self) -> None:
        """Start an empty master and wait until it responds. Raises ``MasterError``."""
        command = [
            sys.executable,
            "-m",
            "mooncake.cli",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--enable_http_metadata_server={str(self._has_metadata).lower()}",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.http}",
            f"--metrics_port={self.metrics}",
            *self._flags,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        ports = (self.port, self.http) if self._has_metadata else (self.port,)
        while not all(map(_answers, ports)):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise MasterError(f"the master does not start: {self._log_text()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the master with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _log_text(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARS:]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
