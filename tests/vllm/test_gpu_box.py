"""The serving probe of the GPU box on a tiny model, on vLLM's CPU platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "scripts/gpu_box/probes/serve.py"


@pytest.mark.thorough
def test_the_serving_probe_loads_chunks_and_detects_wrong_bits(llama: Path, tmp_path: Path) -> None:
    """The cache holds half of the prompts. The probe itself fails if too little was loaded, if
    loaded bytes differ, or if it does not detect the bits that it flips."""
    numbers = tmp_path / "numbers.json"
    sizes = ["--requests=16", "--tokens=256", "--cache-tokens=1280", "--block-size=32"]
    env = {
        "GPU_BOX_SITE": str(tmp_path / "none"),
        "PROBE_RESULT": str(numbers),
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, PROBE, f"--model={llama}", "--eager", "--cpu", "--capacity=64MiB", *sizes],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=3 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(numbers.read_text())
    assert found["counters, warm"]["loaded_tokens"] > found["counters, cold"]["loaded_tokens"]
    assert found["counters, warm"]["differing_chunks"] == 0
    wrong = found["counters, wrong bits"]
    assert wrong["differing_chunks"] == wrong["load_failures"] > 0
    assert found["answers equal, wrong bits"] == 4, "chunks with wrong bits are recomputed"
