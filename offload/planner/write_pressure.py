"""Decides whether stores wait for the lower tiers, which they do only while those keep up.

A store whose victim still waits to be written waits too, as long as its request runs and could
store all its missing chunks at its end: their blocks stay in the GPU's cache. On a disk that keeps
up, this leaves no holes in a prefix that is longer than the CPU tier. Otherwise the victim's write
is given up: a slower disk would keep new chunks out of the CPU tier, and the newest chunks are
worth the most. Pure.
"""

from __future__ import annotations

from offload.planner.step_budget import STORE_CHUNKS_MIN


class WritePressure:
    """Says whether stores wait for the lower tiers. Owned by the planner; used on its thread.

    ``is_behind``: writes were given up, and the disk has not yet written everything that waits.
    Until it has, no store waits for it. ``patience`` chunks of a request can be stored at its end.
    """

    def __init__(self, store_chunks: int) -> None:
        self.is_behind = False
        self._given_up = 0
        self.patience = min(STORE_CHUNKS_MIN, store_chunks)

    def may_wait(self, chunks: int) -> bool:
        """True if a running request that lacks ``chunks`` chunks waits instead of giving up a
        write."""
        return not self.is_behind and chunks <= self.patience

    def end_step(self, unwritten: int, given_up: int) -> None:
        """End the step: ``unwritten`` chunks wait for a lower tier or are being written, and
        ``given_up`` writes were given up so far."""
        self.is_behind = unwritten > 0 and (self.is_behind or given_up > self._given_up)
        self._given_up = given_up
