"""The table of uses that cannot be derived: ``declared.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("declared.toml")


@dataclass(frozen=True)
class Order:
    """Calls whose order within a function of vLLM matters. ``ours`` is the code that relies on this
    order, as ``path:function``."""

    what: str
    at: str
    watch: frozenset[str]
    ours: str


@dataclass(frozen=True)
class Callers:
    """vLLM's calls of the methods of a class that we subclass, or of the additional
    class ``also``. ``receiver`` matches the text before the dot."""

    class_name: str
    also: str
    receiver: str
    within: tuple[str, ...]
    without: tuple[str, ...]


@dataclass(frozen=True)
class Members:
    """Members that one of our files reads from objects without a type annotation."""

    class_name: str
    at: str
    names: tuple[str, ...]
    ours: str


@dataclass(frozen=True)
class Declared:
    """The whole table. ``names`` lists imports that count besides ours, with the parts of our code
    that they affect."""

    apart: tuple[str, ...]
    members: tuple[Members, ...]
    names: tuple[tuple[str, str], ...]
    orders: tuple[Order, ...]
    callers: tuple[Callers, ...]

    def runs_in_server(self, line: str) -> bool:
        """True if one of our source files is part of a running server."""
        return not line.startswith(self.apart)


@cache
def declared() -> Declared:
    """Read the table."""
    table = tomllib.loads(TABLE.read_text())
    return Declared(
        tuple(table["apart"]),
        tuple(
            Members(each["class"], each["at"], tuple(each["names"].split()), each["ours"])
            for each in table["members"]
        ),
        tuple((each["at"], each["ours"]) for each in table["names"]),
        tuple(
            Order(each["what"], each["at"], frozenset(each["watch"].split()), each["ours"])
            for each in table["order"]
        ),
        tuple(
            Callers(
                each["class"],
                each.get("also", ""),
                each["receiver"],
                tuple(each["within"]),
                tuple(each["without"]),
            )
            for each in table["callers"]
        ),
    )
