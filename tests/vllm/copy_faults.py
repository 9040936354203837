"""Plants faults between a slot and a GPU block in every worker, and removes them again.

These faults change nothing that is stored: ``heal`` restores an engine without any fault. Each
function runs in a worker (``Engine.call(on_workers, ...)``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.vllm.faults import executor


def plant(worker: Any, fault: Callable[..., Any], group: int | None) -> None:
    """From now on, every load to which ``fault`` applies goes wrong."""
    engine, slab = executor(worker)._engine, executor(worker)._loads.memory.slab
    submit = type(engine).submit_load

    def submit_load(batches: Any, after: Any = None) -> Any:
        chosen = [batch for batch in batches if group is None or batch.group == group]
        return fault(lambda: submit(engine, batches, after), chosen, slab)

    engine.submit_load = submit_load


def plant_late_writes(worker: Any) -> None:
    """From now on, the last block of every load is overwritten as soon as it has been loaded, as if
    vLLM gave a block away during a copy."""
    engine = executor(worker)._engine
    submit = type(engine).submit_load

    def submit_load(batches: Any, after: Any = None) -> Any:
        batch = batches[-1]
        block = max(int(block) for block in batch.blocks[-1])
        return Undone(
            submit(engine, batches, after), lambda: worker.kvtest_fill({batch.group: [block]}, 7)
        )

    engine.submit_load = submit_load


def heal(worker: Any) -> None:
    """Remove the planted fault."""
    del executor(worker)._engine.submit_load


def overwrite_stores(worker: Any, group: int) -> None:
    """From now on, stores of this group read their blocks only after these were given new content,
    as a fence that does not wait would allow. Then the blocks get their content back."""
    engine = executor(worker)._engine
    submit = type(engine).submit_store

    def late(batches: Any, after: Any = None) -> Any:
        chosen = [batch for batch in batches if batch.group == group]
        blocks = [int(b) for batch in chosen for b in batch.blocks.ravel() if b >= 0]
        kept = worker.kvtest_read({group: blocks})[group]
        worker.kvtest_fill({group: blocks}, 7)
        return Undone(
            submit(engine, batches, after),
            lambda: worker.kvtest_write({group: dict(zip(blocks, kept, strict=True))}),
        )

    engine.submit_store = late


def heal_stores(worker: Any) -> None:
    """Remove the fault of ``overwrite_stores``."""
    del executor(worker)._engine.submit_store


def hold_loads(worker: Any) -> None:
    """Let copies into GPU blocks begin, but write only after ``release_loads``."""
    engine = executor(worker)._engine
    gate, load = threading.Event(), type(engine)._load
    engine.kvtest_gate, engine.kvtest_held = gate, 0

    def held(batches: Any) -> None:
        engine.kvtest_held += 1
        gate.wait()
        load(engine, batches)

    engine._load = held


def held_loads(worker: Any) -> int:
    """The number of copies begun since."""
    return int(executor(worker)._engine.kvtest_held)


def release_loads(worker: Any) -> None:
    """Release the held copies, and hold no further ones."""
    engine = executor(worker)._engine
    del engine._load
    engine.kvtest_gate.set()


def wrong_bit(submit: Callable[[], Any], batches: list[Any], slab: Any) -> Any:
    """Flip one bit of the last chunk while it is copied."""
    if not batches:
        return submit()
    slot = slab.slot(int(batches[-1].slots[-1]))
    slot[7] ^= 1
    return Undone(submit(), lambda: slot.__setitem__(7, slot[7] ^ 1))


def swapped_chunks(submit: Callable[[], Any], batches: list[Any], slab: Any) -> Any:
    """Swap the last two chunks of a group."""
    for batch in batches:
        if len(batch.slots) > 1:
            batch.slots[-2:] = batch.slots[:-3:-1].copy()
            break
    return submit()


class Undone:
    """A ticket that undoes a change when its copy has ended."""

    def __init__(self, ticket: Any, undo: Callable[[], None]) -> None:
        self._ticket = ticket
        self._undo = undo

    @property
    def submitted(self) -> Any:
        return self._ticket.submitted

    def done(self) -> bool:
        return bool(self._ticket.done())

    def on_done(self, call: Callable[[Any], object]) -> None:
        def undone(error: Any) -> None:
            self._undo()
            call(error)

        self._ticket.on_done(undone)

    async def ended(self) -> None:
        try:
            await self._ticket.ended()
        finally:
            self._undo()
