"""Carries out vLLM's resets: the tiers forget their content, or are held until it is known whether
the weights have changed.

Separate from `offload.connector.scheduler.scheduler_side`, because it concerns weights and disks
instead of requests. `offload.connector.scheduler.sleep_hold` decides about a server that can sleep.
"""

from __future__ import annotations

import logging

from offload.connector.handshake import WeightsAnswer
from offload.connector.scheduler.pending_epochs import PendingEpochs
from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.connector.scheduler.sleep_hold import SleepHold

logger = logging.getLogger(__name__)


class CacheResets:
    """The resets of one engine, with the ``epochs`` that they begin. Owned by the scheduler's
    thread."""

    def __init__(
        self, side: SchedulerSide, epochs: PendingEpochs, ranks: int, *, can_sleep: bool
    ) -> None:
        self.epochs = epochs
        self._side = side
        self._ranks = ranks
        self._hold = SleepHold() if can_sleep else None

    @property
    def question(self) -> int:
        """The question about the weights for a step that computes; 0 for none."""
        return self._hold.question if self._hold is not None else 0

    def reset(self) -> bool:
        """Invalidate every tier, because the weights may have changed. Returns ``False`` if the
        disk of a tier did not answer in time."""
        if self._hold is not None:
            self._hold.reset()
            self._side.hold()
            return self.epochs.reset()
        self._side.forget()
        is_noted = self.epochs.reset()
        self._begin_epochs()
        return is_noted

    def answered(self, answer: WeightsAnswer) -> None:
        """Process the workers' answer, which shows whether the resets since the previous one
        changed the weights."""
        may_go_on = self._hold.answered(answer, self._ranks) if self._hold is not None else None
        if may_go_on is None:
            return
        if may_go_on:
            logger.info(
                "kvtiers: the weights are the same as before the sleep: the tiers keep "
                "their content"
            )
            self._side.release()
            self.epochs.withdraw()
        else:
            logger.info("kvtiers: the caches were reset: the tiers begin a new epoch")
            self._side.forget()
            self._begin_epochs()

    def before_step(self) -> None:
        """Let the workers write to the tiers whose new epochs have become durable, unless the
        tiers are held: the epochs may be taken back."""
        if not self._side.is_held:
            self._begin_epochs()

    def _begin_epochs(self) -> None:
        if epochs := self.epochs.take():
            self._side.planner.begin_epochs(epochs)
