"""Tracks loads that have not been reported to vLLM as ended. Their requests hold GPU blocks.

Separate from `offload.requests.request_state`, because the order of loads concerns all requests.
"""

from __future__ import annotations

UNFINISHED_WAIT_S = 30.0
"""The longest time that a request whose load has failed waits for other requests."""


class UnfinishedLoads:
    """The open loads, for vLLM's scheduler thread.

    Loads are numbered in the order in which they begin, because a request may load again, and its
    name may be reused.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # by request, oldest first
        self._behind: dict[str, tuple[int, float]] = {}
        self._count = 0

    def begin(self, request: str) -> None:
        """Record that vLLM has allocated blocks for a load of this request."""
        self._open.pop(request, None)
        self._count += 1
        self._open[request] = self._count

    def ended(self, request: str) -> None:
        """Record that vLLM knows that this request's load has ended: it looks the request up
        again."""
        self._open.pop(request, None)

    def forget(self, request: str) -> None:
        """Forget a request that is being computed now, or has ended."""
        self._open.pop(request, None)
        self._behind.pop(request, None)

    def must_wait(self, request: str, now: float) -> bool:
        """True if this request, whose load has failed, must wait for others.

        It waits for the loads that were open when vLLM first looked this request up again. Later
        loads do not count: otherwise this request would wait as long as new requests kept arriving.
        ``now`` (monotonic seconds) limits the wait for loads that never end.
        """
        last, until = self._behind.setdefault(request, (self._count, now + UNFINISHED_WAIT_S))
        oldest = next(iter(self._open.values()), self._count + 1)
        return oldest <= last and now < until
