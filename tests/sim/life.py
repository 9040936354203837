"""The simulated world: a scheduler with requests over the real planner, and ranks with the real
executor, real tiers and a simulated GPU, all in virtual time and from one seed.

Requests share prefixes (a tree); they are preempted, aborted and retried; the weights change; the
server restarts; each tier of each rank has its own faults ("weather"). A page's content is a
function of its key, the weights' epoch, the rank and the layer, so every page that was loaded for a
request is compared byte for byte, when it was loaded and when the forward pass reads it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from offload.index.tier_index import TierIndex
from offload.messages.plan import StepPlan
from offload.planner.jobs import JobKind
from tests.sim.content import (
    BLOCKS_PER_POSITION,
    node,
)
from tests.sim.engine import GROUPS, Engine, Request
from tests.sim.rank import FENCE_S, LIMITS, STAGING, Rank
from tests.sim.server import FAILURES, keys_of
from tests.sim.virtual_time import VirtualLoop, run_virtually
from tests.sim.weather import Sky

LATE_S = 1.0
"""Time for which a load may continue beyond its deadline, for copies that had begun."""
HOPELESS_S = (FAILURES + 2) * LIMITS.tier_timeout_s
"""After hanging for this long, a tier's breaker must have opened."""


class ServerLife(Engine):
    """A simulated world (see the module). ``run`` takes this number of steps, lets all work end and
    audits what is left. ``hits`` counts restored chunks by source, ``events`` what happened."""

    async def run(self, steps: int) -> int:
        """Run the world to its end; return the number of loop iterations."""
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

    async def step(self) -> None:
        """Admit, compute, store, send a plan to every rank; let time pass; process the answers."""
        self.steps += 1
        self._admit()
        self._enter_again()
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
        """Mostly milliseconds, but sometimes long enough for deadlines and breakers."""
        kind = self.rng.random()
        most_s = (
            self.setup.pause_s
            if kind < 0.82
            else 0.5
            if kind < 0.92
            else 4.0
            if kind < 0.985
            else 20.0
        )
        return self.rng.random() * most_s

    # -- random events -------------------------------------------------------------------------

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
            self.planner.begin_epochs(dict.fromkeys(range(self.setup.tiers), self.epoch))
        if rng.random() < 0.003:
            await self._restart()
        if rng.random() < self.setup.trouble:
            weather = rng.choice(rng.choice(self.weathers))
            weather.change(rng.choice([*Sky, Sky.HANGING]), self.now())
        elif rng.random() < self.setup.trouble / 2:
            rng.choice(rng.choice(self.weathers)).change(Sky.CALM, self.now())

    def _some_chain(self) -> list[bytes]:
        """A path in the tree of prefixes: few branches near the root, and a separate tail."""
        chain, at = [], b"root"
        for depth in range(self.rng.randint(1, 10)):
            branch = self.rng.randrange(2 if depth < 6 else 50)
            at = node(at, 0 if self.rng.random() < 0.5 else branch)
            chain.append(at)
        return chain

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.stale = False
        self.waiting.insert(0, request)
        self.planner.read_waits.exempt(request.name)
        self.events["preempted"] += 1
        request.place = -self.events["preempted"]
        self._enter(request)

    def _abort(self, request: Request | None) -> None:
        if request is None:
            return
        self.events["aborted"] += 1
        if request.loading:
            request.aborted = True  # its blocks are held until every rank has released them
            self.planner.loads.cancel(request.name)
            return
        self._leave(request)
        (self.waiting if request in self.waiting else self.running).remove(request)
        self._give_back(request)

    def _new_weights(self) -> None:
        """Change the weights: chunks computed so far must never be restored again."""
        self.epoch += 1
        self.events["reset"] += 1
        for request in (*self.running, *self.loading.values()):
            request.stale = True
        if self.rng.random() < 0.5:
            self.planner.forget_all()
            self.planner.begin_epochs(dict.fromkeys(range(self.setup.tiers), self.epoch))
            self._unforgotten = False
        else:
            self.planner.forget_all()
            self._unforgotten = True
        for request in self.waiting:
            self._enter(request)

    def _clear_skies(self) -> None:
        for weathers in self.weathers:
            for weather in weathers:
                weather.change(Sky.CALM, self.now())

    async def _restart(self) -> None:
        """Restart the server, after an orderly end or a crash; clients send their requests
        again."""
        self._clear_skies()
        await self._end(self.rng.choice((0.0, 0.01, 2.0)))
        again = [r for r in (*self.waiting, *self.running, *self.loading.values()) if not r.aborted]
        self.waiting, self.running, self.loading = [], [], {}
        self._unforgotten = False
        await self._start()
        for request in again:
            self._arrive(request.chain)
        self.events["restart"] += 1

    # -- invariants ----------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        """A tier that is not used costs nothing but probes. A load that was planned in an earlier
        step is read to its end even if loading no longer pays."""
        healths = self.planner.health
        for load in plan.loads:
            for item in load.items:
                health = healths[item.tier] if item.tier >= 0 else None
                request = self.loading.get(load.request)
                is_new = request is None or request.planned_in == self.steps
                shut = health and not (health.readable if is_new else health.reads.closed)
                assert not (load.request and shut), f"{load} reads a tier that must not be used"
            if load.request in self.loading:
                self.loading[load.request].planned_at = self.now()
            self.events["parts"] += load.part > 0
        for write_through in plan.write_throughs:
            assert healths[write_through.tier].writable, (
                f"{write_through} goes to a tier that must not be used"
            )
        probes = Counter(
            load.items[0].tier for load in plan.loads if not (load.request or load.is_ahead)
        )
        assert all(count == 1 for count in probes.values()), f"probes {probes} in one step"
        self.events["probes"] += len(probes)

    def _check(self) -> None:
        planner, now = self.planner, self.now()
        planner.check()
        assert not self.wrong, self.wrong[0]
        evicted = list(filter(planner.cpu.is_absent, planner.look_ahead._held))
        assert not evicted, f"{evicted} were read ahead and evicted before their use"
        waited_for = planner.loads._waited_for
        for request in self.loading.values():
            if request.name in waited_for and waited_for[request.name].rest:
                continue  # it waits for the next step, which may take any time
            age = now - request.planned_at
            limit = LIMITS.load_timeout_s + LATE_S + FENCE_S * len(self.ranks)
            assert age < limit, f"{request.name} has waited {age:.1f} s for its load"
        loads = list(self.loading.values())
        chunks = sum(len(GROUPS) * r.hit for r in loads)
        blocks = sum(BLOCKS_PER_POSITION * r.hit for r in loads)
        if len(loads) > 1:
            assert chunks <= self.max_load, f"{chunks} chunks in flight to requests"
            assert blocks <= self.setup.blocks // 2, f"{blocks} GPU blocks held by loads"
        assert planner.stores.storing <= self.max_store
        probes = planner.jobs.count(JobKind.PROBE)
        assert probes <= len(planner.lower), f"{probes} probes at a time"
        for queue in planner.write_through.queues:
            waiting = planner.cpu.unwritten.count(queue.tier)
            assert waiting <= self.setup.slots * 3 // 4, f"{waiting} chunks wait for a tier"
        for rank in self.ranks:
            assert not rank.executor.degraded, rank.executor.degraded
            for tier, delayed in enumerate(rank.delayed):
                self._check_breaker(rank.number, tier, delayed.begun)

    def _check_breaker(self, rank: int, tier: int, begun: dict[str, list[float]]) -> None:
        weather, health = self.weathers[rank][tier], self.planner.health[tier]
        if weather.sky is not Sky.HANGING or self.now() - weather.since < HOPELESS_S:
            return
        for method, breaker in (("read", health.reads), ("write", health.writes)):
            if any(self.now() - at > HOPELESS_S for at in begun[method]):
                self.events[f"{method} hung"] += 1
                assert not breaker.closed, f"{health.name} hangs on rank {rank} and is used"

    # -- the end -----------------------------------------------------------------------------

    async def rest(self, seconds: float = 600.0) -> None:
        """Calm weather and new requests from time to time: everything must end, and every breaker
        must close."""
        self._clear_skies()
        if self._unforgotten:
            self._unforgotten = False
            self.planner.begin_epochs(dict.fromkeys(range(self.setup.tiers), self.epoch))
        until = self.now() + seconds
        for _ in range(3):  # a request to write, so that failed writes are repeated
            self._names += 1
            self._arrive([node(b"last", self._names)])
        while not self._at_rest():
            assert self.now() < until, f"no rest: {self._why_busy()}"
            if self._in_trouble() and not self.waiting:
                self._arrive(self._some_chain())
            await self.step()

    def _at_rest(self) -> bool:
        """Assert that no work is left. A write that hung may still open its breaker when it
        ends."""
        requests = self.waiting or self.running or self.loading
        devices = all(rank.device.idle for rank in self.ranks)
        return not (self._in_trouble() or requests or self.planner.busy) and devices

    def _in_trouble(self) -> bool:
        writers = [writer for rank in self.ranks for writer in rank.executor._writers]
        if any(writer._epoch_due is not None or writer._undeleted for writer in writers):
            return True
        return any(
            not health.writes.closed or (len(index) > 0 and not health.reads.closed)
            for health, index in zip(self.planner.health, self.planner.lower, strict=True)
        )

    def _why_busy(self) -> str:
        healths = [(h.reads.state, h.writes.state, h.probe) for h in self.planner.health]
        jobs = self.planner.jobs.jobs()
        queues = len(self.waiting), len(self.running), list(self.loading)
        return f"tiers {healths}, requests {queues}, jobs {jobs[:5]}"

    async def audit(self) -> None:
        """Assert that nothing is left over, and that everything stored is right, byte for byte, on
        every rank."""
        await asyncio.gather(*(rank.executor.settle() for rank in self.ranks))
        self._take_in()
        planner = self.planner
        assert sorted(self.free) == list(range(1, self.setup.blocks)), "GPU blocks got lost"
        assert (planner.loads.loading, planner.loads.holding, planner.stores.storing) == (
            0,
            0,
            0,
        )
        assert not planner.loads.held, "chunks are held for which no request waits"
        assert not [*planner.loads.planned, *planner.loads.queue], "loads are deferred"
        assert not planner.probes.planned, "probes are deferred"
        assert not planner.deferred.pieces, "answers are deferred"
        waits = planner.read_waits
        assert not any((waits._waits, waits._ended)), f"requests wait for reads: {waits._waits}"
        ahead = planner.look_ahead
        left = (ahead._requests, ahead.queue, ahead._open, ahead._held, ahead._wanted.keys)
        assert not any(left), f"look-ahead has not ended: {left}"
        assert not ahead.is_reading, "chunks are still read ahead"
        counts = ahead.counts.chunks
        assert counts["read"] == counts["used"] + counts["wasted"], f"look-ahead: {counts}"
        self.events["read ahead"] += counts["used"]
        for index in (planner.cpu, *planner.lower):
            index.check()
            assert not index.filling_count, f"{index.name}: fills are left"
            pinned = list(filter(index.is_in_use, index.resident))
            assert not pinned, f"{index.name}: pins are left: {pinned}"
            assert not index.barred, f"{index.name}: doomed chunks are left"
        for rank in self.ranks:
            executor = rank.executor
            assert not executor._tasks, f"tasks are left: {executor._tasks}"
            assert not executor._loads._open, f"loads are left: {executor._loads._open}"
            assert executor._loads.staging.free == STAGING, "staging buffers got lost"
            fences, owed = executor._fences, executor._open.by_job
            assert not fences.reading, f"stores are left: {fences.reading}"
            assert not owed, f"requests without an answer: {owed}"
            assert not fences._poisoned, f"poisoned stores are left: {fences._poisoned}"
            for key in planner.cpu.resident:
                slot = planner.cpu.location(key)
                assert rank.slot_is_right(key, slot, self.epoch), f"slot {slot} of {key.hex()}"
                self.checked += 1
            for tier, index in enumerate(planner.lower):
                await self._audit_tier(rank, tier, index)

    async def _audit_tier(self, rank: Rank, tier: int, index: TierIndex) -> None:
        held = set(await keys_of(self.media[rank.number][tier]))
        assert held >= set(index.resident), f"rank {rank.number} has lost records of {index.name}"
        stray = held - set(index.resident)
        assert not stray, f"{len(stray)} records of {index.name} on rank {rank.number} are stray"
        for key in sorted(held):
            assert await rank.record_is_right(tier, key, self.epoch), f"record {key.hex()}"
            self.checked += 1


class _VirtualClock:
    """Replaces the module ``time`` where the executor measures durations."""

    def __getattr__(self, _name: str) -> Callable[[], float]:
        return lambda: asyncio.get_running_loop().time()


@contextmanager
def _virtual_clocks() -> Iterator[None]:
    with (
        patch("offload.worker.executor.time", _VirtualClock()),
        patch("offload.worker.loads.time", _VirtualClock()),
    ):
        yield


def live(world: ServerLife, steps: int) -> ServerLife:
    """Run a world; a failure says how far it came."""
    with _virtual_clocks():
        try:
            world.turns = run_virtually(world.run(steps))
        except BaseException as error:  # adds the state to whatever it was
            error.add_note(f"step {world.steps}, {world.setup}, {dict(world.events)}")
            raise
    return world
