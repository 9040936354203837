"""The tiers as sources of loads: finds chunks, pins them, and reserves slots for them. It is
pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, filterfalse, repeat

from offload.index.chunk_batch import ChunkBatch, joined
from offload.layout.keys import CPU
from offload.messages.plan import IN_SLAB, STAGED, Columns, one_width
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, Pins
from offload.planner.step_budget import EVICT_COST_IN_LOADED_CHUNKS
from policies.base import EntryInfo

SAMPLED_CHUNKS = 256
"""Number of chunks of a long load from which its sources are estimated in advance."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One part of a load: the ``columns`` for the workers, the keys whose new slots are read into
    (``fills``) with their ``infos``, the pins, the number of chunks by group and tier (``counts``),
    and the ``cost`` (see ``STEP_CHUNKS``)."""

    columns: Columns
    fills: Sequence[bytes]
    infos: Sequence[EntryInfo]
    pins: Sequence[Pins]
    counts: Mapping[tuple[int, int], int]
    cost: int


@dataclass(frozen=True, slots=True)
class _Promotion:
    """The ``slots`` reserved for chunks of lower tiers, by key, the ``infos`` of these chunks, and
    the number of chunks ``evicted`` for them."""

    slots: Mapping[bytes, int]
    infos: Sequence[EntryInfo]
    evicted: int


_NOTHING_PROMOTED = _Promotion({}, (), 0)


def _columns_of(
    batches: Sequence[ChunkBatch],
) -> tuple[Sequence[bytes], Sequence[int], Sequence[int], Sequence[int]]:
    """The keys, groups, blocks and widths of all these chunks, as in ``Columns``."""
    if len(batches) == 1:  # mostly
        (only,) = batches
        return only.keys, [only.group] * len(only), only.blocks, [only.width]
    widths = chain.from_iterable([batch.width] * len(batch) for batch in batches)
    return (
        [*chain.from_iterable(batch.keys for batch in batches)],
        [*chain.from_iterable([batch.group] * len(batch) for batch in batches)],
        [*chain.from_iterable(batch.blocks for batch in batches)],
        one_width([*widths]),
    )


class LoadSources:
    """The tiers as sources of loads. Owned by the planner; used on its thread.

    ``promoting`` maps each chunk that is being read into the CPU tier to the tier it comes from.
    """

    def __init__(self, context: PlannerContext) -> None:
        self.promoting: dict[bytes, int] = {}
        self._groups = context.groups
        self._cpu = context.cpu
        self._lower = context.lower
        self._health = context.health
        self._stats = context.stats
        self._removals = context.removals
        for index in context.indexes.values():
            index.log_removals(self._removals)

    def holders(
        self,
        read: frozenset[int] | None = None,
        above: int | None = None,
        *,
        is_ahead: bool = False,
    ) -> tuple[Container[bytes], ...]:
        """Return the chunks that can be loaded now from the tiers ``read`` (``None``: all), nearest
        tier first. With ``is_ahead``: those that can be read ahead.

        If ``above`` is a lower tier, only the tiers before it count; if it is ``CPU``, only what is
        in the CPU tier now. Otherwise chunks that are being read into the CPU tier count as well,
        unless there is a lower tier that must not be used: they might come from that tier.
        """
        if above == CPU:
            return (self._cpu.resident,) if read is None or CPU in read else ()
        asked = sorted(self._health.ahead_tiers()) if is_ahead else self._health.readable_tiers()
        if read is not None:
            asked = [tier for tier in asked if tier in read]
        lower = [self._lower[tier].resident for tier in asked if above is None or tier < above]
        if read is not None and CPU not in read:
            return tuple(lower)
        if len(asked) < len(self._lower) or not self._lower:
            return (self._cpu.resident, *lower)
        return (self._cpu.resident, *lower, self.promoting)

    def present(self, key: bytes) -> bool:
        """True if some tier can provide this chunk now, or soon will."""
        return any(key in holder for holder in self.holders())

    def forget_all(self) -> None:
        """Forget all chunks."""
        self.promoting.clear()

    def expected(
        self, batches: Sequence[ChunkBatch], read: frozenset[int] | None
    ) -> dict[int, int]:
        """Estimate, from a sample, how many tokens of these chunks each tier would provide."""
        counts: dict[tuple[int, int], int] = {}
        tiers = [t for t in range(CPU, len(self._lower)) if read is None or t in read]
        for batch in batches:
            left = sample = batch.keys[:: -(-len(batch) // SAMPLED_CHUNKS)]
            rest = len(batch)
            for tier in tiers[:-1]:
                resident = (self._cpu if tier == CPU else self._lower[tier]).resident
                absent = list(filterfalse(resident.__contains__, left))
                chunks = len(batch) * (len(left) - len(absent)) // len(sample)
                counts[batch.group, tier] = chunks
                left, rest = absent, rest - chunks
            counts[batch.group, tiers[-1]] = rest  # only for chunks that a lookup has found
        return self.tokens(counts)

    def take(
        self, batches: Sequence[ChunkBatch], read: frozenset[int] | None, *, later: bool
    ) -> PlannedPart | None:
        """Pin these chunks until the job has ended, and reserve slots for chunks of lower tiers, as
        far as slots are free. Does nothing and returns ``None`` if one of the chunks is in no tier,
        or if one of them has to come from a tier that has begun to fail since the lookup
        (``later``: an earlier step has looked the chunks up)."""
        keys, groups, blocks, widths = _columns_of(batches)
        slots, tiers = self._find(keys, read)
        used = set(tiers)
        if later and any(t != IN_SLAB and not self._health[t].reads.closed for t in used):
            return None
        if IN_SLAB in used and (IN_SLAB, STAGED) in zip(tiers, slots, strict=True):
            return None
        pins = self._pin(keys, slots, tiers)
        promoted = self._promote(batches, tiers)
        if len(promoted.slots) == len(keys):
            slots = list(promoted.slots.values())
        elif promoted.slots:
            slots = list(map(promoted.slots.get, keys, slots))
        return PlannedPart(
            Columns(keys, groups, blocks, widths, slots, tiers),
            fills=tuple(promoted.slots),
            infos=promoted.infos,
            pins=pins,
            counts=self._count(groups, tiers),
            cost=len(keys) + len(promoted.slots) + EVICT_COST_IN_LOADED_CHUNKS * promoted.evicted,
        )

    def _find(
        self, keys: Sequence[bytes], read: frozenset[int] | None
    ) -> tuple[list[int], list[int]]:
        """Slot and tier of each chunk. If the chunk is in a slot of the CPU tier, or is being read
        into one: that slot and ``IN_SLAB``. Otherwise: ``STAGED`` and the lower tier to read."""
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
                    slots[at], tiers[at] = self._cpu.location(keys[at]), IN_SLAB
        return slots, tiers

    def _below(self, keys: Sequence[bytes], read: frozenset[int] | None) -> list[int]:
        """For each key, the nearest lower tier among ``read`` that holds it, preferably a readable
        one; ``IN_SLAB`` if no lower tier holds it."""
        found = [IN_SLAB] * len(keys)
        best_last = sorted(
            range(len(self._lower)), key=lambda tier: (self._health[tier].readable, -tier)
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
        """True if a load should wait for another load's read of this chunk.

        It should not wait if that read is from an unreadable tier while ``source`` is a readable
        tier that holds the chunk as well.
        """
        origin = self.promoting.get(key)
        if origin is None:
            return False
        if self._health[origin].readable:
            return True
        return source == IN_SLAB or not self._health[source].readable

    def _pin(
        self, keys: Sequence[bytes], slots: Sequence[int], tiers: Sequence[int]
    ) -> Sequence[Pins]:
        """Pin every chunk in its tier; returns the pinned keys by tier."""
        pins = []
        for source in set(tiers):
            held = keys if tiers.count(source) == len(tiers) else None
            tier = CPU if source == IN_SLAB else source
            mine = held or list(compress(keys, map(source.__eq__, tiers)))
            (self._cpu if tier == CPU else self._lower[tier]).pin(mine)
            pins.append((tier, mine))
        return pins

    def _promote(self, batches: Sequence[ChunkBatch], tiers: Sequence[int]) -> _Promotion:
        """Reserve slots for chunks of lower tiers, as long as slots are available."""
        if tiers.count(IN_SLAB) == len(tiers):
            return _NOTHING_PROMOTED
        keys: list[bytes] = []
        origins: list[int] = []
        parts: list[Sequence[EntryInfo]] = []
        at = 0
        for batch in batches:
            mine = tiers[at : at + len(batch)]
            at += len(batch)
            below = batch.chosen(list(map(IN_SLAB.__ne__, mine)))
            lower = list(filter(IN_SLAB.__ne__, mine))
            # A request that may not read the CPU tier may need chunks that are in it.
            if not self._cpu.are_absent(below.keys):
                absent = list(map(self._cpu.is_absent, below.keys))
                below, lower = below.chosen(absent), list(compress(lower, absent))
            keys += below.keys
            origins += lower
            parts.append(self._groups[batch.group].entries(below, 1))
        infos = joined(parts)
        grant = self._cpu.reserve(keys, infos, self._cpu.unwritten.evict_for_reads)
        if grant.evicted:
            self._stats.evicted(CPU, grant.evicted)
        slots = dict(zip(keys, grant.locations, strict=False))
        self.begin_promotion(slots, origins)
        return _Promotion(slots, infos[: len(slots)], len(grant.evicted))

    def release(
        self, job: Job, chunks_max: int, filled: Callable[[Sequence[bytes]], None]
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        """The work (cost, call) that remains when every rank has answered a load, in pieces of at
        most ``chunks_max`` chunks. The head of the prefix comes last, both among the pieces and
        within each piece, so that it ends up youngest."""
        good, bad = job.verdict()
        infos = job.infos_of(good)
        if bad:
            self.end_promotions(bad)
        for end in range(len(bad), 0, -chunks_max):
            part = bad[max(0, end - chunks_max) : end]
            yield len(part), partial(self._abort, part, filled)
        for end in range(len(good), 0, -chunks_max):
            first = max(0, end - chunks_max)
            part, known = good[first:end], infos[first:end]
            yield len(part), partial(self._commit, part, known, filled)
        for tier, keys in job.pins:
            index = self._cpu if tier == CPU else self._lower[tier]
            yield len(keys) // 2, partial(index.unpin, keys)

    def _abort(self, keys: Sequence[bytes], filled: Callable[[Sequence[bytes]], None]) -> None:
        self._cpu.abort(keys)
        filled(keys)

    def _commit(
        self,
        keys: Sequence[bytes],
        infos: Sequence[EntryInfo],
        filled: Callable[[Sequence[bytes]], None],
    ) -> None:
        committed = self._cpu.commit(keys, infos)
        self._stats.promoted(committed)
        self._forget_promotions(keys)
        if len(committed) < len(keys):
            self._removals.note(keys)
        filled(keys)

    def begin_promotion(self, keys: Iterable[bytes], tiers: Iterable[int]) -> None:
        """Record that these chunks are being read into the CPU tier, each from its tier."""
        self.promoting.update(zip(keys, tiers, strict=False))  # only the first have slots

    def end_promotions(self, keys: Collection[bytes]) -> None:
        """Let no further load join the reads of these chunks into the CPU tier."""
        self._forget_promotions(keys)
        self._removals.note(keys)  # a lookup may have relied on these chunks

    def _forget_promotions(self, keys: Iterable[bytes]) -> None:
        deque(map(self.promoting.pop, keys, repeat(None)), maxlen=0)

    @staticmethod
    def _count(groups: Sequence[int], tiers: Sequence[int]) -> Mapping[tuple[int, int], int]:
        if len(alone := set(groups)) > 1:
            return Counter(zip(groups, tiers, strict=True))
        return {(g, tier): tiers.count(tier) for g in alone for tier in set(tiers)}

    def tokens(self, counts: Mapping[tuple[int, int], int]) -> dict[int, int]:
        """Tokens by source tier, counted for the group with the most tokens."""
        found: dict[int, dict[int, int]] = {}
        for (group, tier), chunks in counts.items():
            if chunks:
                tokens = chunks * self._groups[group].chunk_tokens
                found.setdefault(group, {})[CPU if tier == IN_SLAB else tier] = tokens
        return max(found.values(), key=lambda by_tier: sum(by_tier.values()), default={})
