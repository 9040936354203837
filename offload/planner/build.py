"""Builds the planner from the ranks' states, for the connector and for the in-process manager.

The ranks must agree, and a chunk counts only if every rank holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from offload.config.fields import PolicyConfig
from offload.config.schema import OffloadConfig, TierConfig
from offload.errors import TierUnavailableError
from offload.index.capacity import ByteCapacity, SlotCapacity, UsableSlots
from offload.index.chunk_batch import GroupInfo
from offload.index.recovered_chunks import held_by_all, recover
from offload.index.tier_index import TierIndex
from offload.layout.groups import GroupLayout
from offload.messages.report import RankState
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.presence import KNOWN_CHUNKS_MAX, SharedLimits
from offload.planner.tier_health import HealthLimits, TierHealths
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import QueueSettings
from offload.sizes import DAY_S
from policies.admission import WriteBudget
from policies.base import AdmissionPolicy, EntryInfo
from policies.guarded import GuardedAdmission
from policies.registry import make_admission, make_policy

logger = logging.getLogger(__name__)


def make_planner(
    config: OffloadConfig,
    layouts: Sequence[GroupLayout],
    ranks: Sequence[RankState],
    limits: WorkLimits,
) -> Planner:
    """Build the planner for these ranks, which hold chunks of the groups ``layouts``.

    Raises ``TierUnavailableError`` if two ranks have not opened the same tiers.
    """
    first = ranks[0]
    _check_agreement(ranks)
    groups = {
        group.group: GroupInfo(
            group.kind,
            group.chunk_tokens,
            tuple(tier.footprints[group.group] for tier in first.tiers),
        )
        for group in layouts
    }
    slots = min(rank.slots for rank in ranks)
    usable = {rank.rank: slots if rank.usable is None else rank.usable for rank in ranks}
    space = SlotCapacity(slots, first.first_slot, min(usable.values()))
    cpu = TierIndex("cpu", space, make_policy(config.cpu.policy.spec))
    lower = [_lower_index(config, ranks, tier) for tier in range(len(first.tiers))]
    health = TierHealths([index.name for index in lower], _health_limits(config, layouts))
    queue_settings = [
        QueueSettings(
            _tier_admissions(config.lower[tier], index.name, len(ranks)), config.is_read_only(tier)
        )
        for tier, index in enumerate(lower)
    ]
    settings = PlannerSettings(
        limits,
        ranks=len(ranks),
        admission=_admission(config.cpu.admission, cpu.name),
        queue_settings=queue_settings,
        shared=[tier for tier, state in enumerate(first.tiers) if state.shared],
        shared_limits=SharedLimits(config.lookup_timeout_s, config.remember_s),
        look_ahead=config.look_ahead,
        wait_for_reads=config.wait_for_reads,
    )
    usable_slots = UsableSlots(space, usable)
    planner = Planner(groups, cpu, lower, settings, health=health, slots=usable_slots)
    for tier in range(len(lower)):
        _recover(planner, tier, ranks, groups)
    return planner


def _health_limits(config: OffloadConfig, layouts: Sequence[GroupLayout]) -> HealthLimits:
    chunk_tokens = max(group.chunk_tokens for group in layouts)
    return HealthLimits(
        config.breaker_failures, config.break_even, chunk_tokens, config.load_timeout_s
    )


def _check_agreement(ranks: Sequence[RankState]) -> None:
    first = ranks[0]
    for other in ranks:
        mine = [(tier.name, tier.footprints, tier.shared) for tier in first.tiers]
        if other.slot_bytes != first.slot_bytes or mine != [
            (tier.name, tier.footprints, tier.shared) for tier in other.tiers
        ]:
            raise TierUnavailableError(
                f"kvtiers: rank {other.rank} has slots of {other.slot_bytes} bytes and tiers "
                f"{[t.name for t in other.tiers]}, but rank {first.rank} has slots of "
                f"{first.slot_bytes} bytes and tiers {[t.name for t in first.tiers]}. Ranks with "
                "different KV geometry cannot share one plan: use the same number of layers and "
                "heads on every rank."
            )


def _lower_index(config: OffloadConfig, ranks: Sequence[RankState], tier: int) -> TierIndex:
    capacity = min(rank.tiers[tier].capacity_bytes for rank in ranks)
    settings = config.lower[tier]
    share = 1.0 if config.is_read_only(tier) else settings.high_watermark
    space = ByteCapacity(int(capacity * share))
    state = ranks[0].tiers[tier]
    # the index has only the chunks known so far; the tier manages its capacity itself
    if state.shared:
        space = ByteCapacity(KNOWN_CHUNKS_MAX * max(state.footprints.values()))
    low = settings.low_watermark / settings.high_watermark
    name = ranks[0].tiers[tier].name
    return TierIndex(name, space, make_policy(settings.policy.spec), low_watermark=low)


def _recover(
    planner: Planner,
    tier: int,
    ranks: Sequence[RankState],
    groups: Mapping[int, GroupInfo],
) -> None:
    """Enter the chunks that every rank holds; delete those that only some ranks hold (after a crash
    between ranks)."""
    columns, lost = held_by_all([rank.tiers[tier].keys for rank in ranks])
    infos = {
        group: EntryInfo(group, info.kind, 0, info.footprints[tier])
        for group, info in groups.items()
    }
    index = planner.lower[tier]
    rejected = recover(index, columns, infos)
    planner.deletes.add(tier, [*lost, *rejected])
    logger.info("kvtiers: %s: %d chunks recovered", index.name, len(index))


def _tier_admissions(tier: TierConfig, name: str, ranks: int) -> list[AdmissionPolicy]:
    """The policies that must admit a chunk before it is written. The daily budget is for the
    server; only one rank's share is counted, because every rank writes the same chunks."""
    chosen = _admission(tier.admission, name)
    found = [chosen] if chosen is not None else []
    if tier.write_budget_per_day:
        per_rank = tier.write_budget_per_day / ranks
        found.append(WriteBudget(per_rank / DAY_S, burst_bytes=per_rank / 24))
    return found


def _admission(policy: PolicyConfig, tier: str) -> AdmissionPolicy | None:
    """The configured policy in a guard; ``None`` for "all", so that no chunk needs a call. Write
    budgets, which the queue must recognize, need no guard."""
    if policy.name == "all":
        return None
    made = make_admission(policy.spec)
    return made if isinstance(made, WriteBudget) else GuardedAdmission(made, tier)
