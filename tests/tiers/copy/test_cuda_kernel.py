"""The Triton kernel without a GPU: right bytes in Triton's interpreter, wide accesses in its PTX.

Each runs in a separate process, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def run(mode: str, cache: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers.copy.run_cuda_kernel", mode],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), **environment},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_copies_exactly_its_list(tmp_path: Path) -> None:
    assert run("interpret", tmp_path, TRITON_INTERPRET="1").strip() == "same"


def test_the_kernel_compiles_and_moves_16_bytes_at_once(tmp_path: Path) -> None:
    ptx = run("compile", tmp_path)
    assert "ld.global.v2.b64" in ptx
    assert "st.global.v2.b64" in ptx
