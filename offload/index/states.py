"""The life of a chunk in a tier, as a table (the rules are in `offload.index.tier_index`).

    ABSENT   -reserve-> FILLING   -commit-> RESIDENT  -pin-> PINNED
    FILLING  -abort->   ABSENT    (DOOMED while others pin it)
    RESIDENT -evict, drop-> ABSENT
    PINNED   -unpin (last)-> RESIDENT
    FILLING, PINNED -drop-> DOOMED   -last unpin, commit or abort-> ABSENT

A DOOMED chunk cannot be hit; its place is not reused before the last job has let go of it.
"""

from __future__ import annotations

import enum


class ChunkState(enum.Enum):
    """Where a chunk stands in one tier."""

    ABSENT = "absent"
    FILLING = "filling"
    RESIDENT = "resident"
    PINNED = "pinned"
    DOOMED = "doomed"


class ChunkEvent(enum.Enum):
    """What can happen to a chunk."""

    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    PIN = "pin"
    UNPIN = "unpin"
    DROP = "drop"
    EVICT = "evict"


_S, _E = ChunkState, ChunkEvent

TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], frozenset[ChunkState]] = {
    (_S.ABSENT, _E.RESERVE): frozenset({_S.FILLING}),
    (_S.ABSENT, _E.DROP): frozenset({_S.ABSENT}),
    (_S.FILLING, _E.COMMIT): frozenset({_S.RESIDENT, _S.PINNED}),
    (_S.FILLING, _E.ABORT): frozenset({_S.ABSENT, _S.DOOMED}),
    (_S.FILLING, _E.PIN): frozenset({_S.FILLING}),
    (_S.FILLING, _E.UNPIN): frozenset({_S.FILLING}),
    (_S.FILLING, _E.DROP): frozenset({_S.DOOMED}),
    (_S.RESIDENT, _E.PIN): frozenset({_S.PINNED}),
    (_S.RESIDENT, _E.DROP): frozenset({_S.ABSENT}),
    (_S.RESIDENT, _E.EVICT): frozenset({_S.ABSENT}),
    (_S.PINNED, _E.PIN): frozenset({_S.PINNED}),
    (_S.PINNED, _E.UNPIN): frozenset({_S.PINNED, _S.RESIDENT}),
    (_S.PINNED, _E.DROP): frozenset({_S.DOOMED}),
    (_S.DOOMED, _E.UNPIN): frozenset({_S.DOOMED, _S.ABSENT}),
    (_S.DOOMED, _E.COMMIT): frozenset({_S.DOOMED, _S.ABSENT}),
    (_S.DOOMED, _E.ABORT): frozenset({_S.DOOMED, _S.ABSENT}),
    (_S.DOOMED, _E.DROP): frozenset({_S.DOOMED}),
}
"""Every allowed event with the states it may lead to; anything else is an ``InvariantError``."""
