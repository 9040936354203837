"""The kinds of values that a configuration may contain, and the code that reads one table of named
fields.

A reader receives a raw JSON value, its path, and the list of problems. It returns the value in its
final form, or ``None`` after it has appended a problem: every problem of a configuration is found
in one pass. This module knows no field by name.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from offload.errors import Problem
from offload.sizes import format_size, parse_size

Reader = Callable[[Any, str, list[Problem]], Any]

_PLAIN = re.compile(r"[A-Za-z0-9_\-]{1,60}", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_POLICY_NAME = re.compile(r"[A-Za-z0-9_.\-]+(:[A-Za-z_][A-Za-z0-9_]*)?", re.ASCII)


class PolicyConfig(msgspec.Struct, frozen=True):
    """A policy, given by name, ``module:Class`` or entry point, with the options for its
    constructor."""

    name: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def spec(self) -> str | dict[str, Any]:
        """The spec for ``policies.registry``: the name, or a mapping of the name and options."""
        return {"name": self.name, **self.options} if self.options else self.name


class EncryptionConfig(msgspec.Struct, frozen=True):
    """Encryption at rest: the file that holds the key."""

    key_file: str


class _Missing:
    """Marks a field without a default."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Missing()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: the function that reads it, and its name in the reference."""

    label: str
    read: Reader
    example: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One option: its name, kind and default, and a sentence for the reference.

    ``shown`` is the text for the default in the reference, if the value itself would not be clear.
    """

    name: str
    kind: Kind
    default: Any
    doc: str
    shown: str = ""


def show(value: Any) -> str:
    """A value as written in the configuration, cut to one short line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """``Did you mean "x"?`` for a near name, else the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f'Did you mean "{close[0]}"?' if close else f"Known here: {', '.join(names)}."


def read_table(
    raw: Any,
    where: str,
    fields: Sequence[Field],
    problems: list[Problem],
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Read every field of ``fields`` from the mapping ``raw``; missing and bad fields get their
    defaults.

    ``elsewhere`` says where names unknown here are valid. Problems are appended.
    """
    known = {field.name: field for field in fields}
    if not isinstance(raw, Mapping):
        problems.append(
            Problem(
                where, f"must be an object (got {show(raw)})", "Write { ... } with its options."
            )
        )
        return {field.name: _default(field) for field in fields}
    unknown = [str(name) for name in raw if name not in known]
    problems.extend(_unknown(name, where, known, elsewhere or {}) for name in unknown)
    return {name: _read(field, raw, where, problems) for name, field in known.items()}


def anything(label: str) -> Kind:
    """A value that its owner parses later."""
    return Kind(label, lambda value, where, problems: value)


def size(bytes_min: int = 1) -> Kind:
    """A size in bytes of at least ``bytes_min``."""

    def read(value: Any, where: str, problems: list[Problem]) -> int | None:
        try:
            found = parse_size(value)
        except ValueError as error:
            what, _, fix = str(error).partition(". ")
            problems.append(Problem(where, f"{what} (got {show(value)})", fix + "."))
            return None
        if found < bytes_min:
            what = f"must be at least {format_size(bytes_min)} (got {show(value)})"
            problems.append(Problem(where, what, 'Use a size such as "8GiB".'))
            return None
        return found

    return Kind("size", read, "200GiB")


def count(low: int, high: int) -> Kind:
    """A whole number in ``[low, high]``."""

    def read(value: Any, where: str, problems: list[Problem]) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            problems.append(_wrong(where, value, "a whole number", _range_text(low, high)))
            return None
        if not low <= value <= high:
            problems.append(_outside(where, value, low, high))
            return None
        return value

    return Kind(f"whole number, {_range_text(low, high)}", read)


def number(low: float, high: float, unit: str = "") -> Kind:
    """A finite number in ``[low, high]``."""

    def read(value: Any, where: str, problems: list[Problem]) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(_wrong(where, value, "a number", _range_text(low, high, unit)))
            return None
        if not low <= value <= high:  # always true for nan
            problems.append(_outside(where, value, low, high, unit))
            return None
        return float(value)

    return Kind(f"number, {_range_text(low, high, unit)}", read)


def choice(*names: str) -> Kind:
    """One of a few words."""

    def read(value: Any, where: str, problems: list[Problem]) -> str | None:
        if isinstance(value, str) and value in names:
            return value
        near = difflib.get_close_matches(value.lower(), names, 1) if isinstance(value, str) else []
        fix = f'Did you mean "{near[0]}"?' if near else ""
        problems.append(Problem(where, f"must be {_or(names)} (got {show(value)})", fix))
        return None

    return Kind(" / ".join(f"`{name}`" for name in names), read)


def flag() -> Kind:
    """``true`` or ``false``."""

    def read(value: Any, where: str, problems: list[Problem]) -> bool | None:
        if isinstance(value, bool):
            return value
        what = f"must be true or false (got {show(value)})"
        problems.append(Problem(where, what, "Write it without quotes."))
        return None

    return Kind("true / false", read)


