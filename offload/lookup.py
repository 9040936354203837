"""How much of a request to load: the longest hit, less what is sooner computed than loaded."""

from __future__ import annotations

from collections.abc import Sequence

from offload.chunks import UNKNOWN, Origin
from offload.coordinator import Coordinator, present_in
from offload.known_prefix import KnownPrefix, LookupRoom
from offload.planner import Planner


def tokens_to_load(
    coordinator: Coordinator,
    planner: Planner,
    keys: Sequence[Sequence[bytes]],
    start: int,
    limit: int,
    room: LookupRoom,
    known: KnownPrefix,
    origin: Origin = UNKNOWN,
) -> int | None:
    """Where the longest prefix ends that is worth restoring; ``start`` if nothing is, and ``None``
    if there was no ``room`` to find out: to be asked again in the next step.

    Arguments as of `Coordinator.longest_hit`; ``known`` is what earlier lookups of this request
    have found, ``origin`` says what it may read. The end of a prefix that only a farther tier holds
    is left to be computed if it has fewer tokens than that tier is worth asking for; what nearer
    tiers hold is loaded all the same.
    """
    known.begin()

    def longest_hit(above: int | None = None) -> int:
        holders = planner.holders_for(origin, above)
        runs = known.runs_in(above, holders, room)
        return coordinator.longest_hit(keys, present_in(*holders), start, limit, runs)

    most = origin.controls.max_load_tokens
    limit = limit if most is None else min(limit, start + most)
    hit, is_shorter = longest_hit(), False
    for tier in reversed(range(len(planner.lower))):
        least = planner.gates.tiers[tier].pace.least_tokens
        if hit <= start or not least or known.is_partial:
            break
        shorter = longest_hit(above=tier)
        if hit - shorter >= least:
            break
        is_shorter = is_shorter or hit > shorter
        hit = shorter
    if known.is_partial:
        return None
    planner.stats.short_loads += is_shorter
    return hit
