"""Loads: where the chunks that a request needs come from, and the way they take.

Part of the planner, on the same thread. Owns the loads that were planned and not sent, the
chunks that are being read into the CPU tier, and the budget of chunks in flight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from itertools import compress, groupby, repeat
from operator import itemgetter

from offload.chunks import GroupInfo, Wanted
from offload.columns import Columns
from offload.gates import TierGate
from offload.index import TierIndex
from offload.keys import group_of
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.plans import IN_SLAB, STAGED, JobResult, LoadItem, LoadJob
from offload.shared import SharedTiers
from offload.stats import PlannerStats
from policies.base import EntryInfo

PROBE_CHUNKS = 64
FAILED_MOST = 256


class LoadPlanner:
    """Plans loads over the CPU tier and the lower tiers.

    ``failed`` are the last loads that failed, with their requests, for whoever explains them;
    ``promoting`` are the chunks that some load is reading into the CPU tier, with its job;
    ``loading`` counts the chunks of all loads that requests wait for and ``holding`` the GPU blocks
    that they fill, at most ``max_chunks`` and ``max_blocks`` but for one load.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupInfo],
        cpu: TierIndex,
        lower: Sequence[TierIndex],
        gates: Sequence[TierGate],
        ledger: Ledger,
        stats: PlannerStats,
        max_chunks: int,
        max_blocks: int,
        shared: SharedTiers,
    ) -> None:
        self.promoting: dict[bytes, int] = {}
        self.loading = self.holding = 0
        self.failed: deque[tuple[str, JobResult]] = deque(maxlen=FAILED_MOST)
        self._gates = tuple(gates)
        self._groups = groups
        self._cpu = cpu
        self._lower = tuple(lower)
        self._ledger = ledger
        self._stats = stats
        self._max_chunks = max_chunks
        self._max_blocks = max_blocks
        self._shared = shared
        self._planned: list[LoadJob] = []
        self._waited_for: dict[str, Job] = {}

    def __len__(self) -> int:
        """Loads that were planned and not sent."""
        return len(self._planned)

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
        if len(asked) < len(self._lower):
            return (self._cpu.resident, *lower)
        return (self._cpu.resident, *lower, self.promoting)

    def take(self) -> tuple[LoadJob, ...]:
        """The loads planned since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def tick(self, now: float) -> None:
        """Time passes: tiers that are shut out may be due for a probe."""
        for tier, gate in enumerate(self._gates):
            if not gate.tick(now):
                continue
            if tier in self._shared.tiers and not gate.reads.closed:
                gate.probe = self._shared.plan_probe(tier, now)
            else:
                gate.probe = self.plan_probe(tier)

    def ended(self, job: Job, now: float) -> None:
        """A load has been answered by every rank."""
        failed = job.answer.failed or bool(job.answer.bad)
        tokens = job.tokens_by_tier or {}
        self._stats.loaded(tokens, failed=failed)
        if failed:
            self.failed.append((job.request, job.answer))
        slowest = max(tokens, default=CPU)
        # The time is the whole load's: it says something of the tier that gave most of it.
        if slowest != CPU and 2 * tokens[slowest] >= sum(tokens.values()):
            if job.answer.late:
                self._gates[slowest].too_late(tokens[slowest], job.answer.seconds, now)
            elif not failed:
                self._gates[slowest].loaded(tokens[slowest], job.answer.seconds, now)
        if self._waited_for.get(job.request) is job:
            self.request_ended(job.request)
        deque(map(self.promoting.pop, job.fills, repeat(None)), maxlen=0)

    def request_ended(self, request: str) -> None:
        """A request does not wait for its load any more. A read that hangs may go on, but it
        holds no GPU block and must not use up the budgets of loads from other tiers."""
        job = self._waited_for.pop(request, None)
        if job is not None:
            self.loading -= job.chunks
            self.holding -= job.holds

    def plan(self, request: str, chunks: Sequence[Wanted]) -> Mapping[int, int]:
        """Plan to restore these chunks for a request.

        What lies in the CPU tier is pinned; what a lower tier holds is read into a slot of the
        CPU tier, or through a staging buffer where no slot is free. A chunk that nobody holds
        (a bug of the caller) makes the load fail, which is a recomputation, never wrong bytes.
        Returns the tokens that come from each tier (``CPU`` or the lower tier's number).
        """
        job = self._ledger.next_id()
        read = chunks[0].origin.controls.read if chunks else None
        keys, groups, blocks = (list(map(itemgetter(field), chunks)) for field in range(3))
        slots, tiers = self._find(keys, read)
        below = list(compress(chunks, map(IN_SLAB.__ne__, tiers)))
        pins = self._pin(keys, slots, tiers)
        promoted = self._reserve_promotions(job, below)
        if below:
            slots = list(map(promoted.get, keys, slots))
        tokens = self._tokens_by_tier(groups, tiers)
        self._stats.planned({tier: count for tier, count in tokens.items() if tier >= CPU})
        opened = Job(
            job,
            JobKind.LOAD,
            fills=tuple(promoted),
            pins=pins,
            request=request,
            chunks=len(chunks),
            holds=sum(map(len, blocks)),
            tokens_by_tier=tokens,
        )
        self._ledger.open(opened)
        columns = Columns(keys, groups, blocks, slots, tiers)
        self._planned.append(LoadJob(job, request, columns))
        self.request_ended(request)
        self._waited_for[request] = opened
        self.loading += opened.chunks
        self.holding += opened.holds
        return tokens

    def _find(
        self, keys: Sequence[bytes], read: frozenset[int] | None
    ) -> tuple[list[int], list[int]]:
        """Slot and tier of each chunk: a slot of the CPU tier and ``IN_SLAB`` if it lies there or
        is on its way there, else ``STAGED`` and the lower tier to read."""
        count = len(keys)
        cpu_counts = read is None or CPU in read
        places = map(self._cpu.resident.get, keys) if cpu_counts else repeat(None, count)
        slots = [STAGED if place is None else place for place in places]
        if STAGED not in slots:
            return slots, [IN_SLAB] * count
        tiers = self._sources(keys, read)
        if slots.count(STAGED) < count or (self.promoting and cpu_counts):
            for at, slot in enumerate(slots):
                if slot != STAGED:
                    tiers[at] = IN_SLAB
                elif self.promoting and cpu_counts and self._joins(keys[at], tiers[at]):
                    slots[at], tiers[at] = self._cpu.place(keys[at]), IN_SLAB
        return slots, tiers

    def _sources(self, keys: Sequence[bytes], read: frozenset[int] | None) -> list[int]:
        """The highest lower tier among ``read`` that holds each key, if possible one that may be
        read now; ``IN_SLAB`` if none does."""
        found = [IN_SLAB] * len(keys)
        best_last = sorted(
            range(len(self._lower)), key=lambda tier: (self._gates[tier].readable, -tier)
        )
        for tier in best_last:
            if read is None or tier in read:
                held = map(self._lower[tier].resident.__contains__, keys)
                found = [tier if here else f for here, f in zip(held, found, strict=True)]
        return found

    def _pin(
        self, keys: Sequence[bytes], slots: Sequence[int], tiers: Sequence[int]
    ) -> tuple[tuple[int, tuple[bytes, ...]], ...]:
        """Keep every chunk where it is until the load has ended; what was pinned, by tier."""
        by_tier: dict[int, Sequence[bytes]] = {
            tier: list(compress(keys, map(tier.__eq__, tiers))) for tier in set(tiers) - {IN_SLAB}
        }
        if IN_SLAB in tiers:
            columns = zip(keys, slots, tiers, strict=True)
            by_tier[CPU] = [k for k, slot, tier in columns if tier == IN_SLAB and slot != STAGED]
        for tier, held in by_tier.items():
            (self._cpu if tier == CPU else self._lower[tier]).pin(held)
        return tuple((tier, tuple(held)) for tier, held in by_tier.items())

    def plan_probe(self, tier: int) -> int | None:
        """Plan to read a few chunks of a lower tier for nobody, to see how that goes. Returns the
        job, or ``None`` if the tier holds nothing."""
        index = self._lower[tier]
        keys = index.some(PROBE_CHUNKS)
        if not keys:
            return None
        job = self._ledger.next_id()
        index.pin(keys)
        tokens = self._tokens_by_tier([group_of(key) for key in keys], [tier] * len(keys))
        pins = ((tier, keys),)
        self._ledger.open(Job(job, JobKind.PROBE, pins=pins, tokens_by_tier=tokens))
        items = tuple(LoadItem(key, group_of(key), (), STAGED, tier) for key in keys)
        self._planned.append(LoadJob(job, "", items))
        return job

    def probed(self, job: Job, now: float) -> None:
        """A probe has been answered by every rank."""
        for tier, keys in job.pins:
            self._lower[tier].unpin(keys)
            gate = self._gates[tier]
            if job.distrusted:  # a reset came between: it says nothing of the tier
                gate.probe = None
                continue
            brought = 0 if job.answer.failed else len(keys) - len(job.answer.bad)
            tokens = (job.tokens_by_tier or {}).get(tier, 0) * brought // len(keys)
            gate.probed(tokens, job.answer.seconds, now, good=brought > 0)

    def plan_failed(self, request: str) -> None:
        """Answer a request that waits for a load with a failure, which vLLM recomputes."""
        job = self._ledger.next_id()
        self._ledger.open(Job(job, JobKind.LOAD, request=request))
        nobody_has_it = LoadItem(b"", 0, (), STAGED, IN_SLAB)
        self._planned.append(LoadJob(job, request, (nobody_has_it,)))

    def can_load(self, chunks: int, blocks: int, low: bool = False) -> bool:
        """Whether the budgets have room for a load of so many chunks into so many GPU blocks: one
        of ``low`` priority may fill them to a half. One load is always allowed, however large."""
        share = 2 if low else 1
        if not self.loading or (
            share * (self.loading + chunks) <= self._max_chunks
            and share * (self.holding + blocks) <= self._max_blocks
        ):
            return True
        self._stats.load_refusals += 1
        return False

    def _joins(self, key: bytes, source: int) -> bool:
        """Whether to wait for the read of another load: not if that may come from a tier that is
        shut out while ``source`` has the chunk too and is not."""
        if key not in self.promoting:
            return False
        if all(gate.readable for gate in self._gates):
            return True
        return source == IN_SLAB or not self._gates[source].readable

    def _reserve_promotions(self, job: int, chunks: Sequence[Wanted]) -> dict[bytes, int]:
        keys = list(map(itemgetter(0), chunks))
        free: Sequence[Wanted] = chunks
        if not self._cpu.are_absent(keys):
            free = [chunk for chunk in chunks if self._cpu.is_absent(chunk.key)]
            keys = list(map(itemgetter(0), free))
        infos: list[EntryInfo] = []
        for group, part in groupby(free, key=itemgetter(1)):
            infos += self._groups[group].entries(list(part), 1)
        grant = self._cpu.reserve(keys, infos)
        self._stats.evicted(CPU, grant.evicted)
        promoted = dict(zip(keys, grant.places, strict=False))
        self.promoting.update(dict.fromkeys(promoted, job))
        return promoted

    def _tokens_by_tier(self, groups: Sequence[int], tiers: Sequence[int]) -> dict[int, int]:
        """Tokens by source tier, counted on the group with the most chunks."""
        counts: dict[int, dict[int, int]] = {}
        if len(alone := set(groups)) == 1:
            (group,) = alone
            counted = {(group, tier): tiers.count(tier) for tier in set(tiers)}
        else:
            counted = Counter(zip(groups, tiers, strict=True))
        for (group, tier), chunks in counted.items():
            tokens = chunks * self._groups[group].chunk_tokens
            counts.setdefault(group, {})[CPU if tier == IN_SLAB else tier] = tokens
        return max(counts.values(), key=lambda by_tier: sum(by_tier.values()), default={})
