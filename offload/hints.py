"""Hints of clients: what ``kv_transfer_params`` of a request says about its future.

    "kv_transfer_params": {"kvtiers": {"session": "c-17", "session_end": true}}

Pure. Names and meanings are those of ``policies.hints``. Nothing a client sends here may raise or
change an answer: what cannot be read is left out and described.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from offload.controls import (
    CONTROL_NAMES,
    FIELD,
    KNOWN_NAMES,
    NAME_MOST,
    NAMES_MOST,
    WRONG_MOST,
    nearest,
    show,
)
from policies import hints as names

SESSION_MOST = 256
"""Characters of a session's name."""
RETURN_MOST_S = 7 * 86_400.0
TOKENS_MOST = 1 << 53
"""What is larger than any prompt, and exact as a float."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a client told of one request. ``stored`` goes with its chunks, ``ended`` is told when
    it ends; the first ``pinned_tokens`` are to be kept as long as possible."""

    stored: Mapping[str, Any] = field(default_factory=dict)
    ended: Mapping[str, Any] = field(default_factory=dict)
    pinned_tokens: float = 0.0

    def of_chunk(self, depth_tokens: int) -> Mapping[str, Any]:
        """The hints of a chunk that ends at this depth."""
        if depth_tokens <= self.pinned_tokens:
            return {**self.stored, names.PINNED: True}
        return self.stored


NO_HINTS = RequestHints()


def parse_hints(params: object) -> tuple[RequestHints, list[str]]:
    """The hints in a request's ``kv_transfer_params``, and what was wrong with others.

    ``session`` is a text or a number; ``session_end``, ``one_shot`` and ``tool_call`` are true or
    false; ``return_s`` is seconds from now, with ``tool_call``; ``pinned`` is true for the whole
    prompt, or the number of its first tokens, as those of a system prompt; ``priority`` is
    ``low``, ``normal`` or ``high``. Controls (``offload.controls``) stand in the same object.
    """
    told = params.get(FIELD) if isinstance(params, Mapping) else None
    if told is None:
        return NO_HINTS, []
    if not isinstance(told, Mapping):
        return NO_HINTS, [f'"{FIELD}" must be an object of hints']
    good: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in islice(told.items(), NAMES_MOST):
        expected = _EXPECTED.get(name) if isinstance(name, str) else None
        if name in CONTROL_NAMES:
            continue
        if expected is not None and _is_valid(name, value):
            good[name] = value
        elif len(wrong) >= WRONG_MOST:
            continue  # a nearest name is looked for in what is told only
        elif expected is None:
            wrong.append(f"there is no hint {show(name)} ({_advice(name)})")
        else:
            wrong.append(f"{name} must be {expected} (got {show(value)})")
    if len(told) > NAMES_MOST:
        wrong.append(f"{len(told)} names, of which {NAMES_MOST} were read")
    return _sorted_out(good), wrong[:WRONG_MOST]


def _advice(name: object) -> str:
    near = nearest(name) if isinstance(name, str) and len(name) <= NAME_MOST else None
    return f'did you mean "{near}"?' if near else f"known: {', '.join(KNOWN_NAMES)}"


_EXPECTED = {
    names.SESSION: f"a text of at most {SESSION_MOST} characters or a whole number",
    names.ONE_SHOT: "true or false",
    names.PINNED: "true, false or a number of tokens",
    names.SESSION_END: "true or false",
    names.TOOL_CALL: "true or false",
    names.RETURN_S: f"seconds from 0 to {RETURN_MOST_S:.0f}",
    names.PRIORITY: '"low", "normal" or "high"',
}


def _is_valid(name: str, value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == names.SESSION:
        return whole or (isinstance(value, str) and 0 < len(value) <= SESSION_MOST)
    if name == names.RETURN_S:
        number = whole or isinstance(value, float)
        return number and 0 <= value <= RETURN_MOST_S  # type: ignore[operator]  # not a number: False
    if name == names.PINNED and whole:
        return value >= 0  # type: ignore[operator]  # a whole number
    if name == names.PRIORITY:
        return isinstance(value, str) and value in names.PRIORITIES
    return isinstance(value, bool)


def _sorted_out(good: Mapping[str, Any]) -> RequestHints:
    pinned = good.get(names.PINNED, 0)
    pinned_tokens = float("inf") if pinned is True else float(min(pinned, TOKENS_MOST))
    stored = {name: good[name] for name in (names.SESSION, names.ONE_SHOT) if good.get(name)}
    ended = {
        name: good[name]
        for name in (names.SESSION_END, names.TOOL_CALL, names.RETURN_S)
        if good.get(name)
    }
    if pinned is True:
        ended[names.PINNED] = True
    if good.get(names.PRIORITY, names.NORMAL) != names.NORMAL:
        stored[names.PRIORITY] = good[names.PRIORITY]
    if names.SESSION in good:  # also the session 0
        stored[names.SESSION] = good[names.SESSION]
    if not (stored or ended or pinned_tokens):
        return NO_HINTS
    return RequestHints(stored, ended, pinned_tokens)
