"""One worker of the simulated world: the real executor over a simulated device and real tiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from offload.messages.plan import StepPlan
from offload.worker.executor import Executor
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.rank_memory import RankMemory
from offload.worker.unanswered_jobs import Drained
from tests.sim.content import LAYERS, REGIONS, SLOT_BYTES, chunk, page
from tests.sim.device import Device
from tests.sim.weather import DelayedTier, Weather, under
from tiers.base import ReadOutcome, Tier
from tiers.slab.slab import HostSlab

STAGING = 3
LIMITS = ExecutorLimits(load_timeout_s=10.0, fence_timeout_s=0.0, tier_timeout_s=5.0, read_batch=4)
FENCE_S = 0.05


Computed = tuple[bytes, int, tuple[int, ...], int]
"""A chunk as the forward pass writes it: key, group, blocks, epoch of the weights."""


@dataclass(slots=True)
class Rank:
    """A worker process: when it dies, only its media survive."""

    number: int
    device: Device
    slab: HostSlab
    executor: Executor
    tiers: list[Tier]
    delayed: list[DelayedTier]
    finished: dict[str, bool] = field(default_factory=dict)

    @classmethod
    async def start(
        cls,
        number: int,
        rng: random.Random,
        media: Sequence[Tier],
        weathers: Sequence[Weather],
        *,
        slots: int,
        blocks: int,
        copy_failures: float,
        lying: bool = False,
    ) -> Rank:
        """Make a fresh worker over media that may contain records."""
        slab = HostSlab(SLOT_BYTES, STAGING + slots, background=False)
        device = Device(rng, slab, blocks, copy_failures)
        stacks = [under(w, m, lying=lying) for w, m in zip(weathers, media, strict=True)]
        tiers = [tier for tier, _ in stacks]
        for tier in tiers:
            await tier.open()
        regions = {region.group: region for region in REGIONS}
        memory = RankMemory(slab, device, regions, range(STAGING))
        executor = Executor(memory, tiers, limits=LIMITS, rank=number)
        executor.start()
        return cls(number, device, slab, executor, tiers, [delayed for _, delayed in stacks])

    async def fence(self, plan: StepPlan, patient: bool) -> None:
        """Wait for the fenced stores as the model-runner thread would, in virtual time; an
        impatient caller reaches the fence's timeout at once."""
        fences = self.executor._fences
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FENCE_S
        while patient and any(map(fences.is_reading, plan.fence)):
            if loop.time() > deadline:
                break
            await asyncio.sleep(0.001)
        self.executor.fence(plan.fence)

    def forward(self, writes: Sequence[Computed], check: Callable[[], None] | None) -> None:
        """Launch a forward pass, which fills the chunks' blocks and may check what it reads."""
        pages = [
            (self.device.page(layer, block), page(key, epoch, self.number, layer, at))
            for key, group, blocks, epoch in writes
            for at, block in enumerate(blocks)
            for layer in LAYERS[group]
        ]

        def kernel() -> None:
            for target, content in pages:
                target[:] = content
            if check is not None:
                check()

        self.device.launch(kernel)

    def wrong_pages(self, key: bytes, group: int, blocks: tuple[int, ...], epoch: int) -> list[str]:
        """The pages of a chunk that do not have its content."""
        return [
            f"block {block} of layer {layer} on rank {self.number}"
            for at, block in enumerate(blocks)
            for layer in LAYERS[group]
            if self.device.page(layer, block) != page(key, epoch, self.number, layer, at)
        ]

    def slot_is_right(self, key: bytes, slot: int, epoch: int) -> bool:
        """True if a slot contains a chunk, byte for byte."""
        content = chunk(key, epoch, self.number)
        return self.device.slot_bytes(slot, len(content)) == content

    async def record_is_right(self, tier: int, key: bytes, epoch: int) -> bool:
        """True if a tier's record contains a chunk, byte for byte."""
        into = np.zeros(SLOT_BYTES, np.uint8)
        outcomes = await self.tiers[tier].read([key], [into])
        content = chunk(key, epoch, self.number)
        return outcomes == [ReadOutcome.OK] and into[: len(content)].tobytes() == content

    def drain(self) -> Drained:
        """Return everything that has ended since the previous call; no request may end twice."""
        drained = self.executor.drain()
        for request in drained.finished:
            assert request not in self.finished, f"rank {self.number}: {request} ended twice"
            self.finished[request] = request in drained.failed
        return drained

    async def stop(self, timeout_s: float) -> None:
        """End the process, in an orderly way if it is given time."""
        await self.executor.aclose(timeout_s)
        await asyncio.sleep(0)
        self.device.close()
