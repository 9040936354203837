"""Contracts: the facts about one version of vLLM, with our uses of it. Those of known versions are
in the folder ``snapshots``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from offload.connector.contract.answers import CALLS, Answers, Facts, add_declared, calling_modules
from offload.connector.contract.declared import Declared, declared
from offload.connector.contract.library import Library
from offload.connector.contract.source import PackageSource, SourceError, ours
from offload.connector.contract.uses import CALLED, OVERRIDDEN, TYPING, CallShape, Use, derive

SNAPSHOTS = Path(__file__).with_name("snapshots")
COMPAT = "offload/connector/compat/"
_COMPAT = re.compile(rf"{COMPAT}(?:doctor/)?v(\d+)_(\d+)\.py")
TESTED = ("0.32.0", "0.33.0")
"""The versions of vLLM with which the test suite runs."""
Version = tuple[int, int]


@dataclass(frozen=True)
class Need:
    """How we use one name of vLLM. ``in_server`` is true if a running server uses it, ``calls`` has
    the arguments that we pass, and ``ours`` the methods with which we override it."""

    in_server: bool = False
    calls: tuple[CallShape, ...] = ()
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contract:
    """The facts about one version of vLLM. ``modules`` are the modules that call us. Our ``lines``
    are not kept."""

    version: str
    classes: Mapping[str, str]
    modules: tuple[str, ...]
    facts: Facts
    needs: Mapping[str, Need]
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def minor_of(version: str) -> Version:
    """The first two numbers of a version. Raises ``SourceError``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise SourceError(f"{version!r} is not a version such as 0.33.0")
    return int(found[1]), int(found[2])


def contract_of(
    source: PackageSource, own: PackageSource | None = None, table: Declared | None = None
) -> Contract:
    """Make the contract of the vLLM in a source, with our own source or another one. Raises
    ``SourceError``."""
    version = source.version()
    own, table = own or ours(), table or declared()
    library = Library(source, own)
    uses = derive(own, library, other_versions(own, minor_of(version)))
    add_declared(uses, table, own)
    classes = {name: at for name, at in sorted(uses.classes.items()) if at.startswith("vllm")}
    answers = Answers(library, classes)
    modules = calling_modules(source, table)
    hooks = [key for key, each in uses.by_key.items() if any(use.how == OVERRIDDEN for use in each)]
    facts: Facts = answers.orders(table) | answers.calls(table, modules, hooks)
    called = {key.partition(":")[0] for key in _functions(facts)}
    for key in uses.by_key:
        if key not in facts:
            facts[key] = None if key.startswith(CALLS) else answers.to(key)
    return Contract(
        version,
        classes,
        tuple(sorted(called)),
        dict(sorted(facts.items())),
        {key: _need(each, table) for key, each in sorted(uses.by_key.items())},
        {key: tuple(sorted({use.line for use in each})) for key, each in uses.by_key.items()},
    )


def _functions(facts: Facts) -> list[str]:
    found = []
    for key, fact in facts.items():
        if key.startswith(CALLS) and fact is not None:
            found += fact["from"]
    return found


def other_versions(own: PackageSource, version: Version) -> frozenset[str]:
    """Our files for other versions of vLLM: only one of those in ``compat`` is used."""
    found = {path: at for path in own.paths() if (at := _COMPAT.fullmatch(path))}
    versions = {path: (int(at[1]), int(at[2])) for path, at in found.items()}
    usable = [each for each in versions.values() if each <= version]
    chosen = max(usable) if usable else min(versions.values(), default=(0, 0))
    return frozenset(path for path, each in versions.items() if each != chosen)


def _need(uses: list[Use], table: Declared) -> Need:
    running = [use for use in uses if use.how != TYPING]
    return Need(
        in_server=any(table.runs_in_server(use.line) for use in running),
        calls=tuple(sorted({use.call for use in running if use.how == CALLED and use.call})),
        ours=tuple(sorted({use.ours for use in running if use.how == OVERRIDDEN})),
    )


# -- files -----------------------------------------------------------------------------------


def write_snapshot(contract: Contract, version: str) -> Path:
    """Write a contract under a version such as ``0.33``, one fact per line for reviews."""
    path = SNAPSHOTS / f"{version}.json"
    facts = ",\n".join(f"  {_line(key)}: {_line(each)}" for key, each in contract.facts.items())
    needs = ",\n".join(f"  {_line(key)}: {_line(each)}" for key, each in contract.needs.items())
    parts = (
        f'"version": {_line(contract.version)}',
        f'"classes": {_line(contract.classes)}',
        f'"modules": {_line(contract.modules)}',
        f'"facts": {{\n{facts}\n}}',
        f'"needs": {{\n{needs}\n}}',
    )
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def _line(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def snapshot_versions() -> list[Version]:
    """The versions whose contracts are kept, oldest first."""
    return sorted(minor_of(path.stem) for path in SNAPSHOTS.glob("*.json"))


def load(version: Version) -> Contract:
    """The kept contract of a version. Raises ``SourceError``."""
    path = SNAPSHOTS / f"{version[0]}.{version[1]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contract)
    except (OSError, msgspec.MsgspecError) as error:
        known = ", ".join(f"{a}.{b}" for a, b in snapshot_versions())
        raise SourceError(
            f"no contract of vLLM {version[0]}.{version[1]} is kept (kept: {known}): {error}"
        ) from error


def nearest_tested(version: Version) -> Version:
    """The tested version to compare with: the newest one up to this version, else the oldest."""
    known = sorted(map(minor_of, TESTED))
    return max((each for each in known if each <= version), default=known[0])
