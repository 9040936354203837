"""Checks the list of tests that run again with other versions of vLLM and under Model Runner V2."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import combinations
from tests.imports import ROOT, files_that_import, python_files
from tests.results import commit_under_test, digest_of

pytest_plugins = ("pytester",)


def one_of_each() -> set[str]:
    """The keys of ``ONE_OF_EACH`` of ``tests/vllm/test_kinds.py``, read without importing vLLM."""
    tree = ast.parse((ROOT / "tests/vllm/test_kinds.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ONE_OF_EACH":
            return set(ast.literal_eval(node.value))
    raise AssertionError("ONE_OF_EACH is gone")


def test_the_docs_show_what_ran() -> None:
    """The last results that were kept. A whole run prints its own table."""
    shown = combinations.DOCS.read_text(encoding="utf-8")
    assert combinations.table(combinations.KEPT) in shown
    assert shown.count(combinations.HEAD) == 1


@pytest.mark.parametrize("path", sorted(combinations.KEPT.iterdir()), ids=lambda path: path.name)
def test_kept_results_are_those_of_one_whole_run(path: Path) -> None:
    """The kept files contain each chosen engine test and have not been edited. Files without a
    commit are older, and were put together from several runs."""
    ran = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == f"{ran['vllm']}-{ran['runner']}.json"
    assert set(ran["engines"]) == set(combinations.engines_of(ran["vllm"], ran["runner"]))
    if "commit" in ran:
        assert ran["digest"] == digest_of(ran)
        assert "+" not in ran["commit"]


def test_results_that_were_changed_or_are_not_whole_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, docs, new = tmp_path / "kept", tmp_path / "testing.md", tmp_path / "new"
    for folder in (kept, new):
        folder.mkdir()
    docs.write_text(f"before\n\n{combinations.HEAD}\n|---|\n| old |\n\nafter\n")
    monkeypatch.setattr(combinations, "KEPT", kept)
    monkeypatch.setattr(combinations, "DOCS", docs)
    outcomes = dict.fromkeys(combinations.engines_of("0.33.0", "v2"), "passed")
    ran = {"vllm": "0.33.0", "runner": "v2", "quick": {"passed": 3}, "commit": "abc1234"}
    (new / combinations.BASE).write_text("{}")  # of the run itself; the table has a line for it
    path = new / "0.33.0-v2.json"
    whole = ran | {"engines": outcomes}
    path.write_text(json.dumps(whole | {"digest": digest_of(whole), "quick": {"passed": 4}}))
    with pytest.raises(ValueError, match="was changed after its run"):
        combinations.main(["--keep", str(new)])
    partial = ran | {"engines": dict(list(outcomes.items())[1:])}
    path.write_text(json.dumps(partial | {"digest": digest_of(partial)}))
    with pytest.raises(ValueError, match="is not of a whole run: it lacks tests/vllm/"):
        combinations.main(["--keep", str(new)])
    assert (list(kept.iterdir()), "| old |" in docs.read_text()) == ([], True)
    path.write_text(json.dumps(whole | {"digest": digest_of(whole)}))
    assert combinations.main(["--keep", str(new)]) == 0
    assert [each.name for each in kept.iterdir()] == [path.name]
    assert docs.read_text() == f"before\n\n{combinations.table(kept)}\n\nafter\n"
    assert "| 3 passed |" in docs.read_text()


def test_a_run_writes_down_what_it_tested(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results include the outcome of a test that fails only in its tear-down."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVTIERS_TEST_RESULTS", str(pytester.path / "results"))
    pytester.path.joinpath("tests/vllm").mkdir(parents=True)
    pytester.path.joinpath("tests/vllm/test_one.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef bad():\n    yield\n    assert False\n"
        "def test_good(): pass\ndef test_ends_badly(bad): pass\n"
        "def test_that_is_interrupted(): raise KeyboardInterrupt\n"
    )
    pytester.path.joinpath("tests/test_two.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()\n"
        "def test_c(): pytest.skip('needs gold: dig')\n"
    )
    pytester.path.joinpath("tests/test_three.py").write_text(
        "import pytest\npytest.skip('needs gold: dig', allow_module_level=True)\n"
    )
    pytester.runpytest_subprocess("-p", "tests.results", "--import-mode=importlib")
    (path,) = (pytester.path / "results").iterdir()
    ran = json.loads(path.read_text())
    assert path.name == f"{ran['vllm']}-{ran['runner']}.json"
    assert ran["quick"] == {"passed": 1, "skipped": 2}
    assert ran["digest"] == digest_of(ran)
    assert ran["commit"].removesuffix("+") == commit_under_test().removesuffix("+")
    assert ran["needs"] == {"gold: dig": ["tests/test_three.py", "tests/test_two.py"]}
    assert ran["engines"] == {
        "tests/vllm/test_one.py::test_good": "passed",
        "tests/vllm/test_one.py::test_ends_badly": "failed",
    }


def test_the_table_names_what_did_not_pass(tmp_path: Path) -> None:
    chosen = combinations.engines_of("0.33.1", "v2")
    outcomes = dict.fromkeys(chosen, "passed")
    failed, missing, *_ = chosen
    outcomes[failed] = "failed"
    del outcomes[missing]
    ran = {"vllm": "0.33.1", "runner": "v2", "quick": {"passed": 1200}, "engines": outcomes}
    (tmp_path / "0.33.1-v2.json").write_text(json.dumps(ran))
    row = combinations.table(tmp_path).splitlines()[-1]
    assert row.startswith("| 0.33.1 | V2 | 1,200 passed | ")
    assert f"{chosen[failed]} (failed)" in row
    assert f"{chosen[missing]} (not run)" in row
    assert row.count("(") == 2


def test_what_a_machine_lacks_is_named_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each lack is named once, even if several runs have it; ``table`` accepts older files without
    this entry."""
    ran = {"vllm": "0.32.0", "runner": "v1", "quick": {"passed": 9}, "engines": {}}
    (tmp_path / "old.json").write_text(json.dumps(ran))
    assert combinations.main(["--table", str(tmp_path)]) == 0
    assert "NOT RUN" not in capsys.readouterr().out
    for number in (1, 2):
        needs = {"gcc: apt-get install gcc": ["b.py", f"a{number}.py"], "root": ["c.py"]}
        (tmp_path / f"{number}.json").write_text(json.dumps(ran | {"needs": needs}))
    assert combinations.main(["--table", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "NOT RUN: tests of a1.py, a2.py, b.py need gcc: apt-get install gcc",
        "NOT RUN: tests of c.py need root",
    ]


@pytest.mark.thorough
def test_quick_tests_that_import_vllm_are_found_however_indirectly() -> None:
    found = combinations.quick_files("v1")
    assert "tests/oracle/test_late_loads.py" in found, "through the simulated world that it uses"
    assert "tests/offload/connector/test_cache_policy.py" in found, "directly"
    assert not [name for name in found if name.startswith(("tests/tiers/", "tests/policies/"))]
    assert set(combinations.quick_files("v2")) < set(found)


def test_every_engine_test_of_a_combination_exists() -> None:
    functions = {
        f"{path.relative_to(ROOT).as_posix()}::{line.partition('(')[0].removeprefix('def ')}"
        for path in python_files("tests/vllm")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def test_")
    }
    for engines in combinations.ENGINES.values():
        for name in engines:
            test, _, kind = name.partition("[")
            assert test in functions, name
            assert not kind or kind.removesuffix("]") in one_of_each(), name


def test_the_combinations_cover_every_kind_together() -> None:
    names = {name for engines in combinations.ENGINES.values() for name in engines}
    assert {f"{combinations.KIND}[{kind}]" for kind in one_of_each()} <= names


def test_an_import_under_type_checking_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import imports

    monkeypatch.setattr(imports, "ROOT", tmp_path)
    (tmp_path / "t").mkdir()
    (tmp_path / "t/far.py").write_text("def late():\n    import vllm.config\n")
    (tmp_path / "t/test_far.py").write_text("from t.far import late\n")
    (tmp_path / "t/test_typed.py").write_text("if TYPE_CHECKING:\n    import vllm\n")
    (tmp_path / "t/test_name.py").write_text("import vllm_like\n")
    assert [path.name for path in files_that_import("vllm", "t")] == ["test_far.py"]


@pytest.mark.parametrize("words", [[], ["0.33"], ["0.33", "v3"], ["--table"]])
def test_wrong_arguments_get_the_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert combinations.main(words) == 2
    assert "python -m tests.combinations 0.33 v2" in capsys.readouterr().err
