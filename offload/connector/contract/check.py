"""Runs the complete check of one source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from offload.connector.contract.compare import Break, OursOf, breaks
from offload.connector.contract.facts import AnyFunction, parameters
from offload.connector.contract.library import Library
from offload.connector.contract.snapshots import (
    Version,
    contract_of,
    load,
    minor_of,
    nearest_tested,
)
from offload.connector.contract.source import PackageSource, ours
from offload.connector.contract.uses import OURS


@dataclass(frozen=True)
class Checked:
    """The outcome. ``not_in_snapshot`` lists uses that the kept contract lacks."""

    version: str
    label: str
    against: str
    compared: int
    breaks: tuple[Break, ...]
    not_in_snapshot: tuple[str, ...]


def check(source: PackageSource, against: Version | None = None) -> Checked:
    """Compare a source with a kept contract, by default that of the nearest tested
    version. Raises ``SourceError``."""
    snapshot = load(against if against is not None else nearest_tested(minor_of(source.version())))
    now = contract_of(source)
    own = ours()
    lines = dict(now.lines)
    for key in snapshot.facts:
        if key not in lines and now.facts.get(key) is None:
            lines[key] = tuple(lines_of(own, key))
    named = breaks(snapshot, now.facts, our_parameters(Library(own)), lines)
    not_in_snapshot = [key for key in now.needs if key not in snapshot.facts]
    return Checked(
        now.version,
        source.label,
        snapshot.version,
        len(snapshot.facts),
        tuple(named),
        tuple(not_in_snapshot),
    )


def lines_of(own: PackageSource, key: str) -> Iterator[str]:
    """The lines of our source in which a name occurs, for a use that could not be derived because
    vLLM no longer has the name."""
    name = re.split(r"[.:]", key.removesuffix("()").removesuffix(":base"))[-1]
    pattern = re.compile(rf"\b{re.escape(name)}\b")
    for path in own.paths():
        if path.startswith(OURS) and "/contract/" not in path:
            for number, line in enumerate((own.read(path) or "").splitlines(), 1):
                if pattern.search(line):
                    yield f"{path}:{number}"


def our_parameters(library: Library) -> OursOf:
    """Looks up the parameters of our methods."""

    def find(name: str) -> list[str] | None:
        module, _, path = name.partition(":")
        class_name, _, method = path.partition(".")
        owner = library.resolve(module, class_name)
        member = library.member(owner, method) if owner is not None and owner.is_class else None
        node = member.node if member is not None else None
        return parameters(node.args) if isinstance(node, AnyFunction) else None

    return find
