"""Writes the results of request lookups to a small file that ``kvtiers why`` reads.

Opt-in, because it needs threads in vLLM's scheduler process. `RequestFile` belongs to the
scheduler's thread. The file belongs to its `BackgroundWriter`, which drops and counts entries that
it cannot queue, and ends the recording if the file cannot be written.
"""

from __future__ import annotations

import json
import stat
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Any

import aiofiles
import aiofiles.os

from offload.requests.background_writer import BackgroundWriter, not_followed, opened, private
from offload.requests.request_log import LoggedRequest

EARLIER_MAX_BYTES = 16 << 20
"""Maximum number of bytes that are read from an earlier server's file."""


class RequestFile:
    """One JSON object per line, oldest first, each with the server's namespace.

    The file holds at least the last ``records_max`` requests, including those of a server that used
    it before, and at most twice that number. When it has grown to that number, a shorter file
    replaces it, so that a reader who opens it by name always finds whole lines.
    """

    def __init__(self, path: str, records_max: int, namespace: str = "") -> None:
        self._namespace = namespace
        self._path = path
        self._records_max = records_max
        self._writer: BackgroundWriter[LoggedRequest] = BackgroundWriter(
            "kvtiers-requests", f"recording requests to {path}", self._write
        )

    @property
    def dropped(self) -> int:
        """Number of entries that were not written."""
        return self._writer.dropped

    def __call__(self, logged: LoggedRequest) -> None:
        """Queue an entry, which must not change afterwards."""
        self._writer.put(logged)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the waiting entries, within a time limit."""
        self._writer.close(timeout_s)

    async def _write(self, batches: AsyncIterator[list[LoggedRequest]], executor: Executor) -> None:
        last = deque(await _earlier(self._path, executor), maxlen=self._records_max)
        file, lines = await self._replace(last, executor), len(last)
        try:
            async for batch in batches:
                added: list[str] = []
                for line in map(self._line, batch):
                    last.append(line)
                    added.append(line)
                    if lines + len(added) > 2 * self._records_max:
                        await file.close()
                        file, lines = await self._replace(last, executor), len(last)
                        added.clear()
                await file.write("".join(added))
                await file.flush()
                lines += len(added)
        finally:
            await file.close()

    def _line(self, logged: LoggedRequest) -> str:
        own = {"namespace": self._namespace} if self._namespace else {}
        return json.dumps(logged.as_json() | own) + "\n"

    async def _replace(self, lines: deque[str], executor: Executor) -> Any:
        """Replace the file by a new one that begins with these lines."""
        new = self._path + ".new"
        file = await aiofiles.open(new, "w", encoding="utf-8", opener=private, executor=executor)
        await file.write("".join(lines))
        await file.flush()
        await aiofiles.os.replace(new, self._path, executor=executor)
        return file


async def _earlier(path: str, executor: Executor) -> list[str]:
    """Read the last whole lines that an earlier server wrote, so that ``kvtiers why`` works after a
    crash.

    Returns no lines if the file was not written by kvtiers.
    """
    try:
        async with opened(path, "rb", not_followed, executor) as file:
            status = await aiofiles.os.stat(file.fileno(), executor=executor)
            if not stat.S_ISREG(status.st_mode):
                return []
            start = max(0, status.st_size - EARLIER_MAX_BYTES)
            await file.seek(start)
            content = await file.read(EARLIER_MAX_BYTES)
    except OSError:
        return []
    lines = content.decode(errors="replace").splitlines(keepends=True)
    return [line for line in lines[1 if start else 0 :] if line[:1] == "{" and line[-2:] == "}\n"]
