"""Counts the modules through which one chunk passes on its way to the disk and back.

Run: ``python scripts/block_path.py``; ``--list`` also names the modules. The in-process manager
offloads one chunk to a CPU tier and an LMDB tier, and restores it from the disk after the CPU tier
has evicted it. Every Python call into ``offload``, ``tiers`` and ``policies`` counts, on any
thread, until the manager is idle again: so the steps in between count too, whether or not they
touch the chunk. Not counted are ``offload.connector`` and ``offload.requests``, because vLLM's
hooks do not run, and ``offload.manager``, because no server runs it.

To compare two trees, run this script in both:
``cd OTHER && PYTHONPATH=. python THIS/scripts/block_path.py``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from types import FrameType
from typing import Any

import torch

from offload import OffloadManager, SimpleConfig, SimpleGroup, SimpleSpec
from tiers import LmdbTier

BLOCK_TOKENS, PAGE_BYTES, SLOTS = 16, 8192, 6
LAYERS = ("layers.0", "layers.1")
PACKAGES = ("offload.", "tiers.", "policies.")
DRIVER = "offload.manager"
"""The modules whose names begin like this drive the others here, and are not counted."""


class CallCounter:
    """Counts the calls that each module receives, and how often a call of a thread goes to another
    module than the call before. ``sys.setprofile`` and ``threading.setprofile`` call it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes = 0
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        module = frame.f_globals.get("__name__") or ""
        if event != "call" or module.startswith(DRIVER):
            return
        if module.startswith(PACKAGES):
            self.calls[module] += 1
            thread = threading.get_ident()
            self.changes += self._last.get(thread, module) != module
            self._last[thread] = module

    def clear(self) -> None:
        """Begin again."""
        self.calls.clear()
        self._last.clear()
        self.changes = 0

    def print(self, name: str, *, names_modules: bool) -> None:
        """Print one line, and the modules if wanted."""
        calls = sum(self.calls.values())
        print(f"{name}: {len(self.calls)} modules, {self.changes} changes of module, {calls} calls")
        for module, count in sorted(self.calls.items()) if names_modules else ():
            print(f"  {count:4}  {module}")


async def run(counter: CallCounter, folder: str, *, names_modules: bool) -> None:
    """Count the calls on the way to the disk, and on the way back."""
    kv_caches: dict[str, Any] = {
        name: torch.zeros((16, PAGE_BYTES), dtype=torch.uint8) for name in LAYERS
    }
    spec = SimpleSpec(BLOCK_TOKENS, PAGE_BYTES)
    kv_cache_config = SimpleConfig(16, (SimpleGroup(LAYERS, spec),))
    slot_bytes = len(LAYERS) * PAGE_BYTES
    config = {"cpu": {"capacity": SLOTS * slot_bytes}, "staging": 2 * slot_bytes}
    disk = LmdbTier(folder, 64 << 20, reserve_bytes=0)
    manager = await OffloadManager.open(kv_cache_config, kv_caches, config, tiers=[disk])
    async with manager:
        await offload(manager, range(3))  # what happens only at the first call is not counted
        assert await manager.restore([b"0"], [0]) == 1
        counter.clear()
        await offload(manager, [3])
        counter.print("to the disk", names_modules=names_modules)
        await offload(manager, range(4, 4 + 2 * SLOTS))
        assert manager.planner.cpu.is_absent(b"3" + bytes(4)), "the CPU tier still has it"
        counter.clear()
        assert await manager.restore([b"3"], [0]) == 1
        await manager.flush()
        counter.print("back", names_modules=names_modules)


async def offload(manager: OffloadManager, numbers: Any) -> None:
    """Offload one block after the other, down to the disk."""
    for number in numbers:
        await manager.offload([b"%d" % number], [number % 16])
        await manager.flush()


def main() -> None:
    """Count the calls of all threads that start from now on."""
    counter = CallCounter()
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(run(counter, folder, names_modules="--list" in sys.argv))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    main()
