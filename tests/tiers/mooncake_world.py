"""A real Mooncake master for tests, started and killed as a process of its own."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiers.mooncake_client import MooncakeSettings, why_not

START_S = 30.0


def skip_without_mooncake() -> None:
    """Skip the test, or the module that says so while it is imported, where Mooncake is missing."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs Mooncake: pip install 'kvtiers[mooncake]'", allow_module_level=True)
    if missing := why_not():
        pytest.skip(f"Mooncake cannot be used here: {missing}", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """``mooncake_master`` with its metadata server, on ports of its own that it keeps."""

    def __init__(self, log: Path) -> None:
        self.port, self.http, self.metrics = (free_port() for _ in range(3))
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self.http}/metadata"

    def settings(self, segment_bytes: int = 256 << 20) -> MooncakeSettings:
        return MooncakeSettings(self.address, self.metadata, segment_bytes, host="127.0.0.1")

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        command = [
            sys.executable,
            "-m",
            "mooncake.cli",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.http}",
            f"--metrics_port={self.metrics}",
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        for port in (self.port, self.http):
            while not _answers(port):
                assert self._process.poll() is None, self.log.read_text()[-2000:]
                assert time.monotonic() < deadline, "the master does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
