"""Records the prompts of a running server as a trace that ``kvtiers simulate`` reads.

Only numbers leave the process: which prompts share which blocks, and when; neither tokens nor
hashes. Opt-in, because it needs a thread of its own in vLLM's scheduler process.

Ownership: ``record`` and ``close`` are called on the scheduler's thread and only put into the
queue; the file, the numbering and the counters of what was written belong to the writer's thread.
``dropped`` belongs to the scheduler's thread. Nothing here blocks or raises there: what does not
fit the queue is dropped and counted, and a file that cannot be written ends the recording.
"""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies import hints as names
from policies.simulation.trace import TraceWriter

logger = logging.getLogger(__name__)

WAITING_MAX = 1024
BLOCKS_MAX = 2_000_000
"""Different blocks in one file; a number for each is kept in memory, about 150 bytes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One prompt: its arrival on any clock in seconds, the keys of its full chunks (made by whoever
    asks for them), and hints."""

    time_s: float
    keys: Sequence[bytes]
    prompt_tokens: int
    hints: Mapping[str, Any]
    pinned: int


class TraceRecorder:
    """Writes one file in our own format (``policies.simulation.trace``), replacing what was there.

    ``block_tokens`` is the size of a recorded chunk. A name that ends in ``.gz`` is packed, and
    is whole only after ``close``.
    """

    def __init__(self, path: str, block_tokens: int, *, blocks_most: int = BLOCKS_MAX) -> None:
        self.dropped = 0
        self._path = path
        self._block_tokens = block_tokens
        self._blocks_most = blocks_most
        self._queue: queue.Queue[Seen | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="kvtiers-recorder", daemon=True)
        self._thread.start()

    def record(self, seen: Seen) -> None:
        """Have a prompt written; drops it if the writer is behind or has given up."""
        try:
            self._queue.put_nowait(seen)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, as far as that is done in time."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        if self.dropped:
            logger.warning("kvtiers: %s lacks %d prompts", self._path, self.dropped)

    def _run(self) -> None:
        try:
            with TraceWriter(self._path, "recorded", self._block_tokens) as writer:
                self._write_all(writer)
        except Exception as error:  # a thread that ends must say so, and must not end the server
            logger.error("kvtiers: recording to %s ended: %s", self._path, error)

    def _write_all(self, writer: TraceWriter) -> None:
        begun: float | None = None
        blocks = 0
        while True:
            if self._queue.empty():
                writer.flush()
            seen = self._queue.get()
            if seen is None:
                return
            blocks += len(seen.keys)  # more than the different ones: counting those comes late
            if blocks > self._blocks_most and writer.different_blocks > self._blocks_most:
                logger.warning("kvtiers: %s has %d blocks: full", self._path, self._blocks_most)
                return
            begun = seen.time_s if begun is None else begun
            writer.record(seen.time_s - begun, seen.keys, seen.prompt_tokens, **_fields(seen))


def _fields(seen: Seen) -> dict[str, Any]:
    """Hints as fields of a trace's request."""
    told = seen.hints
    session = told.get(names.SESSION, -1)
    return {
        "session": zlib.crc32(str(session).encode()) if names.SESSION in told else -1,
        "stop": "tool_use" if told.get(names.TOOL_CALL) else "",
        "last": bool(told.get(names.SESSION_END)),
        "return_s": told.get(names.RETURN_S),
        "one_shot": bool(told.get(names.ONE_SHOT)),
        "pinned": seen.pinned,
    }
