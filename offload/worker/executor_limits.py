"""The bounds of one rank's executor, which loads and tiers of the rank obey."""

from __future__ import annotations

from dataclasses import dataclass

from offload.worker.tier_monitor import CALLS_MAX


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """Bounds of one rank.

    A request waits at most ``load_timeout_s`` seconds for its load, and a step at most
    ``fence_timeout_s`` for a fence. An operation of a lower tier is late after ``tier_timeout_s``.
    One read has at most ``read_batch`` chunks, and one tier at most ``reads_in_flight`` concurrent
    reads (a slow tier gets fewer).
    """

    load_timeout_s: float = 10.0
    fence_timeout_s: float = 2.0
    tier_timeout_s: float = 5.0
    read_batch: int = 16
    reads_in_flight: int = CALLS_MAX
