"""The systems that ``bench shared`` compares: shared tiers and the limit of each.

The memory of the Mooncake store belongs to a separate process, so that every byte goes through TCP.
The limit for the Mooncake tier is Mooncake's client without our tier; for the shared LMDB tier, it
is the exclusive LMDB tier.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tiers_systems import (
    FIXED_BYTES,
    Arena,
    Lmdb,
    Numbers,
    System,
    ThreadedSystem,
    TierSystem,
)
from demo.mooncake import Master
from tiers.base import SharedTier, Tier
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.client import CALL_RECORDS_MAX, MooncakeSettings
from tiers.mooncake.tier import MooncakeTier

MEMORY = """
import sys
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.client import MooncakeSettings
master, metadata, size = sys.argv[1:]
settings = MooncakeSettings(master, metadata, int(size), host="127.0.0.1")
store = mooncake_client.join_store(settings)
print("ready", flush=True)
sys.stdin.read()
"""
"""A process that contributes its memory to the store until its input is closed."""


class Store:
    """A Mooncake store: a master, and a process with ``memory_bytes`` of memory."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        with ExitStack() as undo:
            self.master = undo.enter_context(Master(folder / "master.log"))
            command = [sys.executable, "-c", MEMORY]
            command += [self.master.address, self.master.metadata, str(memory_bytes)]
            with (folder / "memory.log").open("ab") as log:
                self._memory = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
            undo.callback(self._memory.communicate)
            undo.callback(self._memory.kill)
            assert self._memory.stdout is not None
            if self._memory.stdout.readline() != "ready\n":
                raise RuntimeError((folder / "memory.log").read_text()[-2000:])
            self._undo = undo.pop_all()

    @property
    def settings(self) -> MooncakeSettings:
        """Settings of a client that joins the store without contributing memory."""
        return MooncakeSettings(self.master.address, self.master.metadata, 0, host="127.0.0.1")

    def close(self) -> None:
        """End both processes."""
        self._undo.close()


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system, the name of its limit ("" if it has none), and a function that returns how many
    of the given blocks it has (``None`` if it cannot tell)."""

    system: System
    limit: str
    count_present: Callable[[Sequence[int]], int] | None


class Mooncake(TierSystem):
    """The Mooncake tier, with its memory registered like the slab's."""

    name = "Mooncake tier"

    def __init__(self, folder: Path, arena: Arena, depth: int, store: Store) -> None:
        self._store = store
        super().__init__(folder, arena, depth)

    def make_tier(self) -> Tier:
        first = self.arena.data.ctypes.data
        memory = range(first, first + self.arena.data.nbytes)
        return MooncakeTier(self._store.settings, memory=memory, threads=self.depth)


class MooncakeClient(ThreadedSystem):
    """The limit: calls of Mooncake's own client for contiguous records without checksums, with the
    same batch size and number of threads as the tier."""

    name = "Mooncake's client"

    def __init__(self, folder: Path, arena: Arena, depth: int, store: Store) -> None:
        super().__init__(folder, arena, depth)
        self._client: Any = mooncake_client.join_store(store.settings)
        assert self._client.register_buffer(arena.data.ctypes.data, arena.data.nbytes) == 0

    def _names(self, numbers: Numbers) -> list[str]:
        return [f"raw/{number}" for number in numbers]

    def _call(self, call: Any, numbers: Numbers, good: int) -> None:
        size = self.arena.block_bytes
        addresses = [self.arena.block(number).ctypes.data for number in numbers]
        codes = call(self._names(numbers), addresses, [size] * len(numbers))
        assert set(codes) == {good}, set(codes)

    def write_one(self, number: int) -> None:
        self._call(self._client.batch_put_from, [number], 0)

    def read_one(self, number: int) -> None:
        self._call(self._client.batch_get_into, [number], self.arena.block_bytes)

    def mixed(self, write: Numbers, read: Numbers) -> None:
        put, get = self._client.batch_put_from, self._client.batch_get_into
        calls = [(put, write, 0), (get, read, self.arena.block_bytes)]
        self.threads.run(
            [
                lambda call=call, some=numbers[at : at + CALL_RECORDS_MAX], good=good: self._call(  # type: ignore[misc]  # mypy cannot see defaults
                    call, some, good
                )
                for call, numbers, good in calls
                for at in range(0, len(numbers), CALL_RECORDS_MAX)
            ]
        )

    def count_present(self, numbers: Numbers) -> int:
        return list(self._client.batch_is_exist(self._names(numbers))).count(1)

    def forget(self, numbers: Numbers) -> None:
        self._client.batch_remove(self._names(numbers), True)

    def close(self) -> None:
        self._client.close()
        super().close()


class SharedLmdb(TierSystem):
    """The LMDB tier over a folder that several processes could share."""

    name = "shared lmdb tier"

    def make_tier(self) -> Tier:
        total = 2 * self.arena.count * self.arena.block_bytes
        return SharedLmdbTier(
            self.folder / "tier",
            2 * total + FIXED_BYTES,  # the tier begins to evict before it is full
            reserve_bytes=0,
            io_threads=self.depth,
            queue_records=1 << 20,
        )


def contestants(folder: Path, arena: Arena, depth: int, store: Store | None) -> list[Contestant]:
    """All systems that can run here. Each limit comes before the systems that it limits."""
    exclusive = Lmdb(folder / "lmdb", arena, depth)
    shared = SharedLmdb(folder / "shared", arena, depth)
    found = [Contestant(exclusive, "", None), Contestant(shared, exclusive.name, _asked(shared))]
    if store is not None:
        raw = MooncakeClient(folder / "raw", arena, depth, store)
        tier = Mooncake(folder / "mooncake", arena, depth, store)
        found += [Contestant(raw, "", raw.count_present), Contestant(tier, raw.name, _asked(tier))]
    return found


def _asked(system: TierSystem) -> Callable[[Sequence[int]], int]:
    def ask(numbers: Sequence[int]) -> int:
        keys = [system.key(number) for number in numbers]
        assert isinstance(system.tier, SharedTier)
        return sum(system._run(system.tier.present(keys)))

    return ask
