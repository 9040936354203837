"""How much of a request to load: the longest hit, less what is sooner computed than loaded."""

from __future__ import annotations

from collections.abc import Sequence

from offload.chunks import UNKNOWN, Origin
from offload.coordinator import Coordinator, present_in
from offload.planner import Planner


def tokens_to_load(
    coordinator: Coordinator,
    planner: Planner,
    keys: Sequence[Sequence[bytes]],
    start: int,
    limit: int,
    origin: Origin = UNKNOWN,
) -> int:
    """Where the longest prefix ends that is worth restoring; ``start`` if nothing is.

    Arguments as of `Coordinator.longest_hit`; ``origin`` says what the request may read. The end
    of a prefix that only a farther tier holds is left to be computed if it has fewer tokens than
    that tier is worth asking for; what nearer tiers hold is loaded all the same.
    """
    most = origin.controls.max_load_tokens
    limit = limit if most is None else min(limit, start + most)
    hit = coordinator.longest_hit(keys, present_in(*planner.holders_for(origin)), start, limit)
    for tier in reversed(range(len(planner.lower))):
        least = planner.gates.tiers[tier].pace.least_tokens
        if hit <= start or not least:
            break
        nearer = present_in(*planner.holders_for(origin, above=tier))
        shorter = coordinator.longest_hit(keys, nearer, start, limit)
        if hit - shorter >= least:
            break
        planner.stats.short_loads += hit > shorter
        hit = shorter
    return hit
