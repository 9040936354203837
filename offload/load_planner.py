"""Loads: where the chunks that a request needs come from, and the way they take.

Part of the planner, on the same thread. Owns the loads that were planned and not sent, the
chunks that are being read into the CPU tier, and the budget of chunks in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence

from offload.chunks import GroupInfo, Wanted
from offload.gates import TierGate
from offload.index import TierIndex
from offload.keys import group_of
from offload.ledger import CPU, Job, JobKind, Ledger
from offload.plans import IN_SLAB, STAGED, JobResult, LoadItem, LoadJob
from offload.stats import PlannerStats

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
            if gate.tick(now):
                gate.probe = self.plan_probe(tier)

    def ended(self, job: Job, now: float) -> None:
        """A load has been answered by every rank."""
        failed = job.answer.failed or bool(job.answer.bad)
        tokens = job.tokens_by_tier or {}
        self._stats.loaded(tokens, failed=failed)
        if failed:
            self.failed.append((job.request, job.answer))
        slowest = max(tokens, default=CPU)
        if slowest != CPU and not failed:
            self._gates[slowest].loaded(tokens[slowest], job.answer.seconds, now)
        if self._waited_for.get(job.request) is job:
            self.request_ended(job.request)
        for key in job.fills:
            self.promoting.pop(key, None)

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
        in_slab, below = self._split(chunks, read)
        self._cpu.pin([chunk.key for chunk in in_slab])
        sources = {chunk.key: self._source(chunk.key, read) for chunk in below}
        promoted = self._reserve_promotions(job, [c for c in below if sources[c.key] >= 0])
        items = tuple(self._load_item(chunk, sources, promoted) for chunk in chunks)
        pins: list[tuple[int, tuple[bytes, ...]]] = [(CPU, tuple(c.key for c in in_slab))]
        for tier, index in enumerate(self._lower):
            keys = tuple(key for key, source in sources.items() if source == tier)
            index.pin(keys)
            pins.append((tier, keys))
        tokens = self._tokens_by_tier(chunks, sources)
        self._stats.planned({tier: count for tier, count in tokens.items() if tier >= CPU})
        opened = Job(
            job,
            JobKind.LOAD,
            fills=tuple(promoted),
            pins=tuple(pins),
            request=request,
            chunks=len(chunks),
            holds=sum(len(chunk.blocks) for chunk in chunks),
            tokens_by_tier=tokens,
        )
        self._ledger.open(opened)
        self._planned.append(LoadJob(job, request, items))
        self.request_ended(request)
        self._waited_for[request] = opened
        self.loading += opened.chunks
        self.holding += opened.holds
        return tokens

    def plan_probe(self, tier: int) -> int | None:
        """Plan to read a few chunks of a lower tier for nobody, to see how that goes. Returns the
        job, or ``None`` if the tier holds nothing."""
        index = self._lower[tier]
        keys = index.some(PROBE_CHUNKS)
        if not keys:
            return None
        job = self._ledger.next_id()
        index.pin(keys)
        tokens = sum(self._groups[group_of(key)].chunk_tokens for key in keys)
        pins = ((tier, keys),)
        self._ledger.open(Job(job, JobKind.PROBE, pins=pins, tokens_by_tier={tier: tokens}))
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

    def _split(
        self, chunks: Sequence[Wanted], read: frozenset[int] | None
    ) -> tuple[list[Wanted], list[Wanted]]:
        if read is not None and CPU not in read:
            return [], list(chunks)
        in_slab: list[Wanted] = []
        below: list[Wanted] = []
        for chunk in chunks:
            here = chunk.key in self._cpu or self._joins(chunk.key, read)
            (in_slab if here else below).append(chunk)
        return in_slab, below

    def _joins(self, key: bytes, read: frozenset[int] | None) -> bool:
        """Whether to wait for the read of another load: not if that may come from a tier that is
        shut out while another one has the chunk."""
        if key not in self.promoting:
            return False
        if all(gate.readable for gate in self._gates):
            return True
        source = self._source(key, read)
        return source == IN_SLAB or not self._gates[source].readable

    def _source(self, key: bytes, read: frozenset[int] | None) -> int:
        """The highest lower tier among ``read`` that holds the key, if possible one that may be
        read now; ``IN_SLAB`` if none does."""
        found = IN_SLAB
        for tier, (index, gate) in enumerate(zip(self._lower, self._gates, strict=True)):
            if key in index and (read is None or tier in read):
                if gate.readable:
                    return tier
                found = tier if found == IN_SLAB else found
        return found

    def _reserve_promotions(self, job: int, chunks: Sequence[Wanted]) -> dict[bytes, int]:
        free = [chunk for chunk in chunks if self._cpu.is_absent(chunk.key)]
        keys = [chunk.key for chunk in free]
        infos = [self._groups[c.group].entry(c, 1) for c in free]
        grant = self._cpu.reserve(keys, infos)
        self._stats.evicted(CPU, grant.evicted)
        promoted = dict(zip(keys, grant.places, strict=False))
        for key in promoted:
            self.promoting[key] = job
        return promoted

    def _load_item(
        self, chunk: Wanted, sources: Mapping[bytes, int], promoted: Mapping[bytes, int]
    ) -> LoadItem:
        tier = sources.get(chunk.key)
        if tier is None:
            return LoadItem(
                chunk.key, chunk.group, chunk.blocks, self._cpu.place(chunk.key), IN_SLAB
            )
        slot = promoted.get(chunk.key, STAGED)
        return LoadItem(chunk.key, chunk.group, chunk.blocks, slot, tier)

    def _tokens_by_tier(
        self, chunks: Sequence[Wanted], sources: Mapping[bytes, int]
    ) -> dict[int, int]:
        """Tokens by source tier, counted on the group with the most chunks."""
        counts: dict[int, dict[int, int]] = {}
        for chunk in chunks:
            by_tier = counts.setdefault(chunk.group, {})
            tier = sources.get(chunk.key, CPU)
            by_tier[tier] = by_tier.get(tier, 0) + self._groups[chunk.group].chunk_tokens
        return max(counts.values(), key=lambda by_tier: sum(by_tier.values()), default={})
