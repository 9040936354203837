"""A copy engine whose streams run late and out of order under a seed, to find races without a GPU.

It behaves like a GPU at its worst. Submitted work runs some time later; the compute, store and load
streams advance independently; a copy reads and writes its memory piece by piece in any order; an
event completes only when everything submitted before it has run. So a missing wait shows up as
wrong bytes, with some seed, in milliseconds. The engine also records ``hazards``: pairs of jobs in
flight that share a slot or a block to which one of them writes.

It is for tests of the layers above the copy engine, and it moves real bytes of real memory.

Ownership: one lock guards the streams, because kernels are launched by the model-runner thread
while copies are submitted and advanced by the offload loop. Nothing waits while holding it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tiers.copy.base import (
    CopyBatch,
    CopyEngine,
    EventTicket,
    FutureTicket,
    GroupRegions,
    Ticket,
    TransferError,
)
from tiers.copy.descriptors import DescriptorBuilder, Descriptors
from tiers.copy.host_loop import copy_loop
from tiers.slab.slab import HostSlab

Part = Callable[[], None]


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """An event that completes when ``stream`` has finished its first ``position`` operations."""

    stream: SimulatedStream
    position: int

    @property
    def over(self) -> bool:
        return self.stream.finished >= self.position


@dataclass(slots=True)
class Operation:
    """An operation of a stream. Its parts run one per step, the first one only after the event
    ``after`` has completed."""

    parts: deque[Part]
    after: SimulatedEvent | None = None


@dataclass(slots=True)
class SimulatedStream:
    """A FIFO of operations. ``finished`` counts those that have ended."""

    name: str
    queue: deque[Operation] = field(default_factory=deque)
    submitted: int = 0
    finished: int = 0

    def submit(self, operation: Operation) -> None:
        self.queue.append(operation)
        self.submitted += 1

    def event(self) -> SimulatedEvent:
        """An event at the current end of the stream."""
        return SimulatedEvent(self, self.submitted)

    @property
    def runnable(self) -> bool:
        """True if a part of the oldest operation may run now."""
        if not self.queue:
            return False
        after = self.queue[0].after
        return after is None or after.over

    def step(self) -> None:
        """Run one part of the oldest operation."""
        operation = self.queue[0]
        if operation.parts:
            operation.parts.popleft()()
        if not operation.parts:
            self.queue.popleft()
            self.finished += 1


@dataclass(frozen=True, slots=True)
class _CopyInFlight:
    """A copy in flight, for the hazard check. Blocks are (group, block id) pairs. The copy is the
    ``end``-th operation of its stream."""

    number: int
    kind: str
    end: int
    slots: frozenset[int]
    blocks: frozenset[tuple[int, int]]


class SimulatedCompute:
    """The compute stream: kernels run in launch order, late. Any thread may launch."""

    def __init__(self, stream: SimulatedStream, lock: threading.RLock) -> None:
        self._stream = stream
        self._lock = lock

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel (any function, typically one that writes or reads KV blocks)."""
        with self._lock:
            self._stream.submit(Operation(deque([kernel])))

    def advance(self) -> bool:
        """Run the oldest kernel, unless it waits for a copy; return whether it ran."""
        with self._lock:
            is_runnable = self._stream.runnable
            if is_runnable:
                self._stream.step()
            return is_runnable

    @property
    def idle(self) -> bool:
        """True if every launched kernel has run."""
        return not self._stream.queue


