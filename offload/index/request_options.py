"""The controls and hints of one request, which travel with its chunks.

Values only: ``offload.requests.parse_options`` reads them from the client's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies import hints as names


@dataclass(frozen=True, slots=True)
class RequestHints:
    """A client's hints for one request.

    ``stored`` applies to its chunks, and ``ended`` is reported when it ends. The first
    ``pinned_tokens`` should be kept as long as possible.
    """

    stored: Mapping[str, Any] = field(default_factory=dict)
    ended: Mapping[str, Any] = field(default_factory=dict)
    pinned_tokens: float = 0.0

    def of_chunk(self, depth_tokens: int) -> Mapping[str, Any]:
        """The hints of a chunk that ends at this depth."""
        if depth_tokens <= self.pinned_tokens:
            return {**self.stored, names.PINNED: True}
        return self.stored


NO_HINTS = RequestHints()


@dataclass(frozen=True, slots=True)
class Controls:
    """The controls of one request.

    ``read`` and ``write`` are numbers of tiers (``CPU``: the CPU tier), ``None`` for all; only
    lower tiers count in ``write``, since every chunk passes the CPU tier. ``max_load_tokens``
    bounds the load, ``pin_s`` is the time for which its chunks are pinned. ``is_doubtful`` means
    that the request is not stored because some value was not understood.
    """

    no_store: bool = False
    no_load: bool = False
    max_load_tokens: int | None = None
    read: frozenset[int] | None = None
    write: frozenset[int] | None = None
    pin_s: float = 0.0
    is_doubtful: bool = False


NO_CONTROLS = Controls()
