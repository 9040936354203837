"""The example without vLLM runs as the README says. The others are in ``tests/tiers/test_guide.py``
and ``tests/vllm/test_custom_policy.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def test_the_example_in_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "examples/inprocess.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "restored 10 of 10 blocks, bytes equal: True" in done.stdout
