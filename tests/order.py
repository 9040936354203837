"""The order in which files are tested when several processes share them: the slowest files first,
so that no process works alone at the end."""

from __future__ import annotations

import pytest

LONGEST = (
    "vllm/test_soak.py",
    "vllm/test_kinds.py",
    "vllm/test_serve.py",
    "vllm/test_geometry.py",
    "vllm/test_mooncake.py",
    "vllm/test_server.py",
    "vllm/test_families.py",
    "bench/test_bench_serve.py",
    "vllm/test_custom_policy.py",
    "vllm/test_sick_disk.py",
    "vllm/",
    "oracle/test_scheduler.py",
    "offload/cli/test_guide.py",
    "offload/cli/test_doctor.py",
    "sim/",
    "tiers/",
)
"""Prefixes of paths below ``tests``, slowest first; all other files follow."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the files by ``LONGEST``; within a file the order stays."""
    items.sort(key=lambda item: _rank(item.path.as_posix()))


def _rank(path: str) -> int:
    inside = path.rpartition("/tests/")[2]
    found = (number for number, start in enumerate(LONGEST) if inside.startswith(start))
    return next(found, len(LONGEST))
