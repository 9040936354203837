"""Decides whether stores wait for the lower tiers. They wait only while the lower tiers keep up.

If a store's victim still waits to be written, the store waits too, as long as its request runs and
could store all its missing chunks at its end, from blocks that stay in the GPU's cache. With a disk
that keeps up, a prefix that is longer than the CPU tier is then written without holes. With a
slower disk the victim's write is cancelled instead: waiting would keep new chunks, which are worth
the most, out of the CPU tier. Pure.
"""

from __future__ import annotations

from offload.planner.step_budget import STORE_CHUNKS_MIN


class WritePressure:
    """Decides whether stores wait for the lower tiers. Owned by the planner; used on its thread.

    ``is_behind`` means that writes were cancelled and that the disk has not caught up since then;
    until it has, no store waits for it. ``patience`` is the number of a request's chunks that can
    be stored at its end.
    """

    def __init__(self, store_chunks: int) -> None:
        self.is_behind = False
        self._given_up = 0
        self.patience = min(STORE_CHUNKS_MIN, store_chunks)

    def may_wait(self, chunks: int) -> bool:
        """True if a running request with ``chunks`` chunks to store waits instead of cancelling a
        write."""
        return not self.is_behind and chunks <= self.patience

    def end_step(self, unwritten: int, given_up: int) -> None:
        """End the step. ``unwritten`` chunks wait for a lower tier or are being written;
        ``given_up`` is the number of writes cancelled so far."""
        self.is_behind = unwritten > 0 and (self.is_behind or given_up > self._given_up)
        self._given_up = given_up
