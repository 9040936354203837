"""The probes of the GPU box that need much memory: what they need fits into the machine."""

from __future__ import annotations

import importlib
import mmap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.libcuda import ROOT

BOX = ROOT / "scripts/gpu_box"
GIB = 2**30
H200 = {"GPU": 139 * GIB, "host": 80 * GIB, "disk": 30 * GIB}
"""Free bytes on the machine for which the schedule was made; the disk may have more."""


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The probe's module."""
    monkeypatch.syspath_prepend(BOX / "probes")
    monkeypatch.setenv("GPU_BOX_SITE", str(tmp_path / "none"))
    return importlib.import_module("rivals")


def scheduled(rivals: Any, name: str) -> Any:
    """The configuration of ``bench serve`` in a probe of the schedule, and its model."""
    probes = tomllib.loads((BOX / "schedule.toml").read_text())["probe"]
    [command] = [probe["command"] for probe in probes if probe["name"] == name]
    options = rivals.arguments(command[2:])
    model = BOX / "models" / options.model
    return rivals.configuration(options, model), rivals.find_model(str(model))


@pytest.mark.parametrize(
    ("name", "tokens"), [("rivals", 4096), ("long-cpu", 130_000), ("long-disk", 43_544)]
)
def test_the_benchmarks_of_the_schedule_fit_into_the_machine(
    rivals: Any, name: str, tokens: int
) -> None:
    config, model = scheduled(rivals, name)
    fitting = rivals.fitting(config, model, H200)
    assert fitting.sizes == (tokens,)
    assert all(rivals.needs(fitting, model)[medium] <= size for medium, size in H200.items())
    command = rivals.command_of(fitting)
    assert command[command.index("--sizes") + 1] == str(tokens)


def test_what_the_benchmarks_need_is_what_they_configure(rivals: Any) -> None:
    """8 billion weights of two bytes, 128 KiB of KV cache per token."""
    config, model = scheduled(rivals, "long-cpu")
    needs = rivals.needs(config, model)
    prompt = 130_000 * 128 * 1024
    assert needs["GPU"] == pytest.approx(2 * (16.06e9 + 2 * prompt + 5 * GIB), rel=0.01)
    assert needs["host"] == pytest.approx(3 * prompt + 12 * GIB, rel=0.01)
    assert needs["disk"] == 0
    config, model = scheduled(rivals, "long-disk")
    needs = rivals.needs(config, model)
    assert needs["disk"] == pytest.approx(5 * prompt / 2, rel=0.02)
    assert needs["host"] == pytest.approx(2 * prompt / 2 + 12 * GIB, rel=0.01)
    with pytest.raises(SystemExit, match=r"too small: {'disk, GiB': 0\.0}"):
        rivals.fitting(config, model, {"disk": 0})


def test_memory_is_used_until_enough_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine gets more memory each time it is queried, another one gets no more."""
    monkeypatch.syspath_prepend(BOX / "probes")
    memory = importlib.import_module("memory")
    step = mmap.PAGESIZE
    monkeypatch.setattr(memory, "STEP", step)
    monkeypatch.setattr(memory, "MARGIN", step)
    monkeypatch.setattr(memory, "PATIENCE_S", 0.0)
    monkeypatch.setattr(memory, "free", lambda: 3 * step)
    assert memory.grow(2 * step) == 0
    assert memory.grow(10 * step) == 7 * step
    left = iter(range(6 * step, 0, -step))  # each query finds one page less
    monkeypatch.setattr(memory, "free", lambda: next(left))
    assert memory.grow(100 * step) == step
