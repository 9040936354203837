"""When policies hear that a request has used its chunks: once, at its end, after all are stored.

Part of the planner, on the same thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.index import TierIndex

WAITING_MOST = 256
"""Ended requests whose last chunks are still being stored; further ones are noted at once."""


@dataclass(slots=True)
class _Use:
    """A request that has ended while ``missing`` of its keys were being stored."""

    missing: set[bytes]
    keys: tuple[bytes, ...]
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

    def ended(self, keys: Sequence[bytes], hints: Mapping[str, Any]) -> None:
        """A request has ended that used these keys of one group (prefix order). Waits for those
        that are being stored, so that policies see them before their use."""
        missing = self._cpu.filling_among(keys)
        if missing and len(self._waiting) < WAITING_MOST:
            self._waiting.append(_Use(missing, tuple(keys), hints))
        else:
            self._note(keys, hints)

    def filled(self, keys: Iterable[bytes]) -> None:
        """A job that filled these keys has ended, well or not."""
        if not self._waiting:
            return
        for use in self._waiting:
            use.missing.difference_update(keys)
        ready = [use for use in self._waiting if not use.missing]
        self._waiting = [use for use in self._waiting if use.missing]
        for use in ready:
            self._note(use.keys, use.hints)

    def clear(self) -> None:
        """All chunks are forgotten."""
        self._waiting.clear()

    def _note(self, keys: Sequence[bytes], hints: Mapping[str, Any]) -> None:
        self._touch(keys)
        if hints:
            for index in self._tiers:
                index.policy.advise(keys, hints)