class SimulatedCopyEngine(CopyEngine):
    """``CopyEngine`` over memory that the CPU can address, with streams simulated under ``seed``.

    ``automatic``: copies submitted on an asyncio loop advance by themselves, a few random steps per
    iteration of the loop. Otherwise only ``advance``, ``run_all`` and ``close`` advance them. A job
    is cut into at most ``parts`` parts.
    """

    def __init__(
        self,
        groups: Sequence[GroupRegions],
        slab: HostSlab,
        *,
        num_blocks: int | None = None,
        seed: int = 0,
        automatic: bool = True,
        parts: int = 6,
    ) -> None:
        self._groups = {group.group: group for group in groups}
        self._slab = slab
        self._descriptors = DescriptorBuilder(
            groups,
            slab_address=slab.address,
            slot_stride=slab.slot_stride,
            slot_count=slab.slot_count,
            num_blocks=num_blocks,
        )
        self._rng = np.random.default_rng(seed)
        self._automatic = automatic
        self._parts = parts
        self._lock = threading.RLock()
        self._compute = SimulatedStream("compute")
        self._store = SimulatedStream("store")
        self._load = SimulatedStream("load")
        self._jobs: dict[int, _CopyInFlight] = {}
        # position in the compute stream that waits for a job, by the job's stream and end
        self._ordered: dict[tuple[str, int], int] = {}
        self._job_count = 0
        self._pumping = False
        self._closed = False
        self.hazards: list[str] = []
        self.compute = SimulatedCompute(self._compute, self._lock)

    def record_event(self) -> object | None:
        with self._lock:
            return self._compute.event()

    def hold_compute(self, event: object) -> None:
        assert isinstance(event, SimulatedEvent), event
        with self._lock:
            self._compute.submit(Operation(deque(), event))
            # the first position counts: everything launched from there on waits
            self._ordered.setdefault((event.stream.name, event.position), self._compute.submitted)

    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._store, batches, after)

    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._load, batches, after)

    def close(self) -> None:
        self._closed = True
        self.run_all()

    def advance(self, steps: int = 1) -> int:
        """Run up to ``steps`` parts on randomly chosen streams; return how many ran."""
        for done in range(steps):
            with self._lock:
                streams = [s for s in (self._compute, self._store, self._load) if s.runnable]
                if not streams:
                    return done
                # Weights are cubed, so that one stream often stalls for long while another races
                # ahead.
                weights = self._rng.random(len(streams)) ** 3 + 1e-6
                choice = self._rng.choice(len(streams), p=weights / weights.sum())
                streams[choice].step()
        return steps

    def run_all(self) -> None:
        """Run until every stream is empty."""
        while self.advance():
            pass

    @property
    def idle(self) -> bool:
        """True if every stream is empty."""
        return not (self._compute.queue or self._store.queue or self._load.queue)

    def _submit(
        self, stream: SimulatedStream, batches: Sequence[CopyBatch], after: object | None
    ) -> Ticket:
        ticket = EventTicket()
        assert after is None or isinstance(after, SimulatedEvent), after
        with self._lock:
            try:
                if self._closed:
                    raise TransferError("the copy engine is closed")
                copies = self._descriptors.build(batches)
            except TransferError as failure:
                # The failed ticket goes through the stream, too, so that it ends in order.
                parts: deque[Part] = deque([partial(ticket.finish, failure)])
            else:
                number = self._enlist(stream, batches, after)
                parts = deque(self._moves(stream, copies))
                parts.append(partial(self._finish, number, ticket))
            stream.submit(Operation(parts, after))
            end = stream.event()
        ticket.ends_at(end)
        if self._closed:
            self.run_all()
        elif self._automatic:
            self._start_pump()
        return ticket

    def _finish(self, number: int, ticket: FutureTicket) -> None:
        del self._jobs[number]
        ticket.finish(None)

    def _enlist(
        self,
        stream: SimulatedStream,
        batches: Sequence[CopyBatch],
        after: SimulatedEvent | None,
    ) -> int:
        """Record a job in flight and the memory that it uses, and check for hazards. Returns its
        number."""
        self._job_count += 1
        job = _CopyInFlight(
            number=self._job_count,
            kind=stream.name,
            end=stream.submitted + 1,
            slots=frozenset(int(slot) for batch in batches for slot in batch.slots),
            blocks=frozenset(
                (batch.group, int(block))
                for batch in batches
                for block in batch.blocks.ravel()
                if block >= 0
            ),
        )
        for other in self._jobs.values():
            if not self._is_behind(after, other):
                self.hazards.extend(_hazards(other, job))
        self._jobs[job.number] = job
        return job.number

    def _is_behind(self, after: SimulatedEvent | None, other: _CopyInFlight) -> bool:
        """True if an operation that waits for ``after`` also waits for the other job
        (``hold_compute``)."""
        position = self._ordered.get((other.kind, other.end))
        return after is not None and position is not None and after.position >= position

    def _moves(self, stream: SimulatedStream, copies: Descriptors) -> Iterator[Part]:
        """The job's copies in random order, divided into a random number of parts."""
        order = self._rng.permutation(len(copies))
        count = int(self._rng.integers(1, self._parts + 1))
        to, source = copies.slots, copies.blocks
        if stream is self._load:
            to, source = source, to
        for part in np.array_split(order, count):
            yield partial(copy_loop(), to[part], source[part], copies.sizes[part])

    def _start_pump(self) -> None:
        if self._pumping:
            return
        loop = asyncio.get_running_loop()
        self._pumping = True
        loop.call_soon(self._pump, loop)

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Advance a little in each iteration of the loop while copies are waiting."""
        self.advance(int(self._rng.integers(0, 4)))
        if self._store.queue or self._load.queue:
            loop.call_soon(self._pump, loop)
        else:
            self._pumping = False


def _hazards(first: _CopyInFlight, second: _CopyInFlight) -> Iterator[str]:
    """Describe the memory that two jobs in flight share and to which one of them writes: stores
    write slots and read blocks, loads write blocks and read slots."""
    names = f"{first.kind} job {first.number} and {second.kind} job {second.number}"
    if "store" in (first.kind, second.kind) and first.slots & second.slots:
        yield f"{names} share slots {sorted(first.slots & second.slots)}"
    if "load" in (first.kind, second.kind) and first.blocks & second.blocks:
        yield f"{names} share blocks {sorted(first.blocks & second.blocks)}"
