"""When policies hear that a request has used its chunks: once, at its end, after all are stored.

Part of the planner, on the same thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.index import TierIndex

WAITING_MOST = 256
"""Ended requests whose last chunks are still being stored; further ones are noted at once."""
AT_ONCE = 128
"""Keys that are noted at a time; the rest of a long request is noted in the steps that follow."""
BEHIND_MOST = 1024
"""Parts that may be put off."""


@dataclass(slots=True)
class _Use:
    """A request that has ended while ``missing`` of its keys were being stored."""

    missing: set[bytes]
    keys: Sequence[bytes]
    hints: Mapping[str, Any]


class Uses:
    """Ended requests on their way to the policies; ``touch`` notes keys in every tier."""

    def __init__(
        self,
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        touch: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._cpu = cpu
        self._tiers = (cpu, *lower)
        self._touch = touch
        self._waiting: list[_Use] = []
        self._behind: deque[tuple[Sequence[bytes], _Use | None]] = deque()

    def ended(self, keys: Sequence[bytes], hints: Mapping[str, Any]) -> None:
        """A request has ended that used these keys of one group (prefix order). Waits for those
        that are being stored, so that policies see them before their use."""
        use = _Use(self._cpu.filling_among(keys), keys, hints)
        if use.missing and len(self._waiting) < WAITING_MOST:
            self._waiting.append(use)
        else:
            self._note(use)

    def filled(self, keys: Iterable[bytes]) -> None:
        """A job that filled these keys has ended, well or not."""
        if not self._waiting:
            return
        for use in self._waiting:
            use.missing.difference_update(keys)
        ready = [use for use in self._waiting if not use.missing]
        self._waiting = [use for use in self._waiting if use.missing]
        for use in ready:
            self._note(use)

    def __len__(self) -> int:
        """Parts that were put off."""
        return len(self._behind)

    def clear(self) -> None:
        """All chunks are forgotten."""
        self._waiting.clear()
        self._behind.clear()

    def step(self) -> int:
        """Note the next part of what was put off; of how many keys."""
        if not self._behind:
            return 0
        part, use = self._behind.popleft()
        self._touch(part)
        if use is not None and use.hints:
            for index in self._tiers:
                index.policy.advise(use.keys, use.hints)
        return len(part)

    def _note(self, use: _Use) -> None:
        """Part by part, the tail first, as policies take it: the head of a prefix ends up younger
        than its tail. Until the last part it is not, for a few steps: as it was not while the
        request ran, whose use no policy hears of before its end. Hints come after the last part."""
        end = len(use.keys)
        while end > AT_ONCE and all(index.policy.takes_parts for index in self._tiers):
            self._behind.append((use.keys[end - AT_ONCE : end], None))
            end -= AT_ONCE
        self._behind.append((use.keys[:end], use))
        self.step()
        while len(self._behind) > BEHIND_MOST:
            self.step()
