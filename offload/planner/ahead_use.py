"""The progress of the reads ahead for one request, and their use in the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The state of one request's reads. ``is_read``: all chunks that are read ahead for it have
    arrived, or nearly all; ``since`` is when the first was read, if any."""

    is_read: bool
    since: float | None


@dataclass(frozen=True, slots=True)
class AheadUse:
    """``tokens`` of the request's load were read ahead, of which ``late_tokens`` were still being
    read when the load was planned. The reads of the others took ``saved_s``. ``wasted_tokens`` were
    read ahead for it and not loaded."""

    tokens: int = 0
    late_tokens: int = 0
    saved_s: float = 0.0
    wasted_tokens: int = 0


NOT_READ_AHEAD = AheadUse()
