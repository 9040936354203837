"""``"verify": "device"`` on the test engines: what an engine with the connector has compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import faults
from tests.vllm.probes import connector


@dataclass(frozen=True)
class Verified:
    """Loaded chunks on all ranks: equal to what was computed, different, and not comparable because
    the digest is not known; and tokens that requests were given from a tier."""

    equal: int
    different: int
    unknown: int
    loaded_tokens: int = 0


def added(transfer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A ``kv_transfer_config`` that verifies; digests survive restarts in this folder."""
    extra = transfer.get("kv_connector_extra_config", {})
    verify = {"verify": "device", "verify_path": str(folder)}
    return transfer | {"kv_connector_extra_config": verify | extra}


def count(llm: Any) -> Verified:
    """The counters of an engine's ranks so far."""
    ranks = faults.on_workers(llm, _of_worker)
    planner = connector(llm)._scheduler.planner
    totals = planner.totals() if planner is not None else {}
    tokens = sum(n for name, n in totals.items() if name.startswith("loaded_tokens:"))
    return Verified(*(sum(numbers) for numbers in zip(*ranks, strict=True)), int(tokens))


def stop(worker: Any) -> None:
    """Loads are not compared from now on."""
    faults.executor(worker)._lane.verifier = None


def _of_worker(worker: Any) -> tuple[int, int, int]:
    stats = faults.executor(worker).stats
    return stats.verified_chunks, stats.differing_chunks, stats.unverified_chunks
