"""The loads that one lower tier is serving, and how much of another load it can serve in a given
time.

The model: a tier delivers a fixed number of tokens per second, which the loads in flight share
equally. While a load of ``n`` tokens is read, a load that was there before it receives at most
``n`` tokens. Pure.
"""

from __future__ import annotations


class ReadQueue:
    """The tokens that each load in flight reads from one tier, by job. Owned by ``TierHealth``."""

    def __init__(self) -> None:
        self._reads: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of loads in flight."""
        return len(self._reads)

    @property
    def tokens(self) -> int:
        """The tokens of all loads in flight."""
        return sum(self._reads.values())

    def begin(self, job: int, tokens: int) -> int:
        """Record that this load begins to read ``tokens`` tokens; returns ``before`` for it."""
        before = self.before(tokens)
        self._reads[job] = tokens
        return before

    def end(self, job: int) -> None:
        """Record that no request waits for this load any more."""
        self._reads.pop(job, None)

    def before(self, tokens: int) -> int:
        """The tokens that loads in flight receive while a load of ``tokens`` is read."""
        return sum(min(other, tokens) for other in self._reads.values())

    def part(self, tokens_max: float) -> int:
        """The length of the longest load that is read completely within ``tokens_max`` delivered
        tokens, which include those of the loads before it."""
        others = sorted(self._reads.values())
        while others and others[0] * (len(others) + 1) < tokens_max:
            tokens_max -= others.pop(0)
        return max(0, int(tokens_max / (len(others) + 1)))
