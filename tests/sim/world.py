"""The simulated world: a scheduler with requests over the real planner, and ranks with the real
executor, real tiers and a simulated GPU, all in virtual time and all from one seed.

Requests share prefixes (a tree); they are preempted, aborted and retried; the weights change; the
server restarts; every rank's tiers have their own weather. A page's content is a function of its
key, the weights' epoch, the rank and the layer, so every page that a request was given is compared
byte for byte, when it was loaded and when the forward pass reads it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from offload.chunks import Wanted
from offload.demotion import DemotionQueue
from offload.gates import GateLimits, Gates
from offload.index import TierIndex
from offload.keys import group_of
from offload.ledger import JobKind
from offload.planner import Planner
from offload.plans import StepPlan, StepReport
from offload.space import ByteSpace, SlotSpace
from policies.base import EntryInfo
from policies.lru import LruPolicy
from tests.sim.content import (
    BLOCKS_PER_POSITION,
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    LAYERS,
    SLOT_BYTES,
    group_infos,
    key_of,
    node,
)
from tests.sim.rank import FENCE_S, LIMITS, STAGING, Rank
from tests.sim.virtual_time import VirtualLoop, run_virtually
from tests.sim.weather import Sky, Weather
from tiers.base import Tier
from tiers.memory_tier import MemoryTier

FAILURES = 3
GROUPS = tuple(LAYERS)
LATE_S = 1.0
"""What a load may take beyond its deadline: the copies that had begun."""
HOPELESS_S = (FAILURES + 2) * LIMITS.tier_timeout_s
"""After hanging for so long a tier's breaker must have opened."""


@dataclass(frozen=True)
class Setup:
    """The size of a world and how hard its life is."""

    ranks: int = 2
    slots: int = 12
    disk_chunks: int = 48
    tiers: int = 1
    blocks: int = 90
    trouble: float = 0.02
    copy_failures: float = 0.0
    patience: float = 0.9
    lying: bool = False

    @classmethod
    def drawn(cls, rng: random.Random) -> Setup:
        """A world of random size."""
        return cls(
            ranks=rng.choice((1, 2, 2, 3)),
            slots=rng.choice((6, 12, 24)),
            disk_chunks=rng.choice((24, 48, 120)),
            tiers=rng.choice((1, 1, 2)),
            blocks=rng.choice((60, 90, 150)),
            trouble=rng.choice((0.0, 0.03, 0.08)),
            copy_failures=rng.choice((0.0, 0.0, 0.02)),
        )


@dataclass(eq=False)
class Request:
    """A chain of prefixes to compute, and how far it is. ``epochs`` are the weights under which
    the content of each position was made."""

    name: str
    chain: list[bytes]
    blocks: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))
    hit: int = 0
    planned_at: float = 0.0
    planned_under: int = 0
    must_fail: bool = False
    loading: bool = False
    aborted: bool = False
    failed: bool = False
    stale: bool = False
    decodes: int = 0


class Medium(Tier):
    """What outlives the process."""

    @property
    def epoch(self) -> int:
        """Of its records."""
        raise NotImplementedError


class KeptMedium(MemoryTier, Medium):
    """A disk in memory."""

    async def aclose(self) -> None:
        self._open = False


