"""The bounds of one rank's executor, which loads and tiers of the rank obey."""

from __future__ import annotations

from dataclasses import dataclass

from offload.worker.tier_monitor import CALLS_MAX


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """Bounds of one rank.

    In seconds: the maximum time that a request waits for its load, the maximum delay of a step by a
    fence, and the time after which an operation of a lower tier is late. Then the maximum number of
    chunks in one read, and of concurrent reads of one tier (a slow tier gets fewer).
    """

    load_timeout_s: float = 10.0
    fence_timeout_s: float = 2.0
    tier_timeout_s: float = 5.0
    read_batch: int = 16
    reads_in_flight: int = CALLS_MAX