def path() -> Kind:
    """An absolute path; ``.`` and doubled slashes are removed, ``..`` is refused."""

    def read(value: Any, where: str, problems: list[Problem]) -> str | None:
        if not isinstance(value, str) or not value or not _is_name(value):
            what = f"must be an absolute path (got {show(value)})"
            problems.append(Problem(where, what, 'For example "/var/cache/kv".'))
            return None
        if not value.startswith("/"):
            full = os.path.join("/var/cache", os.path.expanduser(value))
            fix = f"Write the full path, for example {show(full)}."
            problems.append(Problem(where, f"must be absolute (got {show(value)})", fix))
            return None
        if ".." in value.split("/"):
            fix = f"Write the path without it, perhaps {show(os.path.normpath(value))}."
            problems.append(Problem(where, f'must not contain ".." (got {show(value)})', fix))
            return None
        return "/" + os.path.normpath(value).lstrip("/")

    return Kind("absolute path", read, "/var/cache/kv")


def _is_name(text: str) -> bool:
    """Return True if the file system can have such a path. JSON can also contain half a character,
    such as ``"\\ud800"``."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def address() -> Kind:
    """``host:port``."""

    def read(value: Any, where: str, problems: list[Problem]) -> str | None:
        host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if host and colon and _PORT.fullmatch(port) and 0 < int(port) < 1 << 16:
            return str(value)
        what = f"must be host:port (got {show(value)})"
        problems.append(Problem(where, what, 'For example "10.0.0.1:50051".'))
        return None

    return Kind("host:port", read, "10.0.0.1:50051")


def text(example: str) -> Kind:
    """A word without spaces."""

    def read(value: Any, where: str, problems: list[Problem]) -> str | None:
        if isinstance(value, str) and value.isprintable() and not set(value) & set(" \"'"):
            return value
        what = f"must be a string without spaces (got {show(value)})"
        problems.append(Problem(where, what, f'For example "{example}".'))
        return None

    return Kind("string", read, example)


def policy() -> Kind:
    """``"name"``, ``"module:Class"`` or ``{"name": ..., option: value}``."""

    def read(value: Any, where: str, problems: list[Problem]) -> PolicyConfig | None:
        options: dict[str, Any] = {}
        name = value
        if isinstance(value, Mapping):
            options = {str(key): item for key, item in value.items() if key != "name"}
            name = value.get("name")
        if isinstance(name, str) and _POLICY_NAME.fullmatch(name):
            return PolicyConfig(name, options)
        fix = 'Use "lru", "module:Class" or {"name": "lru"} with its options beside the name.'
        problems.append(Problem(where, f"is not a policy (got {show(value)})", fix))
        return None

    return Kind("policy", read)


def encryption() -> Kind:
    """``null`` (off) or ``{"key_file": path}``."""
    key_path = Kind("absolute path", path().read, "/etc/kvtiers.key")
    fields = (Field("key_file", key_path, REQUIRED, ""),)

    def read(value: Any, where: str, problems: list[Problem]) -> EncryptionConfig | None:
        if value is None:
            return None
        found = read_table(value, where, fields, problems)
        return EncryptionConfig(found["key_file"]) if found["key_file"] else None

    return Kind('`{"key_file": path}`', read)


def _read(field: Field, raw: Mapping[str, Any], where: str, problems: list[Problem]) -> Any:
    here = f"{where}.{field.name}"
    if field.name in raw:
        before = len(problems)
        value = field.kind.read(raw[field.name], here, problems)
        return value if len(problems) == before else _default(field)
    if field.default is REQUIRED:
        fix = f'Example: "{field.name}": "{field.kind.example}".'
        problems.append(Problem(here, "is required", fix))
    return _default(field)


def _default(field: Field) -> Any:
    return None if field.default is REQUIRED else field.default


def _unknown(
    name: str, where: str, known: Mapping[str, Field], elsewhere: Mapping[str, str]
) -> Problem:
    here = f"{where}.{name}" if _PLAIN.fullmatch(name) else f"{where}[{show(name)}]"
    if name in elsewhere:
        return Problem(here, "is in the wrong place", f"Move it to {elsewhere[name]}.")
    return Problem(here, "unknown option", nearest(name, known))


def _wrong(where: str, value: Any, wanted: str, allowed: str) -> Problem:
    return Problem(where, f"must be {wanted} (got {show(value)})", f"Allowed: {allowed}.")


def _outside(where: str, value: float, low: float, high: float, unit: str = "") -> Problem:
    between = f"{_number_text(low)} and {_number_text(high)}{unit}"
    return Problem(where, f"must be between {between} (got {show(value)})", "")


def _range_text(low: float, high: float, unit: str = "") -> str:
    return f"{_number_text(low)} to {_number_text(high)}{unit}"


def _number_text(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def _or(names: Sequence[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]
