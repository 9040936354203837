"""Bounds on the chunks in flight at any time, derived from the configuration and the hardware.

``offload.planner.step_budget`` bounds the work of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config.schema import OffloadConfig
from offload.messages.report import RankState
from offload.planner.step_budget import STEP_CHUNKS

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Bounds on chunks in flight: ``store_chunks`` to the CPU tier, ``load_chunks`` to the GPU,
    into at most ``load_blocks`` blocks, and ``waiting_writes`` for each lower tier. A short step
    loads at most ``step_chunks``, and the bounds of its other work are proportional to this number
    (see ``StepBudget``); the rest follows in later steps."""

    store_chunks: int = NO_LIMIT
    load_chunks: int = NO_LIMIT
    load_blocks: int = NO_LIMIT
    waiting_writes: int = NO_LIMIT
    step_chunks: int = STEP_CHUNKS

    @classmethod
    def of_server(
        cls, config: OffloadConfig, ranks: Sequence[RankState], num_blocks: int
    ) -> WorkLimits:
        """The limits for a server with ``num_blocks`` blocks in its GPU cache."""
        chunk_bytes = ranks[0].slot_bytes * len(ranks)
        return cls(
            store_chunks=max(1, config.max_inflight_store // chunk_bytes),
            load_chunks=max(1, config.max_inflight_load // chunk_bytes),
            load_blocks=max(1, int(num_blocks * config.max_load_gpu_share)),
            waiting_writes=max(1, min(rank.slots for rank in ranks)),
        )
