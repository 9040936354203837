"""Uses of chunks as they are noted: in a tier's policy, and for the tiers that keep an order of use
themselves. Part of the planner, on the same thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.gates import TierGate
from offload.index import TierIndex
from offload.ledger import CPU
from offload.plans import Keys


class Touches:
    """Notes of uses; those of lower tiers wait here for the step that sends them."""

    def __init__(
        self, cpu: TierIndex, lower: Sequence[TierIndex], gates: Sequence[TierGate]
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
