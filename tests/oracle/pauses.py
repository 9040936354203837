"""Pauses in a world of the scheduler oracle (``EngineCore.pause_scheduler``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.oracle.features import Feature

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine

MODES = ("abort", "wait", "keep")


class Pauses(Feature):
    """An operator pauses the server and lets it go on, while clients send requests. When nothing is
    left to do, the pause is complete, and may empty all caches."""

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self._empties_caches = False

    @property
    def _is_on(self) -> bool:
        return bool(self.world.scheduler.pause_state is not PauseState.UNPAUSED)

    def act(self) -> None:
        if self._is_on:
            if self.random.random() < 0.1:
                self.resume()
        elif self.random.random() < 0.03:
            self._begin(self.random.choice(MODES))

    def _begin(self, mode: str) -> None:
        scheduler = self.world.scheduler
        if mode == "abort":
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        scheduler.set_pause_state(state)
        self._empties_caches = self.random.random() < 0.5
        self.world.seen[f"pause: {mode}"] += 1

    def resume(self) -> None:
        self.world.scheduler.set_pause_state(PauseState.UNPAUSED)

    def skips_step(self) -> bool:
        world = self.world
        if not self._is_on or world.scheduler.has_requests():
            return False
        world.seen["steps skipped"] += 1
        if world._queue:
            world._take_output()
            return True
        world._turn()
        if self._empties_caches:
            while not world.engine.compute.idle:  # vLLM waits for the device
                world.engine.advance()
            world.change_weights()
            self._empties_caches = False
        return True
