"""Reads the controls and hints of clients in the ``kv_transfer_params`` of a request.

    "kv_transfer_params": {"kvtiers": {"no_store": true, "tiers": ["cpu"], "pin_s": 600}}

Pure. Controls apply only to their request, and are obeyed. Hints, in the same object, describe what
follows the request. No client input may raise an exception: unreadable values are ignored and
described, and the answer's ``kv_transfer_params`` return the description.

If a value was not understood but may have been intended to keep a prompt off the tiers, the prompt
is kept off them. Such values are an unknown name in the object, a value that is not an object, and
a similar name elsewhere in the parameters (``kvtier``, a bare ``no_store``). Other connectors'
parameters are ignored.

An example of hints:

    "kv_transfer_params": {"kvtiers": {"session": "c-17", "session_end": true}}

The names and meanings of hints are those of ``policies.hints``. They never change an answer.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from typing import Any

from offload.index.request_options import NO_CONTROLS, NO_HINTS, Controls, RequestHints
from offload.layout.keys import CPU
from policies import hints as names

SESSION_MAX = 256
"""Maximum length of a session's name in characters."""
RETURN_MAX_S = 7 * 86_400.0
TOKENS_MAX = 1 << 53
"""A number larger than any prompt, and exact as a float."""


def parse_hints(params: object) -> tuple[RequestHints, list[str]]:
    """The hints in a request's ``kv_transfer_params``, and descriptions of invalid ones.

    ``session`` is a text or a number; ``session_end``, ``one_shot`` and ``tool_call`` are true or
    false; ``return_s`` is seconds from now, with ``tool_call``; ``pinned`` is true for the whole
    prompt, or a number of first tokens, such as those of a system prompt; ``priority`` is ``low``,
    ``normal`` or ``high``. The same object may contain controls (see ``parse_controls``).
    """
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if given is None:
        return NO_HINTS, []
    if not isinstance(given, Mapping):
        return NO_HINTS, [f'"{FIELD}" must be an object of hints']
    good: dict[str, Any] = {}
    invalid: list[str] = []
    for name, value in islice(given.items(), NAMES_MAX):
        expected = _EXPECTED.get(name) if isinstance(name, str) else None
        if name in CONTROL_NAMES:
            continue
        if expected is not None and _is_valid(name, value):
            good[name] = value
        elif len(invalid) >= INVALID_MAX:
            continue  # no further problem is described, and the search for a similar name is slow
        elif expected is None:
            invalid.append(f"there is no hint {show(name)} ({_advice(name)})")
        else:
            invalid.append(f"{name} must be {expected} (got {show(value)})")
    if len(given) > NAMES_MAX:
        invalid.append(f"{len(given)} names, of which {NAMES_MAX} were read")
    return _to_hints(good), invalid[:INVALID_MAX]


def _advice(name: object) -> str:
    near = nearest(name) if isinstance(name, str) and len(name) <= PARAMETER_CHARS_MAX else None
    return f'did you mean "{near}"?' if near else f"known: {', '.join(KNOWN_NAMES)}"


_EXPECTED = {
    names.SESSION: f"a text of at most {SESSION_MAX} characters or a whole number",
    names.ONE_SHOT: "true or false",
    names.PINNED: "true, false or a number of tokens",
    names.SESSION_END: "true or false",
    names.TOOL_CALL: "true or false",
    names.RETURN_S: f"seconds from 0 to {RETURN_MAX_S:.0f}",
    names.PRIORITY: '"low", "normal" or "high"',
}


