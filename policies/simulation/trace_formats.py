"""Reads other projects' traces, and detects their format.
* ``mooncake``: ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, one id
  per 512 tokens, the last one possibly of a partial block (kvcache-ai/Mooncake, FAST 2025).
* ``bailian``: ``{"chat_id", "parent_chat_id", "timestamp": s, "input_length", "output_length",
  "turn", "hash_ids": [...]}``, one id per 16 tokens (Qwen Bailian anonymous usage traces).
* ``kv-events``: batches of vLLM's KV cache events, one JSON value per line, as ``{"ts", "events":
  [...]}`` or the array ``[ts, [...], rank]``. A ``BlockStored`` event counts as a request for the
  chain from the root to its last block, if it is of the GPU's cache and of the first group in the
  trace (other events describe the same tokens). A request that hits completely causes no event, so
  hit ratios of such a trace are lower bounds.
* ``kvtiers``: this project's format (``policies.simulation.trace``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from policies.simulation.trace import (
    BlockNumbers,
    Request,
    Trace,
    TraceError,
    json_lines,
    parse_request,
)

FORMATS = ("kvtiers", "mooncake", "bailian", "kv-events")


def read_trace(path: str | Path, format: str = "auto", block_tokens: int | None = None) -> Trace:
    """Read a trace; ``auto`` detects the format from the first line. Raises ``TraceError`` or
    ``OSError``."""
    where = Path(path)
    if format == "auto":
        format = _detect(where)
    if format not in _READERS:
        raise TraceError(f'unknown trace format "{format}". Available: auto, {", ".join(FORMATS)}.')
    trace = _READERS[format](where, block_tokens)
    if not trace.requests:
        raise TraceError(f"{where}: holds no request with a full block (read as {format})")
    return trace


def _detect(path: Path) -> str:
    first: list[Any] = [row for _, row in islice(json_lines(path), 1)]
    row = first[0] if first else None
    if isinstance(row, list) or (isinstance(row, dict) and "events" in row):
        return "kv-events"
    if isinstance(row, dict) and "meta" in row:
        return "kvtiers"
    if isinstance(row, dict) and "hash_ids" in row:
        return "bailian" if "chat_id" in row else "mooncake"
    raise TraceError(f"{path}: the first line is of no known format ({', '.join(FORMATS)})")


def _own(path: Path, block_tokens: int | None) -> Trace:
    lines = json_lines(path)
    try:
        _, first = next(lines)
        meta = first["meta"]
        tokens = int(meta["block_tokens"])
    except (KeyError, TypeError, ValueError, OverflowError, StopIteration) as error:
        raise TraceError(f"{path}: line 1 must be meta with block_tokens ({error!r})") from error
    if tokens < 1:
        raise TraceError(f"{path}: line 1: block_tokens must be at least 1 (got {tokens})")
    if block_tokens not in (None, tokens):
        raise TraceError(
            f"{path}: its first line says {tokens} tokens per block (got {block_tokens}). "
            "Leave the number of tokens out"
        )
    requests = [_guard(path, number, parse_request, row) for number, row in lines]
    full = [request for request in requests if request.runs]
    return _sorted(str(meta.get("name", path.name)), tokens, full, meta)


def _guard(
    path: Path, number: int, parse: Callable[[Mapping[str, Any]], Request], row: Any
) -> Request:
    try:
        return parse(row)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: line {number}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f'has no "{error.args[0]}"' if isinstance(error, KeyError) else repr(error)


def _sorted(name: str, block_tokens: int, found: list[Request], meta: Mapping[str, Any]) -> Trace:
    return Trace(name, block_tokens, sorted(found, key=lambda request: request.time_s), meta)


def _hashed(path: Path, block_tokens: int, per_second: float, chats: bool) -> Trace:
    """Reads the format of Mooncake and Bailian: a list of prefix hashes per request."""
    numbers = BlockNumbers()
    sessions: dict[Any, int] = {}

    def parse(row: Mapping[str, Any]) -> Request:
        tokens, ids = int(row["input_length"]), row["hash_ids"]
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
            raise TypeError("hash_ids is not a list of numbers")
        session = -1
        if chats:
            parent = row.get("parent_chat_id", -1)
            session = sessions.get(parent, len(sessions))
            sessions[row["chat_id"]] = session
        return Request(
            time_s=float(row["timestamp"]) / per_second,
            prompt_tokens=tokens,
            runs=numbers.runs(ids[: tokens // block_tokens]),
            output_tokens=int(row.get("output_length", 0)),
            session=session,
        )

    found = [_guard(path, number, parse, row) for number, row in json_lines(path)]
    return _sorted(path.name, block_tokens, [request for request in found if request.runs], {})


def _mooncake(path: Path, block_tokens: int | None) -> Trace:
    return _hashed(path, block_tokens or 512, 1000.0, chats=False)


def _bailian(path: Path, block_tokens: int | None) -> Trace:
    return _hashed(path, block_tokens or 16, 1.0, chats=True)


def _kv_events(path: Path, block_tokens: int | None) -> Trace:
    parents: dict[Hashable, Hashable | None] = {}
    numbers = BlockNumbers()
    found: list[Request] = []
    size = block_tokens or 0
    group: object = ...
    for number, batch in json_lines(path):
        try:
            time_s, events = (
                (batch["ts"], batch["events"]) if isinstance(batch, dict) else batch[:2]
            )
            for event in events:
                if event["type"] != "BlockStored" or event.get("medium") not in (None, "GPU"):
                    continue
                group = event.get("group_idx") if group is ... else group
                if event.get("group_idx") != group:
                    continue
                size = size or int(event["block_size"])
                chain = _chain(parents, event["parent_block_hash"], event["block_hashes"])
                found.append(Request(float(time_s), len(chain) * size, numbers.runs(chain)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{path}: line {number}: {_reason(error)}") from error
    return _sorted(path.name, size or 1, found, {})


def _chain(
    parents: dict[Hashable, Hashable | None], parent: Hashable | None, stored: list[Hashable]
) -> list[Hashable]:
    """The chain down to the last stored block, starting at its oldest known ancestor."""
    found: dict[Hashable, None] = {}  # a damaged file may name a block as its own ancestor
    while parent is not None and parent in parents and parent not in found:
        found[parent] = None
        parent = parents[parent]
    above = list(found)
    above.reverse()
    last = above[-1] if above else None
    for key in stored:
        parents[key] = last
        last = key
    return [*above, *stored]


_READERS: dict[str, Callable[[Path, int | None], Trace]] = {
    "kvtiers": _own,
    "mooncake": _mooncake,
    "bailian": _bailian,
    "kv-events": _kv_events,
}
