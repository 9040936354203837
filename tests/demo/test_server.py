"""A server that is killed in the middle of an answer is an error of the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from demo.server import ServerError, VllmServer
from tests.patience import PATIENCE_S

ENDS_EARLY = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "9")
        self.end_headers()
        self.wfile.write(b"{")

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_half_an_answer_is_an_error_of_the_server(tmp_path: Path) -> None:
    program = (sys.executable, "-c", ENDS_EARLY)
    log = tmp_path / "log"
    with (
        VllmServer(tmp_path, log=log, program=program, deadline_s=PATIENCE_S) as server,
        pytest.raises(ServerError, match=r"POST /v1/completions: IncompleteRead\("),
    ):
        server.nudge()
