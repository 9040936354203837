"""Reports uses of chunks to the eviction policies and to the tiers that keep an order of use.

A request's use is reported once, when it has ended and its last chunks are stored. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import Keys
from offload.planner.context import PlannerContext
from offload.planner.step_budget import USE_KEYS_MAX


class Recency:
    """Reports uses to the policies; uses for lower tiers wait here for the next plan (``waiting``).

    Owned by the planner; used on its thread.
    """

    def __init__(self, context: PlannerContext) -> None:
        self._cpu = context.cpu
        self._lower = context.lower
        self._health = context.health
        self.waiting: dict[int, list[bytes]] = {}

    def note(self, tier: int, keys: Sequence[bytes]) -> None:
        """Report one request's use of these keys (in prefix order) to one tier."""
        if tier == CPU:
            self._cpu.touch(keys)
            return
        index = self._lower[tier]
        if held := list(filter(index.resident.__contains__, keys)):
            index.touch(held)
            if self._health[tier].writes.closed:
                # otherwise uses would queue behind a disk that hangs
                self.waiting.setdefault(tier, []).extend(held)

    def note_everywhere(self, keys: Sequence[bytes]) -> None:
        """Report one request's use of these keys (in prefix order) to every tier."""
        for tier in range(CPU, len(self._lower)):
            self.note(tier, keys)

    def take(self) -> Mapping[int, Keys]:
        """The uses that this step sends to the lower tiers."""
        waiting, self.waiting = self.waiting, {}
        return {tier: Keys(keys) for tier, keys in waiting.items() if keys}

    def clear(self) -> None:
        """Record that all chunks are forgotten."""
        self.waiting.clear()


WAITING_USES_MAX = 256
"""Maximum number of ended requests whose last chunks are still being stored; uses of further
requests are reported at once."""
_NO_HINTS: Mapping[str, Any] = {}
BEHIND_MAX = 1024
"""Maximum number of pieces that may be deferred."""


@dataclass(slots=True)
class _PendingUse:
    """A request that ended while ``missing`` of its keys were being stored."""

    missing: set[bytes]
    keys: Sequence[bytes]
    hints: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Keys to report to a tier's policy. The last piece of a use also contains the ``use``
    itself."""

    tier: int
    keys: Sequence[bytes]
    use: _PendingUse | None


class RequestUses:
    """Holds ended requests whose uses have not been reported yet; ``touch`` reports keys to one
    tier.

    Owned by the planner; used on its thread. ``waiting`` are the requests whose last chunks are
    still being stored. If a policy accepts parts, a long request is reported to it in pieces over
    several steps; ``behind`` has the pieces that are left.
    """

    def __init__(
        self,
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        touch: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        self._cpu = cpu
        self._tiers = dict(enumerate((cpu, *lower), CPU))
        self._touch = touch
        self.waiting: list[_PendingUse] = []
        self.behind: deque[_Piece] = deque()

    def ended(self, keys: Sequence[bytes], hints: Mapping[str, Any] = _NO_HINTS) -> None:
        """Record that a request that used these keys of one group (in prefix order) has ended.
        Waits for keys that are being stored, so that policies see them before their use."""
        use = _PendingUse(self._cpu.filling_among(keys), keys, hints)
        if use.missing and len(self.waiting) < WAITING_USES_MAX:
            self.waiting.append(use)
        else:
            self._note(use)

    def filled(self, keys: Iterable[bytes]) -> None:
        """Record that a job that filled these keys has ended, successfully or not."""
        for use in self.waiting:
            use.missing.difference_update(keys)
        ready = [use for use in self.waiting if not use.missing]
        self.waiting = [use for use in self.waiting if use.missing]
        for use in ready:
            self._note(use)

    @property
    def is_long(self) -> bool:
        """True if the next piece is a long request for a policy that does not accept parts."""
        return bool(self.behind) and len(self.behind[0].keys) > USE_KEYS_MAX

    def clear(self) -> None:
        """Record that all chunks are forgotten."""
        self.waiting.clear()
        self.behind.clear()

    def step(self) -> int:
        """Report the next deferred piece; returns its number of keys."""
        if not self.behind:
            return 0
        piece = self.behind.popleft()
        self._touch(piece.tier, piece.keys)
        if piece.use is not None and piece.use.hints:
            self._tiers[piece.tier].policy.advise(piece.use.keys, piece.use.hints)
        return len(piece.keys)

    def _note(self, use: _PendingUse) -> None:
        """Report a use: at once if it is short, otherwise in later steps. Policies that accept
        parts get it in pieces, the tail first, so that the head of the prefix ends up younger than
        its tail once the last piece is reported. Hints come after the last piece."""
        for tier, index in self._tiers.items():
            end = len(use.keys)
            while end > USE_KEYS_MAX and index.policy.takes_parts:
                self.behind.append(_Piece(tier, use.keys[end - USE_KEYS_MAX : end], None))
                end -= USE_KEYS_MAX
            self.behind.append(_Piece(tier, use.keys[:end], use))
        for _ in self._tiers if len(use.keys) <= USE_KEYS_MAX else (CPU,):
            if not self.is_long:
                self.step()
        while len(self.behind) > BEHIND_MAX:
            self.step()
