"""Request traces, on which policies are evaluated.

A trace contains, for each request, the blocks of its prompt. A block id identifies a block together
with its prefix: equal ids mean equal prefixes. Only full blocks are included.

The format of this project is JSON lines, gzip-compressed if the name ends in ``.gz``. The first
line is ``{"meta": {"name": ..., "block_tokens": ..., "licence": ..., ...}}``; then one line per
request, in time order:

    {"t": seconds, "s": session (or -1), "in": prompt tokens, "out": output tokens,
     "r": [[first_id, count], ...],           the prompt, run-length coded: [5, 3] is 5, 6, 7
     "stop": "tool_use" | "end_turn" | "",    optional: why the answer ended
     "last": 1,                               optional: the session ends here
     "return_s": seconds,                     optional: expected return after a tool call
     "one_shot": 1, "pinned": n}              optional: no reuse expected; first n blocks pinned

Unknown fields are ignored.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

logger = logging.getLogger(__name__)


class TraceError(ValueError):
    """Raised for a file that is not a trace. The message names the file, the line and the
    problem."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. ``runs`` are half-open id ranges ``(first, first + count)`` in prefix order."""

    time_s: float
    prompt_tokens: int
    runs: tuple[tuple[int, int], ...]
    output_tokens: int = 0
    session: int = -1
    stop: str = ""
    last: bool = False
    return_s: float | None = None
    one_shot: bool = False
    pinned: int = 0

    def blocks(self) -> list[int]:
        """The block ids in prefix order."""
        if len(self.runs) == 1:
            first, count = self.runs[0]
            return list(range(first, first + count))
        return [block for first, count in self.runs for block in range(first, first + count)]

    @property
    def block_count(self) -> int:
        """The number of full blocks of the prompt."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in time order, with metadata about their source."""

    name: str
    block_tokens: int
    requests: Sequence[Request]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def unique_blocks(self) -> int:
        """Count the distinct blocks of the trace, which an infinite cache would hold."""
        ranges = sorted({run for request in self.requests for run in request.runs})
        total, end = 0, -1
        for first, count in ranges:
            total += max(0, first + count - max(first, end))
            end = max(end, first + count)
        return total

    def part(self, start: float, stop: float) -> Trace:
        """The requests between two fractions of the trace, for validation on a held-out part."""
        count = len(self.requests)
        chosen = self.requests[int(count * start) : int(count * stop)]
        return Trace(f"{self.name}[{start:g}:{stop:g}]", self.block_tokens, chosen, self.meta)


def open_text(path: Path) -> IO[str]:
    """Open a file for reading text, unpacking ``.gz``."""
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of a JSON-lines file. A last line without valid JSON is skipped, and
    the missing end of a compressed file is not an error: a server is still writing it, or ended
    while writing it. Raises ``TraceError``."""
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        if number > 1 and not line.endswith("\n"):
                            return
                        what = f"{path}: not JSON lines, at line {number}: {error}"
                        raise TraceError(what) from error
                    yield number, value
        except TraceError:
            raise
        except (ValueError, OSError, EOFError, zlib.error) as error:  # not text, or damaged
            if isinstance(error, EOFError) and number:
                logger.warning("%s is not complete: it ends after line %d", path, number)
                return
            raise TraceError(f"{path}: not JSON lines: {error}") from error


def to_runs(blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Run-length encode a list of ids."""
    runs: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            runs.append((blocks[start], i - start))
            start = i
    return tuple(runs)


class BlockNumbers:
    """Maps the keys of another project's trace to consecutive ids, so that run-length encoding is
    effective."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def runs(self, keys: Sequence[Hashable]) -> tuple[tuple[int, int], ...]:
        """The runs of one prompt's keys."""
        ids = self._ids
        return to_runs([ids.setdefault(key, len(ids)) for key in keys])


def parse_request(row: Mapping[str, Any]) -> Request:
    """Parse one line of this project's format. Raises ``KeyError``, ``TypeError`` or
    ``ValueError``."""
    expected = row.get("return_s")
    tokens = int(row["in"])
    runs = tuple((int(first), int(count)) for first, count in row["r"])
    if any(count < 1 for _, count in runs) or sum(count for _, count in runs) > tokens:
        raise ValueError(f'"r" does not have the blocks of a prompt of {tokens} tokens')
    return Request(
        time_s=float(row["t"]),
        prompt_tokens=tokens,
        runs=runs,
        output_tokens=int(row.get("out", 0)),
        session=int(row.get("s", -1)),
        stop=str(row.get("stop", "")),
        last=bool(row.get("last", False)),
        return_s=None if expected is None else float(expected),
        one_shot=bool(row.get("one_shot", False)),
        pinned=int(row.get("pinned", 0)),
    )


def request_row(request: Request) -> dict[str, Any]:
    """Make a line of this project's format from a request. Fields with default values are left
    out."""
    row: dict[str, Any] = {
        "t": round(request.time_s, 6),
        "s": request.session,
        "in": request.prompt_tokens,
        "out": request.output_tokens,
        "r": [list(run) for run in request.runs],
        "stop": request.stop,
        "last": int(request.last),
        "return_s": request.return_s,
        "one_shot": int(request.one_shot),
        "pinned": request.pinned,
    }
    optional = ("stop", "last", "return_s", "one_shot", "pinned")
    return {name: value for name, value in row.items() if value or name not in optional}


class TraceLines:
    """Makes the lines of this project's trace format; ``head`` is the first line. Numbers replace
    the block keys."""

    def __init__(self, name: str, block_tokens: int, **meta: object) -> None:
        self.head = _line({"meta": {"name": name, "block_tokens": block_tokens, **meta}})
        self._numbers = BlockNumbers()

    def record(
        self, time_s: float, keys: Sequence[Hashable], prompt_tokens: int, **fields: Any
    ) -> str:
        """The line of one request, given its block keys. ``fields`` are those of ``Request``."""
        return self.request(Request(time_s, prompt_tokens, self._numbers.runs(keys), **fields))

    @staticmethod
    def request(request: Request) -> str:
        """The line of one request whose blocks already have numbers."""
        return _line(request_row(request))

    @property
    def different_blocks(self) -> int:
        """Count the blocks that have a number."""
        return len(self._numbers)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


class TraceWriter:
    """Writes this project's format, request by request; use it as a context manager.

    ``record`` accepts any hashable keys, for example a running server's chunk keys; the file
    contains only numbers in their place. For one process and one thread. An existing file is
    replaced; only its owner can read the new file.
    """

    def __init__(self, path: str | Path, name: str, block_tokens: int, **meta: object) -> None:
        self._path = Path(path)
        self._lines = TraceLines(name, block_tokens, **meta)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        raw: IO[bytes] = os.fdopen(os.open(self._path, flags, 0o600), "wb")
        self._raw = raw
        if self._path.suffix == ".gz":
            raw = cast("IO[bytes]", gzip.GzipFile(self._path.name, "wb", fileobj=raw))
        self._file = io.TextIOWrapper(raw, encoding="utf-8")
        self._file.write(self._lines.head)

    def record(
        self, time_s: float, keys: Sequence[Hashable], prompt_tokens: int, **fields: Any
    ) -> None:
        """Append one request, given its block keys. ``fields`` are those of ``Request``."""
        self._file.write(self._lines.record(time_s, keys, prompt_tokens, **fields))

    def write(self, request: Request) -> None:
        """Append one request whose blocks already have numbers."""
        self._file.write(self._lines.request(request))

    def flush(self) -> None:
        """Flush, so that other processes can read everything written so far."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
        self._raw.close()  # a compressed file does not close it

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
