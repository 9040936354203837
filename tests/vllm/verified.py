"""``"verify": "device"`` on the test engines: what every engine with the connector has compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import faults


@dataclass(frozen=True)
class Verified:
    """Loaded chunks on all ranks: equal to what was computed, different, and not comparable because
    the digest is not known."""

    equal: int
    different: int
    unknown: int


def options(folder: Path) -> dict[str, Any]:
    """The connector's options: digests survive restarts in this folder."""
    return {"verify": "device", "verify_path": str(folder)}


def count(llm: Any) -> Verified:
    """What the ranks of an engine have counted so far."""
    ranks = faults.on_workers(llm, _of_worker)
    return Verified(*(sum(numbers) for numbers in zip(*ranks, strict=True)))


def _of_worker(worker: Any) -> tuple[int, int, int]:
    stats = faults.executor(worker).stats
    return stats.verified_chunks, stats.differing_chunks, stats.unverified_chunks
