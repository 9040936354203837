"""The permanent set of planted faults can still be planted. ``./run mutants`` checks whether tests
detect them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import catalogue
from tests.mutants.catalogue import ROOT, CatalogueError, Mutant, choose, load
from tests.mutants.workshop import Run, Verdict, judge

MUTANTS = load()


@cache
def functions_of(file: str) -> set[str]:
    """Names of the test functions and classes of a file."""
    tree = ast.parse((ROOT / file).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_fault_can_be_planted(mutant: Mutant) -> None:
    """The fault's old text must occur exactly once. After a refactoring, rewrite it as the same
    fault; do not delete it."""
    mutant.plant()
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), f"{mutant.id}: there is no {file}"
        name = function.partition("[")[0].partition("::")[0]  # a class may inherit its tests
        assert not name or name in functions_of(file), f"{mutant.id}: {file} has no {name}"
    assert mutant.breaks.endswith("."), "one sentence"


def test_the_set_of_faults_does_not_shrink() -> None:
    """A ratchet: faults are kept. Raise the number from time to time, not with each new fault."""
    assert len(MUTANTS) >= FAULTS_MIN


FAULTS_MIN = 500


def alike(mutants: Sequence[Mutant]) -> list[str]:
    """The ids of faults that are the same change of the same place as another one."""
    ids: dict[tuple[str, ...], list[str]] = {}
    for one in mutants:
        ids.setdefault((one.file, one.after, one.old, one.new), []).append(one.id)
    return [name for names in ids.values() if len(names) > 1 for name in names]


def test_no_fault_is_kept_twice() -> None:
    assert alike(MUTANTS) == []
    again = replace(MUTANTS[0], id="other.name", breaks="Something else.", tests=())
    assert alike([*MUTANTS, again]) == [MUTANTS[0].id, "other.name"]


def fault(**changes: str) -> Mutant:
    fields = {"file": "a.py", "old": "x = 1", "new": "x = 2", "after": ""} | changes
    return Mutant(id="g.one", area="area", breaks="All.", tests=("tests/test_a.py",), **fields)


def test_a_fault_that_cannot_be_planted_is_described(tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload/moved.py").write_text("x = 1\n")
    with pytest.raises(CatalogueError, match=r"no a\.py; it occurs in offload/moved\.py"):
        fault().plant(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\ndef f():\n    x = 1\n")
    with pytest.raises(CatalogueError, match="occurs 2 times"):
        fault().plant(tmp_path)
    assert fault(after="def f").plant(tmp_path) == "x = 1\ndef f():\n    x = 2\n"
    with pytest.raises(CatalogueError, match="occurs 0 times"):
        fault(after="def g").plant(tmp_path)
    with pytest.raises(CatalogueError, match="does not follow"):
        fault(after="def f", old="y").plant(tmp_path)
    with pytest.raises(CatalogueError, match="no Python"):
        fault(after="def f", new="x = ").plant(tmp_path)
    with pytest.raises(CatalogueError, match="same program"):
        fault(after="def f", new="x =  1  # one").plant(tmp_path)


def test_a_wrong_file_of_faults_is_described(tmp_path: Path) -> None:
    path = tmp_path / "area.toml"
    path.write_text('[g]\nfile = "a.py"\n')
    with pytest.raises(CatalogueError, match=r"area\.toml, \[g\]: needs file and tests"):
        load(tmp_path)
    path.write_text(
        '[g]\nfile = "a.py"\ntests = "t.py"\n[g.one]\nold = "x"\nnew = "y"\nwhy = "z"\n'
    )
    with pytest.raises(CatalogueError, match="one: missing or unknown: breaks, why"):
        load(tmp_path)


def test_the_faults_that_the_docs_name_exist() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    named = [
        names for text in texts for names in re.findall(r"\./run mutants ([a-z][a-z. -]*)", text)
    ]
    assert len(named) > 1
    for names in named:
        choose(MUTANTS, names.split())


def test_faults_are_chosen_by_id_group_or_area() -> None:
    one = MUTANTS[0]
    assert choose(MUTANTS, []) == MUTANTS
    assert choose(MUTANTS, [one.id]) == [one]
    assert one in choose(MUTANTS, [one.area])
    assert one in choose(MUTANTS, [one.id.partition(".")[0]])
    with pytest.raises(CatalogueError, match="called nothing"):
        choose(MUTANTS, ["nothing"])


def test_runs_are_judged() -> None:
    assert judge(Run(0, "", {"a": "passed", "b": "skipped"})) == (Verdict.SURVIVED, "")
    assert judge(Run(0, "", {"a": "skipped"})) == (Verdict.SKIPPED, "")
    assert judge(Run(1, "", {"a": "passed", "b": "failed"})) == (Verdict.KILLED, "b")
    assert judge(Run(1, "Timeout (>9.0s)", {"a": "failed"})) == (Verdict.HUNG, "a")
    assert judge(Run(None, "", last="c")) == (Verdict.HUNG, "c")
    assert judge(Run(None, "")) == (Verdict.BROKEN, "no test had begun at the time limit")
    assert judge(Run(-11, "", last="c")) == (Verdict.KILLED, "c (signal 11)")
    assert judge(Run(2, "", {})) == (Verdict.BROKEN, "pytest ended with 2: ")
    assert judge(Run(4, "not found\n")) == (Verdict.BROKEN, "pytest ended with 4: not found")
    assert {verdict for verdict in Verdict if verdict.seen} == {Verdict.KILLED, Verdict.HUNG}


def test_every_area_has_faults() -> None:
    areas = {path.stem for path in catalogue.FAULTS.glob("*.toml")}
    assert areas == {mutant.area for mutant in MUTANTS}
