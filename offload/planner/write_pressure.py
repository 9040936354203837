"""Do the lower tiers keep up with the stores? If not, stores do not wait for them.

A store whose victim still waits to be written waits too, as long as its request runs and could
store all its missing chunks at its end: their blocks stay in the GPU's cache. That keeps a prefix
longer than the CPU tier without holes on a disk that keeps up. Beyond that the victim's write is
given up: a slower disk would keep new chunks out of the CPU tier, and they are worth most. Pure.
"""

from __future__ import annotations

from offload.planner.step_budget import STORE_CHUNKS_MIN


class WritePressure:
    """Says whether stores wait for the lower tiers. Owned by the planner; used on its thread.

    ``is_behind``: writes were given up, and the disk has not written everything yet that waits.
    Until then nothing waits for it. ``patience`` chunks of a request can be stored at its end.
    """

    def __init__(self, store_chunks: int) -> None:
        self.is_behind = False
        self._given_up = 0
        self.patience = min(STORE_CHUNKS_MIN, store_chunks)

    def may_wait(self, chunks: int) -> bool:
        """True if a running request that lacks ``chunks`` chunks waits and gives up no write."""
        return not self.is_behind and chunks <= self.patience

    def end_step(self, unwritten: int, given_up: int) -> None:
        """The step ends: ``unwritten`` chunks wait for a lower tier or are being written, and
        ``given_up`` writes were given up so far."""
        self.is_behind = unwritten > 0 and (self.is_behind or given_up > self._given_up)
        self._given_up = given_up
