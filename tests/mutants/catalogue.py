"""The planted faults: reads them from ``faults/*.toml``, checks them, and applies them to source
text.

Each file is one area. A table names a product file and the tests next to it; each table inside it
is one fault::

    [index]
    file = "offload/index/tier_index.py"
    tests = "tests/offload/index/test_tier_index.py"

    [index.evicts-pinned-chunks]
    breaks = "A chunk is evicted while a load reads it: the request gets other tokens' KV cache."
    old = 'if pins:'
    new = 'if False:'
    after = 'def victims'
    seen_by = ["test_a_pinned_chunk_stays"]

``old`` is a piece of one line that occurs exactly once, or once after ``after``, which occurs
exactly once itself. ``seen_by`` holds test functions of ``tests``, or full pytest ids; without it
the whole file ``tests`` is run.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).resolve().parent / "faults"
PRODUCT = ("offload", "tiers", "policies", "demo")

_GROUP_KEYS = {"file", "tests"}
_NEEDED = {"breaks", "old", "new"}
_ALLOWED = _NEEDED | {"after", "seen_by"}


class CatalogueError(ValueError):
    """A fault cannot be planted as described."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted fault. ``tests`` are pytest ids; ``breaks`` describes the consequence for a
    user."""

    id: str
    area: str
    file: str
    old: str
    new: str
    after: str
    breaks: str
    tests: tuple[str, ...]

    def plant(self, root: Path = ROOT) -> str:
        """The text of the file with the fault in it.

        Raises ``CatalogueError`` unless the file exists and the anchor and the old text each occur
        exactly once, or if the result is not valid Python or is the same program.
        """
        path = root / self.file
        if not path.is_file():
            raise CatalogueError(f"{self.id}: there is no {self.file}{_elsewhere(self, root)}")
        source = path.read_text()
        start = 0
        if self.after:
            if source.count(self.after) != 1:
                raise CatalogueError(
                    f"{self.id}: {self.after!r} occurs {source.count(self.after)} times "
                    f"in {self.file}, not once"
                )
            start = source.index(self.after) + len(self.after)
        else:
            if source.count(self.old) != 1:
                raise CatalogueError(
                    f"{self.id}: {self.old!r} occurs {source.count(self.old)} times in "
                    f"{self.file}, not once{_elsewhere(self, root)}"
                )
        at = source.find(self.old, start)
        if at < 0:
            raise CatalogueError(
                f"{self.id}: {self.old!r} does not follow {self.after!r} in {self.file}"
            )
        planted = source[:at] + self.new + source[at + len(self.old) :]
        try:
            same = ast.dump(ast.parse(planted)) == ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise CatalogueError(f"{self.id}: planted, {self.file} is no Python: {error}") from None
        if same:
            raise CatalogueError(f"{self.id}: planted, {self.file} is the same program")
        return planted


def _elsewhere(mutant: Mutant, root: Path) -> str:
    """Names the file that contains the old text now, in case it was moved."""
    anchor = mutant.after or mutant.old
    found = [
        path.relative_to(root).as_posix()
        for folder in PRODUCT
        for path in sorted((root / folder).rglob("*.py"))
        if anchor in path.read_text() and path != root / mutant.file
    ]
    return f"; it occurs in {', '.join(found)}" if found else ""


def load(folder: Path = FAULTS) -> list[Mutant]:
    """All faults, by area; raises ``CatalogueError`` for malformed entries."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        for name, group in tomllib.loads(path.read_text()).items():
            mutants += _group(path.stem, name, group)
    ids = [mutant.id for mutant in mutants]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise CatalogueError(f"more than one fault is called {', '.join(twice)}")
    return mutants


def _group(area: str, name: str, group: Any) -> list[Mutant]:
    where = f"{area}.toml, [{name}]"
    if not isinstance(group, dict) or not group.keys() >= _GROUP_KEYS:
        raise CatalogueError(f"{where}: needs {' and '.join(sorted(_GROUP_KEYS))}")
    file, tests = group["file"], group["tests"]
    found = []
    for key, fault in group.items():
        if key in _GROUP_KEYS:
            continue
        keys = set(fault) if isinstance(fault, dict) else set()
        if not _NEEDED <= keys <= _ALLOWED:
            wrong = sorted((_NEEDED - keys) | (keys - _ALLOWED))
            raise CatalogueError(f"{where}: {key}: missing or unknown: {', '.join(wrong)}")
        if "\n" in fault["old"] + fault.get("after", "") or not fault["old"].strip():
            raise CatalogueError(f"{where}: {key}: the old text and its anchor are parts of a line")
        found.append(
            Mutant(
                id=f"{name}.{key}",
                area=area,
                file=file,
                old=fault["old"],
                new=fault["new"],
                after=fault.get("after", ""),
                breaks=fault["breaks"],
                tests=tuple(_test_ids(tests, fault.get("seen_by", ()))),
            )
        )
    return found


def _test_ids(file: str, seen_by: Sequence[str]) -> list[str]:
    """Completes names of functions with the ``file``; a name that contains ``/`` is already an
    id."""
    return [one if "/" in one else f"{file}::{one}" for one in seen_by] or [file]


def choose(mutants: Iterable[Mutant], wanted: Sequence[str]) -> list[Mutant]:
    """The faults of these ids, groups or areas; all without any. Raises ``CatalogueError`` for a
    name that matches none."""
    everything = list(mutants)
    if not wanted:
        return everything
    unknown = [one for one in wanted if not any(_fits(mutant, one) for mutant in everything)]
    if unknown:
        raise CatalogueError(f"no fault, group or area is called {', '.join(unknown)}")
    return [mutant for mutant in everything if any(_fits(mutant, one) for one in wanted)]


def _fits(mutant: Mutant, name: str) -> bool:
    return name in (mutant.id, mutant.id.partition(".")[0], mutant.area)
