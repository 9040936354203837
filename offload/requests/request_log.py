"""Writes what requests found to a small file that ``kvtiers why`` reads.

Opt-in, because it needs a thread of its own in vLLM's scheduler process.

Ownership: ``__call__`` and ``close`` are called on the scheduler's thread and only put into the
queue; the file belongs to the writer's thread, ``dropped`` to the scheduler's. Nothing here blocks
or raises there: what does not fit the queue is dropped and counted, and a file that cannot be
written ends the recording.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import threading
from collections import deque
from pathlib import Path
from typing import IO

from offload.requests.miss_reasons import RequestRecord

logger = logging.getLogger(__name__)

WAITING_MAX = 1024
EARLIER_MAX_BYTES = 16 << 20


class RequestFile:
    """One JSON object per line, oldest first, each with the server's ``namespace``. The file holds
    the last ``most`` requests, also those of a server that had it before, and at most as many
    before them; then it is replaced by a shorter one, so that a reader who opens it by name finds
    whole lines. ``namespace`` may be set until the first record comes."""

    def __init__(self, path: str, most: int, namespace: str = "") -> None:
        self.dropped = 0
        self.namespace = namespace
        self._path = Path(path)
        self._most = most
        self._queue: queue.Queue[RequestRecord | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="kvtiers-requests", daemon=True)
        self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        """Have a record written, which is not changed any more; drops it if the writer is behind
        or has given up."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, as far as that is done in time."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # a thread that ends must say so, and must not end the server
            logger.error("kvtiers: recording requests to %s ended: %s", self._path, error)

    def _write_all(self) -> None:
        last = deque(_earlier(self._path), maxlen=self._most)
        file, lines = self._replace(last), len(last)
        try:
            while (record := self._queue.get()) is not None:
                own = {"namespace": self.namespace} if self.namespace else {}
                line = json.dumps(record.as_json() | own) + "\n"
                last.append(line)
                if lines >= 2 * self._most:
                    file.close()
                    file, lines = self._replace(last), len(last)
                else:
                    file.write(line)
                    lines += 1
                if self._queue.empty():
                    file.flush()
        finally:
            file.close()

    def _replace(self, lines: deque[str]) -> IO[str]:
        """A new file in place of the old one, readable by its owner alone, that begins so."""
        new = self._path.with_name(self._path.name + ".new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.fdopen(os.open(new, flags, 0o600), "w", encoding="utf-8")
        file.writelines(lines)
        file.flush()
        new.replace(self._path)
        return file


def _earlier(path: Path) -> list[str]:
    """The last whole lines that an earlier server has written there, to be explained after a crash;
    none if it is no file of ours."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return []
            start = max(0, status.st_size - EARLIER_MAX_BYTES)
            file.seek(start)
            lines = file.read(EARLIER_MAX_BYTES).decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    return [line for line in lines[1 if start else 0 :] if line[:1] == "{" and line[-2:] == "}\n"]
