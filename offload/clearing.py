"""What ``kvtiers clear`` removes: whole namespaces, and in those that stay the records that were
not used for long. What a live server uses stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.claims import Owner
from offload.namespace_cleanup import remove_namespace, usage
from offload.store_changes import InUseError, is_older, remove_unused
from offload.stores import QUARANTINE, Home, Store
from tiers.folder import prepare


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; each that is given must fit. ``before_ns``: last used before that."""

    names: Sequence[str] = ()
    models: Sequence[str] = ()
    before_ns: int = 0
    set_aside: bool = False

    def fits(self, home: Home) -> bool:
        """Whether a namespace is meant, whatever its age."""
        return (
            (not self.names or home.name.startswith(tuple(self.names)))
            and (not self.models or home.model in self.models)
            and (not self.set_aside or bool(QUARANTINE.fullmatch(home.name)))
        )


@dataclass(slots=True)
class Removal:
    """One namespace to remove, or with ``old`` so many records of its stores."""

    home: Home
    size_bytes: int
    last_used_s: float
    old: dict[Store, int] = field(default_factory=dict)
    done: bool = False
    owners: list[Owner] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the namespace itself goes."""
        return not self.old

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "namespace": self.home.name,
            "model": self.home.model,
            "whole": self.is_whole,
            "records": sum(self.old.values()) if self.old else None,
            "bytes": self.size_bytes,
            "last_used_s": self.last_used_s,
            "removed": self.done,
            "in_use_by": sorted({owner.pid for owner in self.owners}),
        }


def find_removals(homes: Sequence[Home], wanted: Wanted) -> list[Removal]:
    """What fits. Raises what opening a store raises."""
    found = []
    for home in filter(wanted.fits, homes):
        size, last_used = usage(home.folder)
        removal = Removal(home, size, last_used, owners=home.owners())
        is_whole = bool(home.name) and (not wanted.before_ns or last_used * 1e9 < wanted.before_ns)
        if is_whole or (wanted.before_ns and _find_old(removal, wanted.before_ns)):
            found.append(removal)
    return found


def _find_old(removal: Removal, before_ns: int) -> bool:
    """Note the records that were not used since; whether there are any."""
    removal.size_bytes = 0
    for store in removal.home.stores:
        if store.kind == "empty":
            continue
        outside = store.open()
        try:
            sizes = [
                record.stored_bytes
                for batch in outside.batches()
                for record in batch
                if is_older(record, before_ns)
            ]
        finally:
            outside.close()
        if sizes:
            removal.old[store] = len(sizes)
            removal.size_bytes += sum(sizes)
    return bool(removal.old)


def remove(removals: Sequence[Removal], before_ns: int, advance: Callable[[int], None]) -> None:
    """Do it; ``advance`` is told of each. Modifies ``removals``. Raises as ``alone_with`` does."""
    for removal in removals:
        try:
            removal.done = _remove(removal, before_ns)
        except InUseError as error:
            removal.owners = [error.owner]
        if not removal.done:
            removal.owners = removal.home.owners() or removal.owners
        advance(1)


def _remove(removal: Removal, before_ns: int) -> bool:
    """Whether it is gone; ``False`` or ``InUseError`` if a server uses it."""
    home = removal.home
    if removal.is_whole:
        prepare(home.folder.parent, allow_network=True)
        return remove_namespace(home.folder.parent, home.name)
    for store in removal.old:
        removal.old[store] = remove_unused(store, before_ns)
    return True
