"""``bench serve`` on real engines with a tiny model, and its verdicts on planted numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from bench import serve
from bench.__main__ import build
from bench.charts import Chart
from bench.report import save
from bench.serve_engine import Batch
from bench.serve_numbers import Case, Samples, interval, verdicts
from bench.serve_systems import BASELINE, SYSTEMS, Start, System, TierSizes, find_model
from tests.bare_checkout import ROOT
from tests.vllm.restored import PATIENT

CPU, DISK = SYSTEMS["cpu"], SYSTEMS["disk"]
SIZE = 96
RESTORABLE = 1.0  # three whole blocks


def _with(start: Start, **extra: Any) -> Start:
    """The same systems with other ``kv_connector_extra_config`` entries."""
    assert start.connector is not None
    old = start.connector["kv_connector_extra_config"]
    connector = start.connector | {"kv_connector_extra_config": old | extra}
    return dataclasses.replace(start, connector=connector)


def _broken(sizes: TierSizes) -> Start:
    return _with(CPU.start(sizes), cpu={"capacity": "a lot"})


def _cpu_always(sizes: TierSizes) -> Start:
    """A tiny model computes faster than a tier can be read, which the connector would detect; and
    no load is late on a busy machine."""
    return _with(CPU.start(sizes), **PATIENT)


def _disk_always(sizes: TierSizes) -> Start:
    return _with(DISK.start(sizes), **PATIENT)


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_engines_restore_what_the_rows_report_and_others_give_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SYSTEMS, "broken", System("broken", _broken))
    monkeypatch.setitem(SYSTEMS, "cpu", System(CPU.name, _cpu_always))
    monkeypatch.setitem(SYSTEMS, "disk", System(DISK.name, _disk_always))
    config = serve.Config(
        sizes=(SIZE,),
        hits=(1.0,),
        rounds=1,
        misses=4,  # by then, the first of them has been evicted from the CPU tier
        requests=4,
        in_flight=2,
        output_tokens=2,
        systems=("none", "cpu", "disk", "broken"),
        model="tiny",
        threads=1,
        folder=str(tmp_path),
    )
    report = serve.run(config, Progress(disable=True))
    rows = {(row.case, row.series): row.values for row in report.rows}
    miss, hit = str(Case(SIZE, 0.0)), str(Case(SIZE, 1.0))
    for system in (BASELINE, CPU.name, DISK.name):
        assert rows[miss, system]["restored"] == 0.0
        assert rows[hit, system]["TTFT p99 ms"] >= rows[hit, system]["TTFT p50 ms"] > 0.0
        assert rows[hit, system]["ratio"] > 0.0
    assert rows[hit, BASELINE]["restored"] == 0.0
    assert rows[hit, CPU.name]["restored"] == pytest.approx(RESTORABLE)
    # Less if the disk is slow: the small CPU tier then evicts chunks that are not written yet.
    assert 0.0 < rows[hit, DISK.name]["restored"] <= RESTORABLE + 1e-6
    for system in (CPU, DISK):
        assert rows[miss, system.name]["hooks"] > 0.0
        assert rows[miss, system.name]["threads"] > 0.0
    assert rows[hit, DISK.name]["from disk"] > 0.0
    assert rows[hit, CPU.name]["from disk"] == 0.0
    refused = [row.series for row in report.rows if row.case == "does not run here"]
    assert len(refused) == 1
    assert refused[0].startswith("broken: ")
    wrong = [note for note in report.notes if note.startswith(("INVALID", "NOT RESTORED"))]
    assert [note for note in wrong if DISK.name not in note] == []
    assert list(tmp_path.iterdir()) == []
    save(report, "command", [Chart("ratio"), Chart("TTFT p50 ms")], tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    assert len(list(tmp_path.glob("*.png"))) == 2


def _batch(seconds: float, restored: float = 0.0, gpu: float = 0.0) -> Batch:
    sources = {"external_kv_transfer": restored, "local_cache_hit": gpu}
    counters = {
        f'vllm:prompt_tokens_by_source{{source="{name}"}}': value for name, value in sources.items()
    }
    return Batch(seconds, (seconds,), 100, 0, counters, cpu_s=seconds)


def test_a_missed_goal_is_reported() -> None:
    samples = Samples()
    miss = Case(100, 0.0)
    for noise in (1.0, 1.1, 0.9, 1.2, 1.0, 1.1, 0.95, 1.05):
        samples.add(miss, BASELINE, _batch(noise))
        samples.add(miss, CPU.name, _batch(noise / 0.97))
        samples.add(miss, DISK.name, _batch(noise / 0.99))
    assert [("MISSED" in note, "met" in note) for note in verdicts(samples)] == [
        (True, False),
        (False, True),
    ]
    rows = {row.series: row.values for row in samples.rows()}
    assert rows[CPU.name]["ratio"] == pytest.approx(0.97)
    assert rows[CPU.name]["CPU ratio"] == pytest.approx(1 / 0.97)
    assert rows[DISK.name]["low"] == pytest.approx(0.99)


def test_a_case_with_unexpected_hits_is_reported() -> None:
    samples = Samples()
    samples.add(Case(100, 0.5), CPU.name, _batch(1.0, restored=32.0))
    assert verdicts(samples) == []
    samples.add(Case(100, 0.5), CPU.name, _batch(1.0, restored=0.0))
    assert [note.split(":")[0] for note in verdicts(samples)] == ["NOT RESTORED"]
    samples.add(Case(100, 0.0), BASELINE, _batch(1.0, gpu=32.0))
    samples.add(Case(100, 0.0), CPU.name, _batch(1.0, restored=32.0))
    notes = verdicts(samples)
    assert sum(note.startswith("INVALID") for note in notes) == 2


def test_interval_of_the_median() -> None:
    """Compares ranks with a table of the sign test's confidence limits (Conover, "Practical
    Nonparametric Statistics", binomial with p = 1/2): for 10 values the 2nd and 9th, for 20 the 6th
    and 15th."""
    assert interval([float(n) for n in range(1, 11)]) == (2.0, 9.0)
    assert interval([float(n) for n in range(1, 21)]) == (6.0, 15.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_a_folder_with_a_config_can_be_measured() -> None:
    folder = ROOT / "scripts/gpu_box/models/llama-8b"
    model = find_model(str(folder))
    assert model.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert model.flops_per_token == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)
    assert model.settings == {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    assert find_model("tiny").settings == {"dtype": "bfloat16"}


CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "nor a folder with a config.json"),
        ({**CONFIG, "dtype": "int3"}, "wrong or missing: 'int3'"),
        ({**CONFIG, "layer_types": ["full_attention", "mamba"]}, "layers of mamba"),
        ({"vocab_size": 320}, "wrong or missing: 'num_attention_heads'"),
    ],
)
def test_a_model_that_cannot_be_measured_is_named(
    tmp_path: Path, config: dict[str, Any] | None, expected: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        assert find_model(str(tmp_path)).shape.layers == 2
        (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(build(), ["serve", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--systems", "none,cpus", "unknown: cpus; known: none, cpu, disk"),
        ("--engine", "{", "no JSON"),
        ("--engine", "[1]", "a JSON object is expected"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    option: str, value: str, expected: str
) -> None:
    result = CliRunner().invoke(build(), ["serve", option, value])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())
