"""The scheduler of a simulated world: requests, their GPU blocks, and the plan of each step.

It does what the connector does inside vLLM, in the same order: admit and plan loads, fence,
compute, plan stores, send; then process the ranks' answers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from offload.index.chunk_batch import ChunkBatch
from offload.layout.keys import CPU
from offload.messages.plan import StepPlan
from offload.messages.report import StepReport
from offload.planner.look_ahead.read_waits import TOTAL_S, Action, BlockDemand
from offload.requests.lookup_cache import PartialLookup
from tests.sim.content import (
    BLOCKS_PER_POSITION,
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    LAYERS,
    key_of,
)
from tests.sim.rank import Rank
from tests.sim.server import Server, Setup

GROUPS = tuple(LAYERS)


@dataclass(eq=False)
class Request:
    """A chain of prefixes to compute, and the progress of its computation. ``epochs`` are the
    epochs of the weights with which each position was computed; ``place`` orders the waiting
    requests."""

    name: str
    chain: list[bytes]
    blocks: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))
    hit: int = 0
    planned_at: float = 0.0
    planned_under: int = 0
    planned_in: int = 0
    must_fail: bool = False
    loading: bool = False
    aborted: bool = False
    failed: bool = False
    stale: bool = False
    decodes: int = 0
    waits_since: float | None = None
    place: int = 0
    was_next: bool = False
    known: PartialLookup = field(default_factory=PartialLookup)


class Engine(Server):
    """Requests over a server."""

    def __init__(self, seed: int, setup: Setup | None = None) -> None:
        super().__init__(seed, setup)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}

    # -- requests ----------------------------------------------------------------------------

    def _arrive(self, chain: list[bytes]) -> None:
        self._names += 1
        request = Request(f"r{self._names}", chain, place=self._names)
        self.waiting.append(request)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        """Report to look-ahead, perhaps repeatedly, all that a waiting request may load."""
        chain = request.chain[:-1]
        if chain and not request.failed and self.planner.look_ahead.is_on:
            batches = [self._keys_wanted(chain, group) for group in GROUPS]
            self.planner.look_ahead.enter(request.name, (request.place,), batches)

    def _enter_again(self) -> None:
        """Look again at the chunks of the requests that have come to the front of the queue."""
        for request in self.waiting[:2]:
            if not request.was_next:
                request.was_next = True
                self._enter(request)

    def _keys_wanted(self, chain: list[bytes], group: int) -> ChunkBatch:
        keys = [key_of(prefix, group) for prefix in chain]
        depths = range(CHUNK_TOKENS, (len(chain) + 1) * CHUNK_TOKENS, CHUNK_TOKENS)
        return ChunkBatch(keys, group, (), depths)

    def _give_back(self, request: Request) -> None:
        given = [b for at in request.blocks for blocks in at.values() for b in blocks]
        request.blocks, request.epochs = [], []
        request.stored = dict.fromkeys(GROUPS, 0)
        # Freed blocks are reused soon, because races occur there.
        self.free += given
        if self.rng.random() < 0.3:
            self.rng.shuffle(self.free)

    # -- a scheduler step --------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit requests as vLLM does: requests that wait for their reads keep their position, and
        requests behind them are admitted."""
        skipped: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if len(request.chain) * BLOCKS_PER_POSITION > len(self.free):
                break
            answer = self._ask_waits(request, len(skipped))
            if answer is Action.WAIT:
                skipped.append(self.waiting.pop(0))
                continue
            above = None if answer is Action.BEGIN else CPU
            hit = 0 if request.failed else self._lookup(request, above)
            if hit is None:
                break
            self.waiting.pop(0)
            self._allocate(request)
            load: list[ChunkBatch] = []
            if hit:
                load = self._load(request, hit)
            else:
                request.failed = False
                self.running.append(request)
            self._leave(request, load)
        self.waiting[:0] = skipped

    def _leave(self, request: Request, load: Sequence[ChunkBatch] = ()) -> None:
        self.planner.read_waits.leave(request.name, self.now())
        self.planner.look_ahead.leave(request.name, load)

    def _ask_waits(self, request: Request, skipped: int) -> Action:
        if request.failed or not self.planner.read_waits.is_on:
            return Action.BEGIN
        now, needed = self.now(), len(request.chain) * BLOCKS_PER_POSITION
        blocks = BlockDemand(len(self.free), needed, skipped + len(self.waiting) - 1)
        answer = self.planner.read_waits.decide(request.name, now, blocks, lambda: 0)
        if answer is Action.WAIT:
            request.waits_since = now if request.waits_since is None else request.waits_since
            assert now - request.waits_since < TOTAL_S, f"{request.name} starves"
        elif request.waits_since is not None:
            self.events[f"waited: {answer.value}"] += 1
        return answer

    def _lookup(self, request: Request, above: int | None = None) -> int | None:
        """The number of positions that all groups can load from some tier (``above``: see
        ``LoadSources.holders``); the last position is always computed. ``None``: the lookup did not
        finish in this step."""
        holders = self.planner.sources.holders(None, above)
        hit = 0
        for prefix in request.chain[:-1]:
            keys = [key_of(prefix, group) for group in GROUPS]
            if not all(any(key in holder for holder in holders) for key in keys):
                break
            hit += 1
        remembered = self._remembered(request, above)
        if remembered is None:
            self.events["looked up in part"] += 1
            return None
        assert remembered == hit, f"{request.name}: {remembered} remembered, {hit} there"
        if hit and not self.planner.loads.can_load(len(GROUPS) * hit, BLOCKS_PER_POSITION * hit):
            self.events["refused"] += 1
            return 0
        return hit

    def _remembered(self, request: Request, above: int | None) -> int | None:
        """The same, from the results of earlier steps and the allowance of this one."""
        request.known.begin()
        planner = self.planner
        first_gap = request.known.first_gap_in(
            above,
            planner.sources.holders(None, above),
            planner.removals,
            planner.budget.lookups,
        )
        end = len(request.chain) - 1
        keys = {g: [key_of(prefix, g) for prefix in request.chain[:end]] for g in GROUPS}
        hit = min(first_gap(group, keys[group], 0, end) for group in GROUPS)
        return None if request.known.is_partial else hit

    def _allocate(self, request: Request) -> None:
        for _ in request.chain:
            taken = {g: tuple(self.free.pop() for _ in range(CHUNK_BLOCKS[g])) for g in GROUPS}
            request.blocks.append(taken)
        self.planner.stores.fence([b for at in request.blocks for bs in at.values() for b in bs])
        request.decodes = self.rng.randrange(4)

    def _wanted(self, request: Request, group: int, start: int, end: int) -> ChunkBatch:
        blocks = [block for at in range(start, end) for block in request.blocks[at][group]]
        keys = [key_of(prefix, group) for prefix in request.chain[start:end]]
        depths = range((start + 1) * CHUNK_TOKENS, (end + 1) * CHUNK_TOKENS, CHUNK_TOKENS)
        return ChunkBatch(keys, group, blocks, depths)

    def _load(self, request: Request, hit: int) -> list[ChunkBatch]:
        runs = [self._wanted(request, group, 0, hit) for group in GROUPS]
        for tier, tokens in self.planner.loads.plan(request.name, runs).by_tier.items():
            self.hits[tier] += tokens // CHUNK_TOKENS
        self.planner.recency.note_everywhere([key for run in runs for key in run.keys])
        request.hit, request.loading = hit, True
        request.planned_at, request.planned_under = self.now(), self.epoch
        request.planned_in = self.steps
        self.loading[request.name] = request
        return runs

    def _schedule(self) -> list[tuple[Request, int, int]]:
        """Choose the positions that the step's forward pass computes."""
        passes = []
        for request in self.running:
            done = len(request.epochs)
            end = min(len(request.chain), done + self.rng.randint(1, 4))
            if end > done:
                passes.append((request, done, end))
                request.epochs += [self.epoch] * (end - done)
                self.planner.health.computed((end - done) * CHUNK_TOKENS, 0.02 * (end - done))
        return passes

    def _store(self) -> None:
        for request in self.running:
            if request.stale:
                continue
            for group in GROUPS:
                start, end = request.stored[group], len(request.epochs)
                if start < end:
                    run = self._wanted(request, group, start, end)
                    request.stored[group] += self.planner.stores.plan(run)

    async def _send(self, plan: StepPlan, passes: list[tuple[Request, int, int]]) -> None:
        """Fence, launch the forward pass, and post the plan: on every rank, as the connector
        does."""
        patient = self.rng.random() < self.setup.patience
        for rank in self.ranks:
            await rank.fence(plan, patient)
        computed = [
            (key_of(request.chain[at], group), group, request.blocks[at][group], self.epoch)
            for request, start, end in passes
            for at in range(start, end)
            for group in GROUPS
        ]
        reads = [request for request, _, _ in passes if self.rng.random() < 0.3]
        sent = pickle.dumps(plan)  # pickled, as between processes
        for rank in self.ranks:
            if computed:
                rank.forward(computed, self._reader(rank, reads))
            if plan.reset:
                self._cut_loads(rank)
            rank.executor.post(pickle.loads(sent))

    def _cut_loads(self, rank: Rank) -> None:
        """A load that has not ended on a rank when the reset reaches it must fail."""
        open_loads = rank.executor._open.by_job
        ended = {open_loads[job].request for job, _ in rank.executor._ended if job in open_loads}
        ended |= set(rank.finished)
        for request in self.loading.values():
            if request.planned_under < self.epoch and request.name not in ended:
                request.must_fail = True

    def _reader(self, rank: Rank, requests: Sequence[Request]) -> Callable[[], None]:
        """A forward pass reads every page of its requests, at whatever time it runs."""
        pages = [
            (key_of(request.chain[at], group), group, request.blocks[at][group], epoch)
            for request in requests
            for at, epoch in enumerate(request.epochs)
            for group in GROUPS
        ]

        def check() -> None:
            for key, group, blocks, epoch in pages:
                wrong = rank.wrong_pages(key, group, blocks, epoch)
                if wrong:
                    self.wrong.append(f"a forward pass reads {wrong} of {key.hex()}")
            self.checked += len(pages)

        return check

    # -- reports of the ranks ------------------------------------------------------------------

    def _take_in(self) -> None:
        report = StepReport()
        for rank in self.ranks:
            report = report.merge(rank.drain().report)
        done = [n for n in self.loading if all(n in rank.finished for rank in self.ranks)]
        for name in done:
            failed = _any_of(rank.finished.pop(name) for rank in self.ranks)
            self.planner.loads.request_ended(name)
            self._loaded(self.loading.pop(name), failed)
        if not report.empty:
            self.planner.tick(self.now())
            self.planner.complete(report)

    def _loaded(self, request: Request, failed: bool) -> None:
        request.loading = False
        self.events["load failed" if failed else "loaded"] += 1
        if request.aborted:
            self._give_back(request)
            return
        if failed:
            request.failed = True
            request.must_fail = False
            self._give_back(request)
            self.waiting.insert(0, request)
            return
        assert not request.must_fail, f"{request.name} was given chunks of old weights"
        request.epochs = [request.planned_under] * request.hit
        request.stored = dict.fromkeys(GROUPS, request.hit)
        for rank in self.ranks:
            for at in range(request.hit):
                for group in GROUPS:
                    key, blocks = key_of(request.chain[at], group), request.blocks[at][group]
                    wrong = rank.wrong_pages(key, group, blocks, request.planned_under)
                    assert not wrong, f"{request.name} was given {wrong} of {key.hex()}"
                    self.checked += 1
        self.running.append(request)

    def _finish_some(self) -> None:
        for request in list(self.running):
            if len(request.epochs) == len(request.chain):
                request.decodes -= 1
                if request.decodes < 0:
                    self.running.remove(request)
                    self._give_back(request)
                    self.events["finished"] += 1


def _any_of(answers: Iterable[bool]) -> bool:
    """``any`` without short-circuiting."""
    return sum(answers) > 0