def _is_valid(name: str, value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == names.SESSION:
        return whole or (isinstance(value, str) and 0 < len(value) <= SESSION_MAX)
    if name == names.RETURN_S:
        number = whole or isinstance(value, float)
        return number and 0 <= value <= RETURN_MAX_S  # type: ignore[operator]  # not a number: False
    if name == names.PINNED and whole:
        return value >= 0  # type: ignore[operator]  # a whole number
    if name == names.PRIORITY:
        return isinstance(value, str) and value in names.PRIORITIES
    return isinstance(value, bool)


def _to_hints(good: Mapping[str, Any]) -> RequestHints:
    pinned = good.get(names.PINNED, 0)
    pinned_tokens = float("inf") if pinned is True else float(min(pinned, TOKENS_MAX))
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
    if names.SESSION in good:  # including the session 0
        stored[names.SESSION] = good[names.SESSION]
    if not (stored or ended or pinned_tokens):
        return NO_HINTS
    return RequestHints(stored, ended, pinned_tokens)


FIELD = "kvtiers"
"""The name of the object in ``kv_transfer_params``, which other connectors use as well."""
REPORT = "kvtiers_report"
"""The name of the report in the ``kv_transfer_params`` of the answer. It is a different name,
because some routers send an answer's parameters with the next request."""

NO_STORE = "no_store"
NO_LOAD = "no_load"
MAX_LOAD_TOKENS = "max_load_tokens"
TIERS = "tiers"
PIN_S = "pin_s"
CONTROL_NAMES = (NO_STORE, NO_LOAD, MAX_LOAD_TOKENS, TIERS, PIN_S)
KNOWN_NAMES = (*names.NAMES, *CONTROL_NAMES)
"""All names that the object may have."""
_PRIVACY = (NO_STORE, TIERS)
"""Controls that keep a prompt off the tiers."""

PIN_MAX_S = 86_400.0
NAMES_MAX = 64
"""Maximum number of names that are read from one request's object."""
PARAMETER_CHARS_MAX = 40
"""Maximum length of a parameter's name that is compared with kvtiers' names."""
NEAR = 0.85
"""A name at least this similar is treated as a misspelt one."""
INVALID_MAX = 8
"""Maximum number of problems that are described; more would not help."""


def parse_controls(params: object, tiers: Sequence[str]) -> tuple[Controls, list[str]]:
    """The controls in a request's ``kv_transfer_params``, and descriptions of invalid ones.

    ``tiers`` are the names of the lower tiers. The request's ``tiers`` is a list of names that may
    be read and written, or ``{"read": [...], "write": [...]}``.
    """
    if not isinstance(params, Mapping):
        return NO_CONTROLS, []
    given = params.get(FIELD)
    invalid: list[str] = []
    is_doubtful = _check_siblings(params, invalid) or not _is_understood(given)
    controls = NO_CONTROLS
    if isinstance(given, Mapping) and any(name in given for name in CONTROL_NAMES):
        controls = _read(given, tiers, invalid)
    return replace(controls, no_store=True, is_doubtful=True) if is_doubtful else controls, invalid


def _read(given: Mapping[str, Any], tiers: Sequence[str], invalid: list[str]) -> Controls:
    read, write = _tiers(given.get(TIERS), tiers, invalid)
    return Controls(
        no_store=_flag(given, NO_STORE, invalid, unreadable=True) or write == frozenset(),
        no_load=_flag(given, NO_LOAD, invalid) or read == frozenset(),
        max_load_tokens=_tokens(given, invalid),
        read=read,
        write=write,
        pin_s=_seconds(given, invalid),
    )


def nearest(name: str, known: Iterable[str] = KNOWN_NAMES) -> str | None:
    """The known name that a client may have meant, if there is one."""
    matcher = SequenceMatcher(b=_plain(name))
    best, best_ratio = None, NEAR
    for one in known:
        matcher.set_seq1(_plain(one))
        # last, because it is slow
        bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
        if all(ratio() >= best_ratio for ratio in bounds):
            best, best_ratio = one, matcher.ratio()
    return best


def _is_understood(given: object) -> bool:
    """True if the object cannot contain an unknown privacy control."""
    if given is None:
        return True
    return (
        isinstance(given, Mapping)
        and len(given) <= len(KNOWN_NAMES)
        and all(name in KNOWN_NAMES for name in given)
    )


def _check_siblings(params: Mapping[Any, Any], invalid: list[str]) -> bool:
    """Describe parameters beside the object that resemble those of kvtiers; return whether one may
    have been intended to keep the prompt off the tiers."""
    is_doubtful = False
    for name, value in islice(params.items(), NAMES_MAX):
        meant = _meant(name) if isinstance(name, str) and len(name) <= PARAMETER_CHARS_MAX else None
        if meant is None:
            continue
        if meant == FIELD:
            invalid.append(f'{show(name)} is not read: did you mean "{FIELD}"?')
            is_doubtful = is_doubtful or not _is_harmless(value)
        else:
            invalid.append(
                f'{show(name)} is not read there: write {{"{FIELD}": {{"{meant}": ...}}}}'
            )
            is_doubtful = is_doubtful or (meant in _PRIVACY and not _says_no(value))
    return is_doubtful


def _is_harmless(value: object) -> bool:
    """True if an object under a similar name contains no privacy control."""
    if not _is_understood(value):
        return False
    given = value if isinstance(value, Mapping) else {}
    return all(_says_no(given.get(name)) for name in _PRIVACY)


def _says_no(value: object) -> bool:
    return value is None or value is False


@lru_cache(maxsize=256)
def _meant(name: str) -> str | None:
    """The field or control that a parameter's name means, by equal or similar letters."""
    if name in (FIELD, REPORT):
        return None
    plain = _plain(name)
    exact = next((one for one in CONTROL_NAMES if _plain(one) == plain), None)
    if exact is not None:
        return exact
    return nearest(name, (FIELD, NO_STORE, NO_LOAD, MAX_LOAD_TOKENS))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class _ShortRepr(reprlib.Repr):
    """Describes the first few values of a container: to describe all of a client's values may take
    seconds of vLLM's scheduler thread."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict = 2, 4, 4

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _ShortRepr()


def show(value: object) -> str:
    """A client's value as one short line of plain characters."""
    try:
        text = repr(value[:80]) if isinstance(value, str) else _SHORT.repr(value)
    except (ValueError, RecursionError):
        # a number with thousands of digits, or a deeply nested list
        return f"a {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _flag(
    given: Mapping[str, Any], name: str, invalid: list[str], *, unreadable: bool = False
) -> bool:
    """A flag; ``unreadable`` is its value if the client's value is not readable."""
    value = given.get(name, False)
    if isinstance(value, bool):
        return value
    invalid.append(f"{name} must be true or false (got {show(value)})")
    return unreadable and value is not None


