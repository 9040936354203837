"""Makes a tier verify its records while it is idle.

A batch begins only when the tier has been idle for a moment, and batches run one at a time, so a
request's read waits for at most one batch.

The event loop's thread owns this module's objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from offload.worker.tier_monitor import WatchedTier
from policies.safe_text import safe_repr
from tiers.base import Scrubbed, TierClosedError

logger = logging.getLogger(__name__)

BATCH_BYTES = 1 << 20
QUIET_S = 1.0
"""The tier must have been idle for this long before a batch begins."""
NOTHING_DUE_S = 60.0
TROUBLE_S = 60.0


@dataclass(frozen=True, slots=True)
class ScrubLimits:
    """Limits: at most ``bytes_per_s``, and each record once in ``period_s``."""

    bytes_per_s: float
    period_s: float


class IdleScrub:
    """Scrubs one tier while it is idle.

    ``report`` receives the result of each batch.
    """

    def __init__(
        self,
        tier: WatchedTier,
        limits: ScrubLimits,
        report: Callable[[Scrubbed], None],
    ) -> None:
        self._tier = tier
        self._limits = limits
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._is_warned = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Begin no further batch. A batch that is under way ends before the tier closes."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            left = self._tier.monitor.seconds_until_quiet(QUIET_S)
            if left > 0:
                await asyncio.sleep(left)
                continue
            try:
                found = await self._tier.tier.scrub(BATCH_BYTES, self._limits.period_s)
            except TierClosedError:
                return
            except Exception as error:  # the tier may be third-party code
                found = Scrubbed(trouble=safe_repr(error))
            await asyncio.sleep(self._take(found))

    def _take(self, found: Scrubbed | None) -> float:
        """Report the result of a batch; return how long to wait before the next one."""
        if found is None:
            return min(NOTHING_DUE_S, self._limits.period_s)
        if found.trouble:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("kvtiers: a tier cannot be scrubbed: %s", found.trouble)
            return TROUBLE_S
        self._is_warned = False
        self._report(found)
        return found.payload_bytes / self._limits.bytes_per_s
