"""Queries shared tiers for the chunks that they hold. Runs on one rank, on the executor's loop.

Separate from the executor, because queries are not jobs: they use no slot, copy or fence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from offload.messages.plan import PresenceQuery
from offload.messages.report import Observed, PresenceReply
from offload.worker.tier_monitor import TierMonitor
from offload.worker.tier_writer import TierWriter
from policies.safe_text import safe_repr
from tiers.base import SharedTier, Tier

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Maximum number of concurrent queries to one tier; further queries wait."""
QUERY_LATE_S = 1.0
"""Time after which a query counts as a failure of the tier; no request waits this long."""


class PresenceQueries:
    """Sends queries to the tiers. ``see(tier, seen)`` receives what a query reveals about a tier's
    health."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        writers: Sequence[TierWriter],
        see: Callable[[int, Observed], None],
    ) -> None:
        self._tiers = {n: tier for n, tier in enumerate(tiers) if isinstance(tier, SharedTier)}
        self._writers = writers
        self._watches = [
            TierMonitor(QUERY_LATE_S, lambda seen, tier=tier: see(tier, seen))  # type: ignore[misc]  # mypy does not infer defaults
            for tier in range(len(tiers))
        ]
        self._turns = [asyncio.Semaphore(IN_FLIGHT) for _ in tiers]

    async def answer(self, query: PresenceQuery) -> PresenceReply:
        """Return the tier's reply; never raises.

        A tier that is still at an earlier epoch is not queried, because it would report records of
        other weights.
        """
        tier = query.tier
        async with self._turns[tier]:
            try:
                if not await self._writers[tier].caught_up(QUERY_LATE_S):
                    return PresenceReply(None)
                asking = self._tiers[tier].present(query.keys)
                return PresenceReply(
                    bytes(await self._watches[tier].query(asking, len(query.keys)))
                )
            except Exception as error:  # catch any error, because the query must be answered
                logger.debug("kvtiers: tier %d could not be queried: %s", tier, safe_repr(error))
                return PresenceReply(None)
