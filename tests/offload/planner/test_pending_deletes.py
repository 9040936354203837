"""Tests of deletions in a tier that has lost everything."""

from __future__ import annotations

from offload.planner.step_budget import DELETIONS_MAX
from tests.offload.planner.simulated_ranks import key_of
from tests.offload.planner.troubled_tiers import answer, make, recover, report_seen, step, wanted


def test_records_lost_by_a_large_tier_are_deleted_in_portions() -> None:
    """Nothing is written meanwhile, because a chunk that was written again could be deleted."""
    many = 3 * DELETIONS_MAX
    planner = make()
    planner.lower[0].space.capacity = 100 * many
    recover(planner, *range(many))
    report_seen(planner, losses=1)
    planner.stores.plan(wanted(0))
    plan = step(planner, 0.0)
    answer(planner, plan.stores[0].job)
    deleted = list(plan.deletes[0])
    while len(deleted) < many:
        plan = step(planner, 0.0)
        assert len(plan.deletes[0]) <= 2 * DELETIONS_MAX
        deleted += plan.deletes[0]
        assert not plan.write_throughs or len(deleted) == many
    assert sorted(deleted) == sorted(key_of(n) for n in range(many))
    write_throughs = plan.write_throughs or step(planner, 0.0).write_throughs
    assert [job.keys for job in write_throughs] == [(key_of(0),)]
