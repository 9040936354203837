"""LoRA adapters in a world of the scheduler oracle: few fit into a step and the worker's memory,
so that requests are skipped in the queue, and adapters are loaded again and again."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.oracle.features import Feature

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine

ADAPTERS = 3


class Adapters(Feature):
    """Most requests use one of three adapters. From time to time an operator replaces the files of
    one, loads it again, and empties vLLM's own cache, but not ours."""

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self._of: dict[str, LoRARequest] = {}
        self._contents = [0] * ADAPTERS
        self._loaded: OrderedDict[str, LoRARequest] = OrderedDict()
        self._capacity = world.lora_config.max_cpu_loras
        for number in range(ADAPTERS):
            self._write(number)

    def _write(self, number: int) -> LoRARequest:
        folder = self.world.folder / f"adapter{number}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text('{"r": 8}')
        (folder / "adapter_model.safetensors").write_text(f"{number} {self._contents[number]}")
        return LoRARequest(f"a{number}", number + 1, str(folder))

    def arguments(self, name: str) -> dict[str, Any]:
        if self.random.random() < 0.4:
            return {}
        number = self.random.randrange(ADAPTERS)
        folder = Path(self.world.folder / f"adapter{number}")
        self._of[name] = LoRARequest(f"a{number}", number + 1, str(folder))
        return {"lora_request": self._of[name]}

    def prefix(self, name: str) -> str:
        adapter = self._of.get(name)
        if adapter is None:
            return ""
        return f"{adapter.lora_name} {self._contents[adapter.lora_int_id - 1]}"

    def submitted(self, scheduled: SchedulerOutput) -> None:
        used = {
            self._of[name].lora_name: self._of[name]
            for name in scheduled.num_scheduled_tokens
            if name in self._of
        }
        assert len(used) <= self._capacity, f"vLLM schedules too many adapters: {used}"
        for adapter in used.values():
            self._load(adapter)
        self.world.seen["adapters"] += len(used)

    def _load(self, adapter: LoRARequest, *, again: bool = False) -> None:
        """Load an adapter unless it is loaded, as vLLM's manager does."""
        if adapter.lora_name not in self._loaded or again:
            watch = self.world.worker._adapter_watch
            assert watch is not None
            watch.load(adapter, lambda: None)
            self._loaded[adapter.lora_name] = adapter
            if len(self._loaded) > self._capacity:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(adapter.lora_name)

    def emptied(self) -> None:
        if self.random.random() < 0.15:
            number = self.random.randrange(ADAPTERS)
            self._contents[number] += 1
            self._load(self._write(number), again=True)
            self.world.seen["replaced"] += 1
