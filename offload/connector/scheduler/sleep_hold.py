"""Decides what a reset means to a server that can sleep.

vLLM resets every cache before it sleeps, in the same way as after new weights. After a sleep the
content of the tiers is still valid; after new weights it must be forgotten. So a reset of such a
server first suspends the tiers: nothing is looked up or stored. The next step that computes asks
every worker whether its weights are unchanged, and how often it slept. If the weights are unchanged
and every reset belonged to a sleep, the tiers resume with their content; otherwise they forget it.

New epochs are begun at the reset in either case, for a server that starts after this one was
killed; they are taken back if the weights turn out to be the same.

`offload.connector.worker.weights_watch` is the workers' half of this decision.
"""

from __future__ import annotations

from offload.connector.handshake import WeightsAnswer


class SleepHold:
    """Counts the resets since the last answer. Owned by the scheduler's thread."""

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
