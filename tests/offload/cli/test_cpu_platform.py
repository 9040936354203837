"""The warning about memory that vLLM's CPU platform takes beside the CPU tier."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from offload.cli.cpu_platform import DECIDED_BY, VLLM_SHARE, memory_warning
from offload.config.memory_limits import MemoryLimit
from offload.sizes import GIB, MIB

IDLE = MemoryLimit(24 * GIB, 22 * GIB, "RAM")


def test_the_flag_and_a_value_that_fits_are_named() -> None:
    assert memory_warning(["--port", "8000"], 6000 * MIB, {}, IDLE) == (
        "warning: without a GPU, vLLM takes 92.0% of the memory of 24GiB, the CPU tier takes "
        "5.86GiB, and 22GiB are available. Add --gpu-memory-utilization 0.5"
    )
    assert "Give a smaller --kv-cpu" in memory_warning([], 20 * GIB, {}, IDLE)


@pytest.mark.parametrize("limit", [4, 8, 24, 512])
@pytest.mark.parametrize("part", [0.05, 0.25, 0.5, 0.7])
def test_the_value_leaves_room_for_the_tier_and_for_the_server(limit: int, part: float) -> None:
    machine = MemoryLimit(limit * GIB, int(limit * GIB * 0.95), "RAM")
    capacity = int(limit * GIB * part)
    text = memory_warning([], capacity, {}, machine)
    share = float(text.rpartition("utilization ")[2])
    assert 0.1 <= share < VLLM_SHARE
    assert share * machine.limit_bytes + capacity < machine.available_bytes - limit * GIB / 10


def test_nothing_is_said_if_it_fits_or_the_user_has_decided() -> None:
    assert memory_warning([], GIB, {}, MemoryLimit(100 * GIB, 99 * GIB, "RAM")) == ""
    assert memory_warning([], GIB, {"VLLM_CPU_KVCACHE_SPACE": "1"}, IDLE) == ""
    for name in DECIDED_BY:
        joined = "--" + name[2:].replace("-", "_") + "=1"
        assert memory_warning([joined], 20 * GIB, {}, IDLE) == ""
        assert memory_warning([name, "1"], 20 * GIB, {}, IDLE) == ""


def test_the_share_is_vllms_default() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vLLM")
    text = (Path(found.origin).parent / "config/cache.py").read_text(encoding="utf-8")
    assert re.findall(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", text) == [
        str(VLLM_SHARE)
    ]
