"""Systems of ``bench tiers`` whose packages are not dependencies of this project.

``lmcache``: the disk backend of LMCache (``pip install --no-deps lmcache aiofile caio``), with its
own file functions, O_DIRECT on, and as many threads as the depth. It neither flushes nor verifies,
which is an advantage for it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import threading
from pathlib import Path

from bench.tiers_systems import Arena, Numbers, System, ThreadedSystem


class LmcacheDisk(ThreadedSystem):
    """LMCache's ``LocalDiskBackend``: one file per block."""

    name = "LMCache disk"

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, depth)
        config_module = importlib.import_module("lmcache.v1.config")
        backend = importlib.import_module("lmcache.v1.storage_backend.local_disk_backend")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        config = config_module.LMCacheEngineConfig.from_defaults(
            local_disk=str(folder),
            max_local_disk_size=1024,
            extra_config={"use_odirect": True, "disk_io_threads": depth},
        )
        # LMCache's CPU backend only provides buffers. Here, the arena provides them.
        self._backend = backend.LocalDiskBackend(config, self._loop, None, dst_device="cpu")
        self._view = memoryview(arena.data)  # type: ignore[arg-type]  # arrays are buffers

    def _path(self, number: int) -> str:
        return f"{self._backend.path}/bench@1@0@{number:032x}@half.pt"

    def _bytes(self, number: int) -> memoryview:
        start = number % self.arena.count * self.arena.block_bytes
        return self._view[start : start + self.arena.block_bytes]

    def write_one(self, number: int) -> None:
        self._backend.write_file(self._bytes(number), self._path(number))

    def read_one(self, number: int) -> None:
        self._backend.read_file(None, self._bytes(number), self._path(number))

    def forget(self, numbers: Numbers) -> None:
        for number in numbers:
            os.unlink(self._path(number))

    def close(self) -> None:
        self._backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._view.release()
        super().close()


OPTIONAL: dict[str, tuple[str, type[System]]] = {
    "lmcache": ("lmcache", LmcacheDisk),
}
"""By name of a system: the package that it requires, and the system."""


def available() -> dict[str, type[System]]:
    """The optional systems whose packages are installed."""
    return {
        name: system
        for name, (package, system) in OPTIONAL.items()
        if importlib.util.find_spec(package) is not None
    }
