"""Decides what a reset means to a server that can sleep.

vLLM resets every cache before it sleeps, in the same way as after new weights. In the first case
what the tiers hold stays right, in the second it must be forgotten. So a reset of such a server
first only holds the tiers: nothing is looked up or stored. The next step that computes asks every
worker whether its weights are those from before, and how often it slept. If they are, and each
reset was that of a sleep, the tiers go on; otherwise they forget, as the reset demanded.

New epochs are begun at the reset all the same, so that a server that starts after this one was
killed finds them; they are taken back if the weights were the same.
"""

from __future__ import annotations

from offload.connector.handshake import WeightsAnswer


class SleepHold:
    """Counts the resets since the last answer. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self.question = 1
        """Asked with every step that computes; 0: nothing. The first one has the workers note the
        weights under which they begin to store."""
        self._asked = 1
        self._resets = 0

    @property
    def is_holding(self) -> bool:
        """True if a reset waits for its meaning."""
        return self._resets > 0

    def reset(self) -> None:
        """vLLM has reset its caches."""
        self._resets += 1
        self._asked += 1
        self.question = self._asked

    def answered(self, answer: WeightsAnswer, ranks: int) -> bool | None:
        """Take in an answer. Returns whether the tiers may go on; ``None`` if nothing waits for
        this answer."""
        if answer.question != self.question:
            return None
        self.question = 0
        resets, self._resets = self._resets, 0
        if not resets:
            return None
        return answer.is_same and answer.ranks == ranks and answer.sleeps == resets
