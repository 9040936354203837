"""``"verify": "device"`` on the test engines: reads what an engine with the connector has
compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import faults
from tests.vllm.probes import connector


@dataclass(frozen=True)
class Verified:
    """Counts over all ranks: loaded chunks that were equal to what was computed, that differed, and
    that were not compared because the digest is not known; tokens that requests got from a tier;
    and ranks on which an error has ended the comparison."""

    equal: int
    different: int
    unknown: int
    loaded_tokens: int = 0
    broken: int = 0


def added(transfer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A ``kv_transfer_config`` that verifies; digests survive restarts in this folder."""
    extra = transfer.get("kv_connector_extra_config", {})
    verify = {"verify": "device", "verify_path": str(folder)}
    return transfer | {"kv_connector_extra_config": verify | extra}


def count(llm: Any) -> Verified:
    """The counters of an engine's ranks so far."""
    ranks = faults.on_workers(llm, _of_worker)
    planner = connector(llm).serving.side.planner
    totals = planner.totals() if planner is not None else {}
    tokens = sum(n for name, n in totals.items() if name.startswith("loaded_tokens:"))
    *counts, broken = (sum(numbers) for numbers in zip(*ranks, strict=True))
    return Verified(*counts, loaded_tokens=int(tokens), broken=broken)


def stop(worker: Any) -> None:
    """From now on, loads are not compared."""
    faults.executor(worker)._loads.verifier = None


def log_again(worker: Any) -> None:
    """Let the comparison log differences although it has logged many."""
    faults.executor(worker)._verifier._logged = 0


def _of_worker(worker: Any) -> tuple[int, int, int, bool]:
    executor = faults.executor(worker)
    stats, verifier = executor.stats, executor._verifier
    broken = verifier is None or verifier.broken
    return stats.verified_chunks, stats.differing_chunks, stats.unverified_chunks, broken
