"""Records the prompts of a running server as a trace that ``kvtiers simulate`` reads.

Only numbers leave the process: which prompts share which blocks, and when. Tokens and hashes do not
leave it. Opt-in, because it needs threads in vLLM's scheduler process. `TraceRecorder` belongs to
the scheduler's thread. The file and the block numbers belong to its `BackgroundWriter`, which drops
and counts prompts that it cannot queue, and ends the recording if the file cannot be written.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from offload.requests.background_writer import BackgroundWriter, opened, private
from policies import hints as names
from policies.simulation.trace import TraceLines

logger = logging.getLogger(__name__)

TRACED_BLOCKS_MAX = 2_000_000
"""Maximum number of different blocks in one file; each takes about 150 bytes of memory."""
GZIP_WBITS = 31


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """One prompt: its arrival in seconds on any clock, the keys of its full chunks (which may be
    made on first use), and its hints."""

    time_s: float
    keys: Sequence[bytes]
    prompt_tokens: int
    hints: Mapping[str, Any]
    pinned: int


class TraceRecorder:
    """Writes one file in kvtiers' trace format (``policies.simulation.trace``); replaces an
    existing file.

    ``block_tokens`` is the size of a recorded chunk. A file whose name ends in ``.gz`` is
    compressed.
    """

    def __init__(
        self, path: str, block_tokens: int, *, blocks_max: int = TRACED_BLOCKS_MAX
    ) -> None:
        self._path = path
        self._lines = TraceLines("recorded", block_tokens)
        self._blocks_max = blocks_max
        self._begun: float | None = None
        self._blocks = 0
        self._writer: BackgroundWriter[RecordedPrompt] = BackgroundWriter(
            "kvtiers-recorder", f"recording to {path}", self._write
        )

    @property
    def dropped(self) -> int:
        """Number of prompts that were not written."""
        return self._writer.dropped

    def record(self, seen: RecordedPrompt) -> None:
        """Queue a prompt."""
        self._writer.put(seen)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the waiting prompts, within a time limit."""
        self._writer.close(timeout_s)
        if self.dropped:
            text = "kvtiers: %s lacks %d prompts, which could not be written in time"
            logger.warning(text, self._path, self.dropped)

    async def _write(
        self, batches: AsyncIterator[list[RecordedPrompt]], executor: Executor
    ) -> None:
        pack = zlib.compressobj(wbits=GZIP_WBITS) if self._path.endswith(".gz") else None

        def packed(text: str) -> bytes:
            if pack is None:
                return text.encode()
            # so that a trace can be read up to here while the server runs, and if it is killed
            return pack.compress(text.encode()) + pack.flush(zlib.Z_SYNC_FLUSH)

        async with opened(self._path, "wb", private, executor) as file:
            await file.write(packed(self._lines.head))
            await file.flush()
            async for batch in batches:
                await file.write(packed("".join(self._rows(batch))))
                await file.flush()
                if self._is_full():
                    logger.warning(
                        ("kvtiers: %s is full: it has %d blocks"), self._path, self._blocks_max
                    )
                    break
            if pack is not None:
                await file.write(pack.flush())

    def _rows(self, batch: Sequence[RecordedPrompt]) -> Iterator[str]:
        for seen in batch:
            self._blocks += len(seen.keys)
            if self._is_full():
                return
            if self._begun is None:
                self._begun = seen.time_s
            time_s = seen.time_s - self._begun
            yield self._lines.record(time_s, seen.keys, seen.prompt_tokens, **_fields(seen))

    def _is_full(self) -> bool:
        """True if the file has more different blocks than the maximum.

        ``_blocks`` counts repeated blocks each time. Unless it exceeds the maximum, the different
        blocks need not be counted.
        """
        if self._blocks <= self._blocks_max:
            return False
        return self._lines.different_blocks > self._blocks_max


def _fields(seen: RecordedPrompt) -> dict[str, Any]:
    """The hints as fields of a trace's request."""
    hints = seen.hints
    session = hints.get(names.SESSION, -1)
    return {
        "session": zlib.crc32(str(session).encode()) if names.SESSION in hints else -1,
        "stop": "tool_use" if hints.get(names.TOOL_CALL) else "",
        "last": bool(hints.get(names.SESSION_END)),
        "return_s": hints.get(names.RETURN_S),
        "one_shot": bool(hints.get(names.ONE_SHOT)),
        "pinned": seen.pinned,
    }
