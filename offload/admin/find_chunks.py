"""Whether a chunk that a server missed lies in another namespace, and in which fields that differs.

For the command line: looks into stores that other processes may be using, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.namespaces.inventory import NamespaceFolder, find_homes
from offload.namespaces.manifest import ABSENT, Namespace, differing_fields
from tiers.base import TierError
from tiers.folders.folder import StoreUnusableError
from tiers.offline.inspect import StoreChangedError

FIELDS_MAX = 8


@dataclass(frozen=True, slots=True)
class Other:
    """Another namespace that holds a chunk. ``differs`` has one text per field: its value there,
    and the server's."""

    namespace: str
    differs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"namespace": self.namespace, "differs": list(self.differs)}


def find_elsewhere(folder: Path, own: str, keys: Sequence[bytes]) -> dict[bytes, list[Other]]:
    """The namespaces other than ``own`` at or below ``folder`` that hold these keys. Stores that
    cannot be read are passed over. Raises ``NotADirectoryError``."""
    homes = find_homes(folder)
    mine = next((home for home in homes if home.name == own), None)
    found: dict[bytes, list[Other]] = {}
    for home in homes:
        if home.name == own:
            continue
        held = _held(home, keys)
        other = Other(home.name, _differs(home, mine))
        for key in held:
            found.setdefault(key, []).append(other)
    return found


def _held(home: NamespaceFolder, keys: Sequence[bytes]) -> set[bytes]:
    held: set[bytes] = set()
    for store in home.stores:
        trouble = (StoreUnusableError, StoreChangedError, TierError, OSError)
        with contextlib.suppress(*trouble), contextlib.closing(store.open()) as reader:
            held |= {key for key in keys if reader.find(key) is not None}
    return held


def _differs(home: NamespaceFolder, mine: NamespaceFolder | None) -> tuple[str, ...]:
    if mine is None or not mine.fields or not home.fields:
        return ()
    pairs = differing_fields(Namespace.of(home.fields), Namespace.of(mine.fields))
    return tuple(f"{path}: {_cut(there)}, not {_cut(here)}" for path, there, here in pairs)[
        :FIELDS_MAX
    ]


def _cut(value: object) -> str:
    text = "(absent)" if value is ABSENT else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
