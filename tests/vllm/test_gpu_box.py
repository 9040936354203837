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
PROBES = ROOT / "scripts/gpu_box/probes"


def environment(folder: Path, numbers: Path) -> dict[str, str]:
    """The environment of a probe without carried packages."""
    return {
        **os.environ,
        "GPU_BOX_SITE": str(folder / "none"),
        "PROBE_RESULT": str(numbers),
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


@pytest.mark.thorough
def test_the_serving_probe_loads_chunks_and_detects_wrong_bits(llama: Path, tmp_path: Path) -> None:
    """The cache holds half of the prompts. The probe itself fails if too little was loaded, if
    loaded bytes differ, or if it does not detect the bits that it flips. Recomputed prompts are
    in other batches, so their answers may differ on some processors."""
    numbers = tmp_path / "numbers.json"
    sizes = ["--requests=16", "--tokens=256", "--cache-tokens=1280", "--block-size=32"]
    done = subprocess.run(
        [
            sys.executable,
            PROBES / "serve.py",
            f"--model={llama}",
            "--eager",
            "--cpu",
            "--capacity=64MiB",
            *sizes,
        ],
        capture_output=True,
        text=True,
        env=environment(tmp_path, numbers),
        timeout=3 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(numbers.read_text())
    assert found["counters, warm"]["loaded_tokens"] > found["counters, cold"]["loaded_tokens"]
    assert found["counters, warm"]["differing_chunks"] == 0
    wrong = found["counters, wrong bits"]
    assert wrong["differing_chunks"] == wrong["load_failures"] > 0


@pytest.mark.thorough
def test_the_probe_of_rivals_measures_what_runs_and_says_why_others_do_not(
    llama: Path, tmp_path: Path
) -> None:
    """The model has a config and random weights only, as on a GPU. vLLM's own offloading refuses
    CPUs. The probe fails if a system of ours was not measured: with so small a model, kvtiers may
    find that computing is faster than loading."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((llama / "config.json").read_bytes())
    numbers = tmp_path / "numbers.json"
    asked = "--systems none,cpu,vllm --tokens 128 --requests 2 --in-flight 2"
    done = subprocess.run(
        [sys.executable, PROBES / "rivals.py", f"--model={model}", "--cpu", *asked.split()],
        capture_output=True,
        text=True,
        env=environment(tmp_path, numbers),
        timeout=3 * PATIENCE_S,
    )
    report = json.loads(numbers.read_text())["report"]
    assert report["config"]["model"] == str(model)
    measured = {row["series"] for row in report["rows"] if "ratio" in row["values"]}
    refused = [row["series"] for row in report["rows"] if not row["values"]]
    assert "no offloading" in measured
    assert any(text.startswith("vLLM OffloadingConnector: CPU Offloading is") for text in refused)
    assert (done.returncode == 0) == ("kvtiers, CPU tier" in measured), done.stderr[-4000:]
    assert any("random weights" in note for note in report["notes"])
    result = {"name": "rivals", "about": "", "status": "ok", "seconds": 1.0, "tail": ""}
    result["numbers"] = json.loads(numbers.read_text())
    (tmp_path / "results.json").write_text(json.dumps({"rivals": result}))
    guide = tmp_path / "guide.md"
    guide.write_text((ROOT / "docs/guides/gpu.md").read_text())
    places = ["--to", tmp_path / "to", "--guide", guide]
    made = subprocess.run(
        [sys.executable, PROBES.parent / "report.py", tmp_path, *places],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "to/gpu.md").read_text()
    assert "| 128 tokens, nothing to hit | no offloading |" in page
