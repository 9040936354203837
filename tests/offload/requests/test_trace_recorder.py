"""A recorded trace can be read while its server runs, and after the server was killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from offload.requests.trace_recorder import RecordedPrompt, TraceRecorder
from policies.simulation.trace import TraceError
from policies.simulation.trace_formats import read_trace
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_readable_before_its_recorder_is_closed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    recorder = TraceRecorder(str(path), 16)
    try:
        for number in range(3):
            recorder.record(RecordedPrompt(float(number), [b"a", b"b"], 32, {}, 0))
        deadline = time.monotonic() + PATIENCE_S
        while _requests(path) < 3:
            assert time.monotonic() < deadline, path.read_bytes()
            time.sleep(0.02)
    finally:
        recorder.close(PATIENCE_S)
    assert _requests(path) == 3


def _requests(path: Path) -> int:
    try:
        return len(read_trace(path).requests)
    except (FileNotFoundError, TraceError):
        return 0
