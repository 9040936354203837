"""When policies hear that a request has used its chunks: once, at its end, after all are stored.

Part of the planner, on the same thread.

Uses of chunks as they are noted: in a tier's policy, and for the tiers that keep an order of use
themselves. Part of the planner, on the same thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import Keys
from offload.planner.tier_health import TierHealth


class Recency:
    """Notes of uses; those of lower tiers wait here for the step that sends them."""

    def __init__(
        self, cpu: TierIndex, lower: Sequence[TierIndex], gates: Sequence[TierHealth]
    ) -> None:
        self._cpu = cpu
        self._lower = tuple(lower)
        self._gates = tuple(gates)
        self._waiting: dict[int, list[bytes]] = {}

    def note(self, tier: int, keys: Sequence[bytes]) -> None:
        """One request's use of these keys (prefix order) in one tier."""
        if tier == CPU:
            self._cpu.touch(keys)
            return
        index = self._lower[tier]
        if held := list(filter(index.resident.__contains__, keys)):
            index.touch(held)
            if self._gates[tier].writes.closed:  # else notes would queue behind a hung disk
                self._waiting.setdefault(tier, []).extend(held)

    def take(self) -> Mapping[int, Keys]:
        """What lower tiers are to be told in this step."""
        waiting, self._waiting = self._waiting, {}
        return {tier: Keys(keys) for tier, keys in waiting.items() if keys}

    def clear(self) -> None:
        """All chunks are forgotten."""
        self._waiting.clear()


WAITING_MAX = 256
"""Ended requests whose last chunks are still being stored; further ones are noted at once."""
AT_ONCE = 128
"""Keys that are noted at a time, where policies take parts; the rest of a long request is noted in
the steps that follow."""
BEHIND_MAX = 1024
"""Parts that may be put off."""


@dataclass(slots=True)
class _Use:
    """A request that has ended while ``missing`` of its keys were being stored."""

    missing: set[bytes]
    keys: Sequence[bytes]
    hints: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Keys to be noted in a tier; with the last ones the ``use`` that they belong to."""

    tier: int
    keys: Sequence[bytes]
    use: _Use | None


class RequestUses:
    """Ended requests on their way to the policies; ``touch`` notes keys in one tier."""

    def __init__(
        self,
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        touch: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        self._cpu = cpu
        self._tiers = dict(enumerate((cpu, *lower), CPU))
        self._touch = touch
        self._waiting: list[_Use] = []
        self._behind: deque[_Piece] = deque()

    def ended(self, keys: Sequence[bytes], hints: Mapping[str, Any]) -> None:
        """A request has ended that used these keys of one group (prefix order). Waits for those
        that are being stored, so that policies see them before their use."""
        use = _Use(self._cpu.filling_among(keys), keys, hints)
        if use.missing and len(self._waiting) < WAITING_MAX:
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
        """Pieces that were put off."""
        return len(self._behind)

    @property
    def is_long(self) -> bool:
        """Whether the next piece is a long request of a policy that does not take parts."""
        return bool(self._behind) and len(self._behind[0].keys) > AT_ONCE

    def clear(self) -> None:
        """All chunks are forgotten."""
        self._waiting.clear()
        self._behind.clear()

    def step(self) -> int:
        """Note the next piece of what was put off; of how many keys."""
        if not self._behind:
            return 0
        piece = self._behind.popleft()
        self._touch(piece.tier, piece.keys)
        if piece.use is not None and piece.use.hints:
            self._tiers[piece.tier].policy.advise(piece.use.keys, piece.use.hints)
        return len(piece.keys)

    def _note(self, use: _Use) -> None:
        """At once if it is short. Else in the next steps, and where policies take parts part by
        part, the tail first: the head of a prefix ends up younger than its tail. Until the last
        part it is not, for a few steps: as it was not while the request ran, whose use no policy
        hears of before its end. Hints come after the last part."""
        for tier, index in self._tiers.items():
            end = len(use.keys)
            while end > AT_ONCE and index.policy.takes_parts:
                self._behind.append(_Piece(tier, use.keys[end - AT_ONCE : end], None))
                end -= AT_ONCE
            self._behind.append(_Piece(tier, use.keys[:end], use))
        for _ in self._tiers if len(use.keys) <= AT_ONCE else (CPU,):
            if not self.is_long:
                self.step()
        while len(self._behind) > BEHIND_MAX:
            self.step()
