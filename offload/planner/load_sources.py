"""Where the chunks of a load come from: they are found, kept there, and given slots.

Part of the planner, on the same thread. Owns what is being read into the CPU tier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import not_

from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.columns import Columns, one_width
from offload.messages.plan import IN_SLAB, STAGED
from offload.planner.jobs import Job
from offload.planner.tier_health import TierHealth
from offload.telemetry.counters import PlannerStats
from offload.telemetry.removed_chunks import RemovalLog
from policies.base import EntryInfo

SAMPLE = 256
"""Chunks of a long load by which is told beforehand where it will come from."""
EVICTED_COST = 2
"""Evicting a chunk for another takes as long as planning two that lie in the CPU tier."""
Pins = tuple[int, Sequence[bytes]]
"""A tier's number and the keys that are pinned in it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Chunks on their way: what the workers are told, the keys that got a slot to be read into,
    what is pinned, how many chunks of which group come from which tier, and what that cost (see
    ``STEP_CHUNKS``)."""

    columns: Columns
    fills: Sequence[bytes]
    pins: Sequence[Pins]
    counts: Counter[tuple[int, int]]
    cost: int


class LoadSources:
    """The CPU tier and the lower tiers as sources; ``promoting`` are the chunks that some load is
    reading into the CPU tier, with its job; ``removals`` is what has left any of these."""

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        gates: Sequence[TierHealth],
        stats: PlannerStats,
    ) -> None:
        self.promoting: dict[bytes, int] = {}
        self.removals = RemovalLog()
        for index in (cpu, *lower):
            index.removals = self.removals
        self._groups = groups
        self._cpu = cpu
        self._lower = tuple(lower)
        self._gates = tuple(gates)
        self._stats = stats

    def holders(
        self, read: frozenset[int] | None, above: int | None = None
    ) -> tuple[Container[bytes], ...]:
        """Where a chunk can be found now, nearest first, among the tiers ``read`` (``None``: all)
        and ``above`` a lower one. A promotion under way counts, unless it may come from a tier
        that is not to be waited for."""
        asked = [tier for tier, gate in enumerate(self._gates) if gate.readable]
        asked = [tier for tier in asked if read is None or tier in read]
        lower = [self._lower[tier].resident for tier in asked if above is None or tier < above]
        if read is not None and CPU not in read:
            return tuple(lower)
        if len(asked) < len(self._lower) or not self._lower:
            return (self._cpu.resident, *lower)
        return (self._cpu.resident, *lower, self.promoting)

    def expected(self, runs: Sequence[ChunkBatch], read: frozenset[int] | None) -> dict[int, int]:
        """About the tokens that each tier would give of these chunks now, from a sample of them."""
        counts: Counter[tuple[int, int]] = Counter()
        tiers = [t for t in range(CPU, len(self._lower)) if read is None or t in read]
        for run in runs:
            left = sample = run.keys[:: -(-len(run) // SAMPLE)]
            rest = len(run)
            for tier in tiers[:-1]:
                resident = (self._cpu if tier == CPU else self._lower[tier]).resident
                held = list(map(resident.__contains__, left))
                left = list(compress(left, map(not_, held)))
                counts[run.group, tier] = len(run) * held.count(True) // len(sample)
                rest -= counts[run.group, tier]
            counts[run.group, tiers[-1]] = rest  # a lookup has found them all
        return self.tokens(+counts)

    def take(
        self, job: int, runs: Sequence[ChunkBatch], read: frozenset[int] | None, *, later: bool
    ) -> Taken | None:
        """Keep these chunks where they are until the job has ended: pinned, and if a lower tier has
        them read into a slot, or through a staging buffer where no slot is free. ``None``, with
        nothing done, if nobody holds one of them, or if they are taken ``later`` than they were
        looked up and only a tier holds one that has begun to fail since."""
        keys = runs[0].keys if len(runs) == 1 else [*chain.from_iterable(r.keys for r in runs)]
        groups = [*chain.from_iterable([run.group] * len(run) for run in runs)]
        slots, tiers = self._find(keys, read)
        used = set(tiers)
        if later and any(t != IN_SLAB and not self._gates[t].reads.closed for t in used):
            return None
        if IN_SLAB in used and (IN_SLAB, STAGED) in zip(tiers, slots, strict=True):
            return None
        pins = self._pin(keys, slots, tiers)
        promoted, evicted = self._promote(job, runs, tiers)
        if len(promoted) == len(keys):
            slots = list(promoted.values())
        elif promoted:
            slots = list(map(promoted.get, keys, slots))
        columns = Columns(
            keys,
            groups,
            runs[0].blocks if len(runs) == 1 else [*chain.from_iterable(r.blocks for r in runs)],
            one_width([*chain.from_iterable([run.width] * len(run) for run in runs)]),
            slots,
            tiers,
        )
        cost = len(keys) + len(promoted) + EVICTED_COST * evicted
        return Taken(columns, tuple(promoted), pins, self._count(groups, tiers), cost)

    def _find(
        self, keys: Sequence[bytes], read: frozenset[int] | None
    ) -> tuple[list[int], list[int]]:
        """Slot and tier of each chunk: a slot of the CPU tier and ``IN_SLAB`` if it lies there or
        is on its way there, else ``STAGED`` and the lower tier to read."""
        count = len(keys)
        cpu_counts = read is None or CPU in read
        slots = [STAGED] * count
        if cpu_counts:
            slots = list(map(self._cpu.resident.get, keys, repeat(STAGED)))
            if STAGED not in slots:
                return slots, [IN_SLAB] * count
        tiers = self._below(keys, read)
        joinable = cpu_counts and not self.promoting.keys().isdisjoint(keys)
        if slots.count(STAGED) < count or joinable:
            for at, slot in enumerate(slots):
                if slot != STAGED:
                    tiers[at] = IN_SLAB
                elif joinable and self._joins(keys[at], tiers[at]):
                    slots[at], tiers[at] = self._cpu.place(keys[at]), IN_SLAB
        return slots, tiers

    def _below(self, keys: Sequence[bytes], read: frozenset[int] | None) -> list[int]:
        """The highest lower tier among ``read`` that holds each key, if possible one that may be
        read now; ``IN_SLAB`` if none does."""
        found = [IN_SLAB] * len(keys)
        best_last = sorted(
            range(len(self._lower)), key=lambda tier: (self._gates[tier].readable, -tier)
        )
        for tier in best_last:
            if read is None or tier in read:
                held = list(map(self._lower[tier].resident.__contains__, keys))
                if all(held):
                    found = [tier] * len(keys)
                else:
                    found = [tier if here else f for here, f in zip(held, found, strict=True)]
        return found

    def _joins(self, key: bytes, source: int) -> bool:
        """Whether to wait for the read of another load: not if that may come from a tier that is
        shut out while ``source`` has the chunk too and is not."""
        if key not in self.promoting:
            return False
        if all(gate.readable for gate in self._gates):
            return True
        return source == IN_SLAB or not self._gates[source].readable

    def _pin(
        self, keys: Sequence[bytes], slots: Sequence[int], tiers: Sequence[int]
    ) -> Sequence[Pins]:
        """Keep every chunk where it is until the load has ended; what was pinned, by tier."""
        pins = []
        for source in set(tiers):
            held = keys if tiers.count(source) == len(tiers) else None
            tier = CPU if source == IN_SLAB else source
            mine = held or list(compress(keys, map(source.__eq__, tiers)))
            (self._cpu if tier == CPU else self._lower[tier]).pin(mine)
            pins.append((tier, mine))
        return pins

    def _promote(
        self, job: int, runs: Sequence[ChunkBatch], tiers: Sequence[int]
    ) -> tuple[dict[bytes, int], int]:
        """Slots for what is read from below, as far as there are any; how many were evicted."""
        if tiers.count(IN_SLAB) == len(tiers):
            return {}, 0
        keys: list[bytes] = []
        infos: list[EntryInfo] = []
        at = 0
        for run in runs:
            below = run.chosen(list(map(IN_SLAB.__ne__, tiers[at : at + len(run)])))
            at += len(run)
            # Also what lies there: a request that may not read this tier has come.
            if not self._cpu.are_absent(below.keys):
                below = below.chosen(list(map(self._cpu.is_absent, below.keys)))
            keys += below.keys
            infos += self._groups[run.group].entries(below, 1)
        grant = self._cpu.reserve(keys, infos)
        self._stats.evicted(CPU, grant.evicted)
        promoted = dict(zip(keys, grant.places, strict=False))
        self.promoting.update(zip(promoted, repeat(job)))
        return promoted, len(grant.evicted)

    def let_go(
        self, job: Job, most: int, filled: Callable[[Sequence[bytes]], None]
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        """What is to be done for a load that every rank has answered, in pieces of at most so many
        chunks. The head comes last, part by part as in each: so it ends up youngest."""
        good, bad = job.verdict()
        self._forget_promotions(bad)
        self.removals.note(bad)
        for end in range(len(bad), 0, -most):
            part = bad[max(0, end - most) : end]
            yield len(part), partial(self._filled, (), part, filled)
        for end in range(len(good), 0, -most):
            part = good[max(0, end - most) : end]
            yield len(part), partial(self._filled, part, (), filled)
        for tier, keys in job.pins:
            index = self._cpu if tier == CPU else self._lower[tier]
            yield len(keys) // 2, partial(index.unpin, keys)

    def _filled(
        self,
        good: Sequence[bytes],
        bad: Sequence[bytes],
        filled: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._cpu.abort(bad)
        kept = self._cpu.commit(good)
        self._stats.promoted(kept)
        self._forget_promotions(good)
        if len(kept) < len(good):
            self.removals.note(good)
        filled([*good, *bad])

    def _forget_promotions(self, keys: Sequence[bytes]) -> None:
        deque(map(self.promoting.pop, keys, repeat(None)), maxlen=0)

    @staticmethod
    def _count(groups: Sequence[int], tiers: Sequence[int]) -> Counter[tuple[int, int]]:
        if len(alone := set(groups)) > 1:
            return Counter(zip(groups, tiers, strict=True))
        return Counter({(g, tier): tiers.count(tier) for g in alone for tier in set(tiers)})

    def tokens(self, counts: Mapping[tuple[int, int], int]) -> dict[int, int]:
        """Tokens by source tier, counted on the group with the most tokens."""
        found: dict[int, dict[int, int]] = {}
        for (group, tier), chunks in counts.items():
            tokens = chunks * self._groups[group].chunk_tokens
            found.setdefault(group, {})[CPU if tier == IN_SLAB else tier] = tokens
        return max(found.values(), key=lambda by_tier: sum(by_tier.values()), default={})
