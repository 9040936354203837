"""The state machine of a chunk in one tier. ``TierIndex`` executes this table.

    ABSENT   -reserve-> FILLING   -commit-> RESIDENT  -pin-> PINNED
    ABSENT   -recover-> RESIDENT
    FILLING  -abort->   ABSENT    (DOOMED while others pin it)
    RESIDENT -evict, drop-> ABSENT
    PINNED   -unpin (last)-> RESIDENT
    FILLING, PINNED -drop-> DOOMED   -last unpin, commit or abort-> ABSENT

A DOOMED chunk cannot be hit, and its location is not reused before the last job has released it.
When a FILLING chunk is dropped, the job that fills it counts as one more pin from then on.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class ChunkState(enum.Enum):
    """The state of a chunk in one tier."""

    ABSENT = "absent"
    FILLING = "filling"
    RESIDENT = "resident"
    PINNED = "pinned"
    DOOMED = "doomed"

    __hash__ = object.__hash__  # members are singletons; ``Enum``'s hash is a Python function


class ChunkEvent(enum.Enum):
    """An event in the life of a chunk."""

    RESERVE = "reserve"
    RECOVER = "recover"
    COMMIT = "commit"
    ABORT = "abort"
    PIN = "pin"
    UNPIN = "unpin"
    DROP = "drop"
    EVICT = "evict"

    __hash__ = object.__hash__


class Transition(NamedTuple):
    """The effect of an event: ``pins`` is added to the chunk's pins, which must not become
    negative; then the chunk is in state ``free`` if it has no pins and in ``pinned`` if it has
    some."""

    free: ChunkState
    pinned: ChunkState
    pins: int = 0


_S, _E = ChunkState, ChunkEvent

TRANSITIONS: dict[ChunkEvent, dict[ChunkState, Transition]] = {
    _E.RESERVE: {_S.ABSENT: Transition(_S.FILLING, _S.FILLING)},
    _E.RECOVER: {_S.ABSENT: Transition(_S.RESIDENT, _S.PINNED)},
    _E.COMMIT: {
        _S.FILLING: Transition(_S.RESIDENT, _S.PINNED),
        _S.DOOMED: Transition(_S.ABSENT, _S.DOOMED, pins=-1),
    },
    _E.ABORT: {
        _S.FILLING: Transition(_S.ABSENT, _S.DOOMED),
        _S.DOOMED: Transition(_S.ABSENT, _S.DOOMED, pins=-1),
    },
    _E.PIN: {
        _S.FILLING: Transition(_S.FILLING, _S.FILLING, pins=1),
        _S.RESIDENT: Transition(_S.RESIDENT, _S.PINNED, pins=1),
        _S.PINNED: Transition(_S.RESIDENT, _S.PINNED, pins=1),
    },
    _E.UNPIN: {
        _S.FILLING: Transition(_S.FILLING, _S.FILLING, pins=-1),
        _S.PINNED: Transition(_S.RESIDENT, _S.PINNED, pins=-1),
        _S.DOOMED: Transition(_S.ABSENT, _S.DOOMED, pins=-1),
    },
    _E.DROP: {
        _S.ABSENT: Transition(_S.ABSENT, _S.ABSENT),
        _S.FILLING: Transition(_S.DOOMED, _S.DOOMED, pins=1),
        _S.RESIDENT: Transition(_S.ABSENT, _S.DOOMED),
        _S.PINNED: Transition(_S.ABSENT, _S.DOOMED),
        _S.DOOMED: Transition(_S.DOOMED, _S.DOOMED),
    },
    _E.EVICT: {_S.RESIDENT: Transition(_S.ABSENT, _S.PINNED)},
}
"""Every allowed event, by the states in which it is allowed; any other event is an
``InvariantError``."""