class World:
    """See the module. ``run`` lives through so many steps, comes to rest and audits what is left.
    ``hits`` counts restored chunks by where they came from, ``events`` what happened."""

    def __init__(self, seed: int, setup: Setup | None = None) -> None:
        self.rng = random.Random(seed)
        self.setup = setup or Setup.drawn(self.rng)
        self.events: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.checked = self.steps = self.turns = self.epoch = self._names = 0
        self.now: Callable[[], float] = lambda: 0.0
        self.weathers: list[list[Weather]] = []
        self.media: list[list[Medium]] = []
        self.ranks: list[Rank] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.free: list[int] = []
        self.met: Counter[Sky] = Counter()
        self.wrong: list[str] = []
        self._unforgotten = False

    async def run(self, steps: int) -> int:
        """A whole life; returns how often the loop has turned."""
        await self._begin()
        for _ in range(steps):
            await self._chance()
            await self.step()
        await self.rest()
        await self.audit()
        await self._end(2.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.turns

    # -- the server's life -------------------------------------------------------------------

    def _make_medium(self, rank: int, tier: int) -> Medium:
        capacity = self.setup.disk_chunks * (tier + 1) * SLOT_BYTES
        return KeptMedium(capacity, namespace=bytes(16), rank=rank)

    async def _begin(self) -> None:
        self.now = asyncio.get_running_loop().time
        for rank in range(self.setup.ranks):
            self.media.append([self._make_medium(rank, t) for t in range(self.setup.tiers)])
            self.weathers.append([Weather(self.rng) for _ in range(self.setup.tiers)])
        await self._start()

    async def _start(self) -> None:
        """Start the workers, and a planner from what all of them hold."""
        setup = self.setup
        self.ranks = [
            await Rank.start(
                number,
                self.rng,
                self.media[number],
                self.weathers[number],
                slots=setup.slots,
                blocks=setup.blocks,
                copy_failures=setup.copy_failures,
                lying=setup.lying,
            )
            for number in range(setup.ranks)
        ]
        self.free = list(range(1, setup.blocks))
        self.rng.shuffle(self.free)
        cpu = TierIndex("cpu", SlotSpace(setup.slots, STAGING), LruPolicy())
        lower = [
            TierIndex(
                f"disk{t}",
                ByteSpace(setup.disk_chunks * (t + 1) * SLOT_BYTES),
                LruPolicy(),
                low_watermark=0.9,
            )
            for t in range(setup.tiers)
        ]
        gates = Gates([index.name for index in lower], GateLimits(FAILURES))
        self.queues = [
            DemotionQueue(t, i, gate=gates.tiers[t], max_waiting=setup.slots * 3 // 4, batch=4)
            for t, i in enumerate(lower)
        ]
        self.max_store, self.max_load = setup.slots, 2 * setup.slots
        self.planner = Planner(
            group_infos(setup.tiers),
            cpu,
            lower,
            ranks=setup.ranks,
            max_store_chunks=self.max_store,
            max_load_chunks=self.max_load,
            max_load_blocks=setup.blocks // 2,
            gates=gates,
            demotions=self.queues,
        )
        for tier in range(setup.tiers):
            await self._recover(tier)

    async def _recover(self, tier: int) -> None:
        for rank in self.ranks:
            await self._open_under_epoch(rank, tier)
        held = [await _keys(rank.tiers[tier]) for rank in self.ranks]
        everywhere = set(held[0]).intersection(*held)
        keys = [key for key in held[0] if key in everywhere]
        infos = [EntryInfo(group_of(key), size_bytes=SLOT_BYTES) for key in keys]
        rejected = self.planner.lower[tier].recover(keys, infos)
        known = set().union(*held)
        self.planner.delete(tier, [*sorted(known - set(keys)), *rejected])
        self.events["recovered"] += len(keys) - len(rejected)

    async def _open_under_epoch(self, rank: Rank, tier: int) -> None:
        """A tier that is opened under a later epoch than its own forgets what it holds."""
        medium = self.media[rank.number][tier]
        if medium.epoch < self.epoch:
            await medium.reset(self.epoch)

    async def _end(self, timeout_s: float) -> None:
        for rank in self.ranks:
            await rank.stop(timeout_s)
            rank.slab.close()
        for weathers in self.weathers:
            for weather in weathers:
                self.met += weather.met
                weather.met.clear()

    async def _restart(self) -> None:
        """The server dies, in order or not, and comes up again; clients ask again."""
        self._clear_skies()
        await self._end(self.rng.choice((0.0, 0.01, 2.0)))
        again = [r for r in (*self.waiting, *self.running, *self.loading.values()) if not r.aborted]
        self.waiting, self.running, self.loading = [], [], {}
        self._unforgotten = False
        await self._start()
        for request in again:
            self._arrive(request.chain)
        self.events["restart"] += 1

    # -- what happens by chance --------------------------------------------------------------

    async def _chance(self) -> None:
        rng = self.rng
        if len(self.waiting) < 4 and rng.random() < 0.35:
            self._arrive(self._some_chain())
        if self.running and rng.random() < 0.02:
            self._preempt(rng.choice(self.running))
        if rng.random() < 0.02:
            self._abort(rng.choice([*self.waiting, *self.running, *self.loading.values(), None]))
        if rng.random() < 0.005:
            self._new_weights()
        elif self._unforgotten and rng.random() < 0.3:
            self._unforgotten = False
            self.planner.begin_epochs((self.epoch,) * self.setup.tiers)
        if rng.random() < 0.003:
            await self._restart()
        if rng.random() < self.setup.trouble:
            weather = rng.choice(rng.choice(self.weathers))
            weather.change(rng.choice([*Sky, Sky.HANGING]), self.now())
        elif rng.random() < self.setup.trouble / 2:
            rng.choice(rng.choice(self.weathers)).change(Sky.CALM, self.now())

    def _some_chain(self) -> list[bytes]:
        """A path in the tree of prefixes: few branches near the root, a tail of its own."""
        chain, at = [], b"root"
        for depth in range(self.rng.randint(1, 10)):
            branch = self.rng.randrange(2 if depth < 6 else 50)
            at = node(at, 0 if self.rng.random() < 0.5 else branch)
            chain.append(at)
        return chain

    def _arrive(self, chain: list[bytes]) -> None:
        self._names += 1
        self.waiting.append(Request(f"r{self._names}", chain))

    def _give_back(self, request: Request) -> None:
        given = [b for at in request.blocks for blocks in at.values() for b in blocks]
        request.blocks, request.epochs = [], []
        request.stored = dict.fromkeys(GROUPS, 0)
        # Freed blocks are soon used again: that is where races are.
        self.free += given
        if self.rng.random() < 0.3:
            self.rng.shuffle(self.free)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.stale = False
        self.waiting.insert(0, request)
        self.events["preempted"] += 1

    def _abort(self, request: Request | None) -> None:
        if request is None:
            return
        self.events["aborted"] += 1
        if request.loading:
            request.aborted = True  # its blocks are held until every rank has let go of them
            return
        (self.waiting if request in self.waiting else self.running).remove(request)
        self._give_back(request)

    def _new_weights(self) -> None:
        """What was computed so far may never be restored again."""
        self.epoch += 1
        self.events["reset"] += 1
        for request in (*self.running, *self.loading.values()):
            request.stale = True
        if self.rng.random() < 0.5:
            self.planner.reset((self.epoch,) * self.setup.tiers)
            self._unforgotten = False
        else:
            self.planner.forget_all()
            self._unforgotten = True

    def _clear_skies(self) -> None:
        for weathers in self.weathers:
            for weather in weathers:
                weather.change(Sky.CALM, self.now())

    # -- a scheduler step --------------------------------------------------------------------

    async def step(self) -> None:
        """Admit, compute, store, send a plan to every rank; let time pass; take in the answers."""
        self.steps += 1
        self._admit()
        passes = self._schedule()
        self.planner.tick(self.now())
        self._store()
        plan = self.planner.step()
        self._check_plan(plan)
        await self._send(plan, passes)
        await asyncio.sleep(self._pause())
        self._take_in()
        self._finish_some()
        self._check()

    def _pause(self) -> float:
        """Mostly milliseconds; sometimes long enough for deadlines and breakers."""
        kind = self.rng.random()
        most_s = 0.02 if kind < 0.82 else 0.5 if kind < 0.92 else 4.0 if kind < 0.985 else 20.0
        return self.rng.random() * most_s

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if len(request.chain) * BLOCKS_PER_POSITION > len(self.free):
                return
            hit = 0 if request.failed else self._lookup(request)
            self.waiting.pop(0)
            self._allocate(request)
            if hit:
                self._load(request, hit)
            else:
                request.failed = False
                self.running.append(request)

    def _lookup(self, request: Request) -> int:
        """Positions that all groups can get from some tier; the last one is always computed."""
        present = self.planner.present
        hit = 0
        for prefix in request.chain[:-1]:
            if not all(present(key_of(prefix, group)) for group in GROUPS):
                break
            hit += 1
        if hit and not self.planner.can_load(len(GROUPS) * hit, BLOCKS_PER_POSITION * hit):
            self.events["refused"] += 1
            return 0
        return hit

    def _allocate(self, request: Request) -> None:
        for _ in request.chain:
            taken = {g: tuple(self.free.pop() for _ in range(CHUNK_BLOCKS[g])) for g in GROUPS}
            request.blocks.append(taken)
        self.planner.fence([b for at in request.blocks for bs in at.values() for b in bs])
        request.decodes = self.rng.randrange(4)

    def _wanted(self, request: Request, group: int, start: int, end: int) -> list[Wanted]:
        return [
            Wanted(
                key_of(request.chain[at], group),
                group,
                request.blocks[at][group],
                (at + 1) * CHUNK_TOKENS,
            )
            for at in range(start, end)
        ]

    def _load(self, request: Request, hit: int) -> None:
        chunks = [c for group in GROUPS for c in self._wanted(request, group, 0, hit)]
        for tier, tokens in self.planner.plan_load(request.name, chunks).items():
            self.hits[tier] += tokens // CHUNK_TOKENS
        self.planner.touch([c.key for c in chunks])
        request.hit, request.loading = hit, True
        request.planned_at, request.planned_under = self.now(), self.epoch
        self.loading[request.name] = request

    def _schedule(self) -> list[tuple[Request, int, int]]:
        """Which positions the step's forward pass computes."""
        passes = []
        for request in self.running:
            done = len(request.epochs)
            end = min(len(request.chain), done + self.rng.randint(1, 4))
            if end > done:
                passes.append((request, done, end))
                request.epochs += [self.epoch] * (end - done)
                self.planner.computed((end - done) * CHUNK_TOKENS, 0.02 * (end - done))
        return passes

    def _store(self) -> None:
        for request in self.running:
            if request.stale:
                continue
            for group in GROUPS:
                start, end = request.stored[group], len(request.epochs)
                if start < end:
                    chunks = self._wanted(request, group, start, end)
                    request.stored[group] += self.planner.plan_store(chunks)

    async def _send(self, plan: StepPlan, passes: list[tuple[Request, int, int]]) -> None:
        """Fence, launch the forward pass, post: on every rank, as the connector does."""
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
        for rank in self.ranks:
            if computed:
                rank.forward(computed, self._reader(rank, reads))
            if plan.reset:
                self._cut_loads(rank)
            rank.executor.post(plan)

    def _cut_loads(self, rank: Rank) -> None:
        """A load that has not ended on a rank when the reset reaches it must fail."""
        ended = {request for request, _ in rank.executor._ended} | set(rank.finished)
        for request in self.loading.values():
            if request.planned_under < self.epoch and request.name not in ended:
                request.must_fail = True

    def _reader(self, rank: Rank, requests: Sequence[Request]) -> Callable[[], None]:
        """A forward pass reads every page of its requests, whenever it runs."""
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

    # -- what the ranks say ------------------------------------------------------------------

    def _take_in(self) -> None:
        report = StepReport()
        for rank in self.ranks:
            report = report.merge(rank.drain().report)
        done = [n for n in self.loading if all(n in rank.finished for rank in self.ranks)]
        for name in done:
            failed = _any_of(rank.finished.pop(name) for rank in self.ranks)
            self.planner.request_ended(name)
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

    # -- what must hold ----------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        """A tier that is shut out costs nothing but probes."""
        gates = self.planner.gates.tiers
        for load in plan.loads:
            for item in load.items:
                shut = item.tier >= 0 and not gates[item.tier].readable
                assert not (load.request and shut), f"{load} asks a tier that is shut out"
        for demote in plan.demotes:
            assert gates[demote.tier].writable, f"{demote} goes to a tier that is shut out"
        probes = Counter(load.items[0].tier for load in plan.loads if not load.request)
        assert all(count == 1 for count in probes.values()), f"probes {probes} in one step"
        self.events["probes"] += len(probes)

    def _check(self) -> None:
        planner, now = self.planner, self.now()
        planner.check()
        assert not self.wrong, self.wrong[0]
        for request in self.loading.values():
            age = now - request.planned_at
            limit = LIMITS.load_timeout_s + LATE_S + FENCE_S * len(self.ranks)
            assert age < limit, f"{request.name} has waited {age:.1f} s for its load"
        loads = list(self.loading.values())
        chunks = sum(len(GROUPS) * r.hit for r in loads)
        blocks = sum(BLOCKS_PER_POSITION * r.hit for r in loads)
        if len(loads) > 1:
            assert chunks <= self.max_load, f"{chunks} chunks in flight to requests"
            assert blocks <= self.setup.blocks // 2, f"{blocks} GPU blocks held by loads"
        assert planner._storing <= self.max_store
        probes = planner._ledger.count(JobKind.PROBE)
        assert probes <= len(planner.lower), f"{probes} probes at a time"
        for queue in self.queues:
            assert len(queue) <= self.setup.slots * 3 // 4, f"{len(queue)} chunks wait for a tier"
        for rank in self.ranks:
            assert not rank.executor.degraded, rank.executor.degraded
            for tier, delayed in enumerate(rank.delayed):
                self._check_breaker(rank.number, tier, delayed.begun)

    def _check_breaker(self, rank: int, tier: int, begun: dict[str, list[float]]) -> None:
        weather, gate = self.weathers[rank][tier], self.planner.gates.tiers[tier]
        if weather.sky is not Sky.HANGING or self.now() - weather.since < HOPELESS_S:
            return
        for method, breaker in (("read", gate.reads), ("write", gate.writes)):
            if any(self.now() - at > HOPELESS_S for at in begun[method]):
                self.events[f"{method} hung"] += 1
                assert not breaker.closed, f"{gate.name} hangs on rank {rank} and is used"

    # -- the end -----------------------------------------------------------------------------

    async def rest(self, seconds: float = 600.0) -> None:
        """Fair weather and new requests now and then: everything ends, every breaker closes."""
        self._clear_skies()
        if self._unforgotten:
            self._unforgotten = False
            self.planner.begin_epochs((self.epoch,) * self.setup.tiers)
        until = self.now() + seconds
        for _ in range(3):  # something to write, so that what had failed is made good
            self._names += 1
            self._arrive([node(b"last", self._names)])
        while self._in_trouble() or self.waiting or self.running or self.loading:
            assert self.now() < until, f"no rest: {self._why_busy()}"
            if self._in_trouble() and not self.waiting:
                self._arrive(self._some_chain())
            await self.step()
        while self.planner.busy or not all(rank.device.idle for rank in self.ranks):
            assert self.now() < until, f"no rest: {self._why_busy()}"
            await self.step()

    def _in_trouble(self) -> bool:
        return any(
            not gate.writes.closed or (len(index) > 0 and not gate.reads.closed)
            for gate, index in zip(self.planner.gates.tiers, self.planner.lower, strict=True)
        )

    def _why_busy(self) -> str:
        gates = [(g.reads.state, g.writes.state, g.probe) for g in self.planner.gates.tiers]
        jobs = self.planner._ledger.jobs()
        queues = len(self.waiting), len(self.running), list(self.loading)
        return f"gates {gates}, requests {queues}, jobs {jobs[:5]}"

    async def audit(self) -> None:
        """Nothing is left over, and whatever is kept is right, byte for byte, on every rank."""
        await asyncio.gather(*(rank.executor.settle() for rank in self.ranks))
        self._take_in()
        planner = self.planner
        assert sorted(self.free) == list(range(1, self.setup.blocks)), "GPU blocks got lost"
        assert (planner._loads.loading, planner._loads.holding, planner._storing) == (0, 0, 0)
        for index in (planner.cpu, *planner.lower):
            index.check()
            assert not index.filling_count, f"{index.name}: fills are left"
            assert not index._pins, f"{index.name}: pins are left: {index._pins}"
            assert not index._doomed, f"{index.name}: doomed chunks are left"
        for rank in self.ranks:
            executor = rank.executor
            assert not executor._tasks, f"tasks are left: {executor._tasks}"
            assert not executor._lane._open, f"loads are left: {executor._lane._open}"
            assert executor._lane._staging.qsize() == STAGING, "staging buffers got lost"
            assert not executor._sources, f"stores are left: {executor._sources}"
            assert not executor._poisoned, f"poisoned stores are left: {executor._poisoned}"
            for key in planner.cpu._resident:
                slot = planner.cpu.place(key)
                assert rank.slot_is_right(key, slot, self.epoch), f"slot {slot} of {key.hex()}"
                self.checked += 1
            for tier, index in enumerate(planner.lower):
                await self._audit_tier(rank, tier, index)

    async def _audit_tier(self, rank: Rank, tier: int, index: TierIndex) -> None:
        held = set(await _keys(self.media[rank.number][tier]))
        assert held >= set(index._resident), f"rank {rank.number} has lost records of {index.name}"
        stray = held - set(index._resident)
        assert not stray, f"{len(stray)} records of {index.name} on rank {rank.number} are stray"
        for key in sorted(held):
            assert await rank.record_is_right(tier, key, self.epoch), f"record {key.hex()}"
            self.checked += 1


async def _keys(tier: Tier) -> list[bytes]:
    found: list[bytes] = []
    async for batch in tier.keys():
        found += [stored.key for stored in batch]
    return found


def _any_of(answers: Iterable[bool]) -> bool:
    """``any`` that looks at every answer."""
    return sum(answers) > 0


class _VirtualClock:
    """Stands for the module ``time`` where the executor measures how long something took."""

    def __getattr__(self, _name: str) -> Callable[[], float]:
        return lambda: asyncio.get_running_loop().time()


@contextmanager
def _virtual_clocks() -> Iterator[None]:
    with (
        patch("offload.executor.time", _VirtualClock()),
        patch("offload.load_task.time", _VirtualClock()),
        patch("offload.tier_writer.time", _VirtualClock()),
    ):
        yield


def live(world: World, steps: int) -> World:
    """Let a world live; a failure says how far it came."""
    with _virtual_clocks():
        try:
            world.turns = run_virtually(world.run(steps))
        except BaseException as error:
            error.add_note(f"step {world.steps}, {world.setup}, {dict(world.events)}")
            raise
    return world
