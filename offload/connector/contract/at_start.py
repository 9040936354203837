"""Checks the installed vLLM before our connector is imported.

A tested version is not checked. Any other version is compared with the nearest tested one, in less
than a tenth of a second. It is refused only for differences with which a server must not run:
missing names that we import or read, calls that do not fit, or hooks that come in another order.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from functools import cache

from offload.connector.contract import calls, snapshots
from offload.connector.contract.answers import CALLS, ORDER, Answers, Facts
from offload.connector.contract.check import our_parameters
from offload.connector.contract.compare import Break, breaks
from offload.connector.contract.declared import declared
from offload.connector.contract.facts import Fact
from offload.connector.contract.library import Library
from offload.connector.contract.snapshots import Contract, load, minor_of, nearest_tested
from offload.connector.contract.source import INSTALLED, PackageSource, open_source, ours
from offload.errors import OffloadError

SHOWN_DIFFERENCES_MAX = 8


class VersionError(OffloadError):
    """The installed vLLM cannot be used with this version of kvtiers."""


@cache
def check_installed() -> str:
    """Compare the vLLM of this process with our uses, unless its version was tested.

    Returns a line for the log, if there is one. Raises ``VersionError``.
    """
    started = time.perf_counter()
    try:
        source = open_source(INSTALLED)
        version = source.version().partition("+")[0]
        if version in snapshots.TESTED:
            return ""
        against = load(nearest_tested(minor_of(version)))
        with _no_collection():
            found = stopping(source, against)
    except Exception as error:  # a failing check must not stop the server
        return f"this vLLM could not be compared with those that were tested: {error!r}"
    if found:
        raise VersionError(_refusal(version, found))
    spent = 1000 * (time.perf_counter() - started)
    return (
        f"vLLM {version} was not tested with this kvtiers ({' and '.join(snapshots.TESTED)} were). "
        f"Everything that a server needs from it is the same as in {against.version} (compared in "
        f"{spent:.0f} ms). python -m offload.connector.contract {INSTALLED} lists all differences"
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn off garbage collection: parsing creates many objects, and each collection would walk all
    of vLLM's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _refusal(version: str, found: list[Break]) -> str:
    lines = [f"  {each}" for each in found[:SHOWN_DIFFERENCES_MAX]]
    lines += [f"  and {len(found) - SHOWN_DIFFERENCES_MAX} more"] * (
        len(found) > SHOWN_DIFFERENCES_MAX
    )
    return (
        f"kvtiers: vLLM {version} lacks what this version of kvtiers needs. Use vLLM "
        f"{' or '.join(snapshots.TESTED)}, or a newer kvtiers. It differs in:\n" + "\n".join(lines)
    )


def stopping(source: PackageSource, against: Contract) -> list[Break]:
    """Find the differences between a kept contract and this source with which a server must not
    start."""
    library, table = Library(source), declared()
    answers = Answers(library, against.classes)
    needed = {key: need for key, need in against.needs.items() if need.in_server}
    facts: Facts = {}
    for key in needed:
        if key.startswith(ORDER):
            continue
        if not key.startswith(CALLS):
            facts[key] = answers.to(key)
            if facts[key] is None and not _must_be_there(key, against, library):
                facts[key] = against.facts.get(key)
    hooks = [key for key, need in needed.items() if need.ours]
    facts |= answers.calls(table, against.modules, hooks)
    for order in table.orders:
        steps = calls.names_in_order(library, order.at, order.watch)
        facts[ORDER + order.at] = _as_kept(steps, against.facts.get(ORDER + order.at))
    found = breaks(against, facts, our_parameters(Library(ours())))
    return [each for each in found if each.is_fatal]


def _must_be_there(key: str, against: Contract, library: Library) -> bool:
    """True if a missing fact is a reason to stop the server.

    A class that we use only through its instances may have moved to another file, where its content
    cannot be found.
    """
    name = key.partition(".")[0].partition(":")[0].removesuffix("()")
    at = against.classes.get(name)
    if at is None or at in against.needs:
        return True
    module, _, class_name = at.partition(":")
    return library.resolve(module, class_name) is not None


def _as_kept(steps: list[str] | None, before: Fact | None) -> Fact | None:
    """The order of steps as a fact, without conditions."""
    known = before["steps"] if before is not None else []
    if steps is None or [name for name, _ in known] == steps:
        return before if steps is not None else None
    return {"is": "order", "steps": [[name, ""] for name in steps]}
