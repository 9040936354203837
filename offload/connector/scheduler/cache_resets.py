"""Carries out vLLM's resets: the tiers forget their content, or are held until it is known whether
the weights have changed.

vLLM resets every cache before it sleeps, in the same way as after new weights. After a sleep the
content of the tiers is still valid; after new weights it must be forgotten. So a reset of a server
that can sleep first suspends the tiers: nothing is looked up or stored. The next step that computes
asks every worker whether its weights are unchanged, and how often it slept. If the weights are
unchanged and every reset belonged to a sleep, the tiers resume with their content; otherwise they
forget it. `offload.connector.worker.weights_watch` is the workers' half of this.

New epochs are begun at the reset in either case, for a server that starts after this one was
killed; they are taken back if the weights turn out to be the same.
"""

from __future__ import annotations

import logging

from offload.connector.metadata import WeightsAnswer
from offload.connector.scheduler.pending_epochs import PendingEpochs
from offload.connector.scheduler.scheduler_side import SchedulerSide

logger = logging.getLogger(__name__)


class HeldResets:
    """The resets of a server that can sleep, until an answer decides what they mean. Owned by the
    scheduler's thread."""

    def __init__(self) -> None:
        self.question = 1
        """The question sent with every step that computes; 0 for none. The first question makes the
        workers note the weights under which they begin to store."""
        self._asked = 1
        self._resets = 0

    def reset(self) -> None:
        """Record that vLLM has reset its caches."""
        self._resets += 1
        self._asked += 1
        self.question = self._asked

    def answered(self, answer: WeightsAnswer, ranks: int) -> bool | None:
        """Process an answer. Returns whether the tiers can keep their content; ``None`` if no reset
        waits for this answer."""
        if answer.question != self.question:
            return None
        self.question = 0
        resets, self._resets = self._resets, 0
        if not resets:
            return None
        return answer.is_same and answer.ranks == ranks and answer.sleeps == resets


class CacheResets:
    """The resets of one engine, with the ``epochs`` that they begin. Owned by the scheduler's
    thread."""

    def __init__(
        self, side: SchedulerSide, epochs: PendingEpochs, ranks: int, *, can_sleep: bool
    ) -> None:
        self.epochs = epochs
        self._side = side
        self._ranks = ranks
        self._held = HeldResets() if can_sleep else None
        self._must_forget = False  # until the tiers have forgotten the old weights' content
        self._steps = 0  # since the tiers should have forgotten it

    @property
    def question(self) -> int:
        """The question about the weights for a step that computes; 0 for none."""
        return self._held.question if self._held is not None else 0

    def reset(self) -> bool:
        """Invalidate every tier, because the weights may have changed. Returns ``False`` if the
        disk of a tier did not answer in time."""
        try:
            return self._reset_tiers()
        finally:
            self._side.old_kv.reset()

    def _reset_tiers(self) -> bool:
        if self._held is not None:
            self._held.reset()
            self._side.hold()
            return self.epochs.reset()
        try:
            self._forget()
        finally:  # the weights have changed all the same
            is_noted = self.epochs.reset()
        self._begin_epochs()
        return is_noted

    def answered(self, answer: WeightsAnswer) -> None:
        """Process the workers' answer, which shows whether the resets since the previous one
        changed the weights."""
        keeps_content = self._held.answered(answer, self._ranks) if self._held is not None else None
        if keeps_content is None:
            return
        if keeps_content and not self._must_forget:
            logger.info(
                "kvtiers: the weights are the same as before the sleep: the tiers keep "
                "their content"
            )
            self._side.release()
            self.epochs.withdraw()
        else:
            logger.info("kvtiers: the caches were reset: the tiers begin a new epoch")
            self._forget()
            self._begin_epochs()

    def _forget(self) -> None:
        """Make the tiers forget their content. If this fails, they stay held until ``before_step``
        or a later reset succeeds, even if the weights do not change again."""
        self._must_forget = True
        self._steps = 0
        self._side.forget()
        self._must_forget = False

    def before_step(self) -> None:
        """Let the workers write to the tiers whose new epochs have become durable, unless the
        tiers are held: the epochs may be taken back. Tiers that could not forget try again, as long
        as no answer is awaited that would make them forget anyway."""
        if self._side.is_held:
            has_answer = not self.question
            if not (self._must_forget and has_answer and self._retried()):
                return
        self._begin_epochs()

    def _retried(self) -> bool:
        """Try again to forget, 1, 2, 4, 8, ... steps after the failure: a fault that lasts costs
        few steps, and its errors do not hide others in the log. Returns whether this succeeded.
        Raises the error of an attempt that failed."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return False
        self._side.forget_chunks()
        self._must_forget = False
        logger.warning("kvtiers: the tiers have forgotten the old weights, and are used again")
        return True

    def _begin_epochs(self) -> None:
        if epochs := self.epochs.take():
            self._side.planner.begin_epochs(epochs)