def _tokens(given: Mapping[str, Any], invalid: list[str]) -> int | None:
    value = given.get(MAX_LOAD_TOKENS)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    invalid.append(f"{MAX_LOAD_TOKENS} must be a number of tokens (got {show(value)})")
    return None


def _seconds(given: Mapping[str, Any], invalid: list[str]) -> float:
    value = given.get(PIN_S, 0.0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value <= PIN_MAX_S:
        return float(value)
    invalid.append(f"{PIN_S} must be seconds from 0 to {PIN_MAX_S:.0f} (got {show(value)})")
    return 0.0


def _tiers(
    value: object, tiers: Sequence[str], invalid: list[str]
) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """The tiers that may be read and written.

    A wrong value never allows more than the client intended: an unreadable name is ignored, a value
    that is not a list allows no tier, and if a part has an unknown name, a missing part allows no
    tier.
    """
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        both = _numbers(TIERS, value, tiers, invalid)
        return both, both
    others = (name for name in value if name not in ("read", "write"))
    unknown = list(islice(others, INVALID_MAX))
    invalid.extend(f'{TIERS} has no part {show(name)} (parts: "read", "write")' for name in unknown)
    missing = frozenset[int]() if unknown else None
    read, write = (
        _numbers(f"{TIERS}.{part}", value[part], tiers, invalid) if part in value else missing
        for part in ("read", "write")
    )
    return read, write


def _numbers(where: str, value: object, tiers: Sequence[str], invalid: list[str]) -> frozenset[int]:
    known = {"cpu": CPU} | {name: number for number, name in enumerate(tiers)}
    if not isinstance(value, list | tuple):
        invalid.append(f"{where} must be a list of tiers (got {show(value)})")
        return frozenset()
    found = set()
    for name in value[:NAMES_MAX]:
        if isinstance(name, str) and name in known:
            found.add(known[name])
        else:
            invalid.append(f"{where}: no tier {show(name)} (tiers: {', '.join(known)})")
    return frozenset(found)
