"""Look-ahead and the hits of each policy while requests queue, in the timed simulation.

The bounds are in percentage points of the prompt tokens. They come from at least 30 traces of other
seeds for each policy and pair of tiers: the worst mean, less four standard errors, rounded.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from policies.registry import make_policy, policy_names
from policies.simulation.simulator import SimTier
from policies.simulation.timing import Speeds, simulate_timed
from policies.simulation.trace import Trace
from policies.testing import synthetic_trace

SPEEDS = Speeds(prefill=2500, decode=8, read=2000, in_flight=2, rate=15)
"""More requests come than can be served, so most of them wait."""
LOSS_MAX = 0.35
KEEPERS = ("lfu", "slru", "wtinylfu")
"""Policies that keep blocks which were used often, even if a small lower tier has dropped them."""
KEEPERS_LOSS_MAX = 0.6
GAIN_MIN = 3.0


@cache
def traces() -> list[Trace]:
    return [synthetic_trace(seed, requests=300) for seed in range(3)]


def gains(policy: str, upper: float, lower: float) -> tuple[float, float]:
    """Return the gain of look-ahead in hits of both tiers, and in hits of the upper tier alone.
    ``upper`` and ``lower`` are shares of all blocks."""
    both, above = [], []
    for trace in traces():
        unique = trace.unique_blocks()
        found = [
            simulate_timed(
                trace,
                SimTier(make_policy(policy), int(upper * unique)),
                SimTier(make_policy("lru"), int(lower * unique)),
                SPEEDS,
                look_ahead=look_ahead,
            )
            for look_ahead in (0.0, 0.25)
        ]
        both.append(100 * (found[1].token_hit_ratio - found[0].token_hit_ratio))
        ratios = [result.extra["upper_hit_ratio"] for result in found]
        above.append(100 * (ratios[1] - ratios[0]))
    return fmean(both), fmean(above)


@pytest.mark.parametrize("lower", [0.5, 1.0])
@pytest.mark.parametrize("policy", policy_names())
def test_a_small_upper_tier_has_more_of_what_requests_need(policy: str, lower: float) -> None:
    both, above = gains(policy, 0.03, lower)
    assert above >= GAIN_MIN
    assert both >= -LOSS_MAX


@pytest.mark.parametrize("lower", [0.5, 1.0])
@pytest.mark.parametrize("policy", policy_names())
def test_hits_of_both_tiers_hardly_change(policy: str, lower: float) -> None:
    """Hits can fall a little. Requests begin earlier, some of them before another request has
    stored the prefix that they share. And while the upper tier keeps what waiting requests need, it
    evicts other blocks, some of which the lower tier has already dropped."""
    is_keeper = policy in KEEPERS and lower < 1
    assert gains(policy, 0.1, lower)[0] >= -(KEEPERS_LOSS_MAX if is_keeper else LOSS_MAX)
