"""The state machine of a chunk in one tier. ``TierIndex`` executes this table.

    ABSENT   -reserve-> FILLING   -commit-> RESIDENT  -pin-> PINNED
    ABSENT   -recover-> RESIDENT
    FILLING  -abort->   ABSENT    (DOOMED while others pin it)
    RESIDENT -evict, drop-> ABSENT
    PINNED   -unpin (last)-> RESIDENT
    FILLING, PINNED -drop-> DOOMED   -last unpin, commit or abort-> ABSENT

A DOOMED chunk cannot be hit, and its location is not reused before the last job has released it.
When a FILLING chunk is dropped, the job that fills it counts as one more pin from then on.

An index has a dict of locations per state (RESIDENT and PINNED share one, ABSENT has none). From
the table and these dicts, the functions below derive how events change many chunks at once.
"""

from __future__ import annotations

import enum
from collections import ChainMap
from collections.abc import Mapping
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

Locations = Mapping[ChunkState, dict[bytes, int] | None]
"""The locations of an index's chunks, by state."""


class Route(NamedTuple):
    """Where one event moves the chunks of one dict of locations.

    Chunks move to ``free``, or to ``pinned`` if they have pins; ``None`` means that they leave the
    tier. Unless ``takes_pinned`` is set, the event is not allowed for chunks with pins.
    """

    source: dict[bytes, int]
    free: dict[bytes, int] | None
    pinned: dict[bytes, int] | None
    takes_pinned: bool


def route(event: ChunkEvent, locations: Locations, state: ChunkState) -> Route:
    """The route of chunks in this state, FILLING or RESIDENT. RESIDENT includes PINNED."""
    row, source = TRANSITIONS[event], locations[state]
    with_pins = ChunkState.PINNED if state is ChunkState.RESIDENT else state
    pinned_row = row.get(with_pins, row[state])
    assert source is not None
    assert row[state].pins == pinned_row.pins == 0
    targets = locations[row[state].free], locations[pinned_row.pinned]
    return Route(source, *targets, with_pins in row)


def entered_by(event: ChunkEvent, locations: Locations) -> dict[bytes, int]:
    """The dict that absent chunks, which have no pins, enter by this event."""
    row = TRANSITIONS[event][ChunkState.ABSENT]
    entered = locations[row.free]
    assert entered is not None
    assert row.pins == 0
    return entered


def pinned_in_place(
    event: ChunkEvent, pins: int, locations: Locations
) -> tuple[list[dict[bytes, int]], Mapping[bytes, int]]:
    """Return the dicts whose chunks this event leaves where they are, and all other dicts as one
    mapping. The event adds ``pins`` to the chunks that stay (``UNPIN``: to those with pins)."""
    row = TRANSITIONS[event]
    stay: list[dict[bytes, int]] = []
    move: list[dict[bytes, int]] = []
    for states in ((_S.RESIDENT, _S.PINNED), (_S.FILLING,), (_S.DOOMED,)):
        held = locations[states[0]]
        assert held is not None
        rows = [row.get(state) for state in states if pins > 0 or state is not _S.RESIDENT]
        stays = all(
            each is not None
            and each.pins == pins
            and locations[each.free] is locations[each.pinned] is held
            for each in rows
        )
        (stay if stays else move).append(held)
    return stay, move[0] if len(move) == 1 else ChainMap(*move)
