"""Checks the list of tests that run again with other versions of vLLM and under Model Runner V2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import combinations
from tests.imports import ROOT, files_that_import, python_files

DOCS = ROOT / "docs/testing.md"


def test_the_docs_show_what_runs() -> None:
    assert combinations.table() in DOCS.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_quick_tests_that_import_vllm_are_found_however_far_away() -> None:
    found = combinations.quick_files("v1")
    assert "tests/oracle/test_late_loads.py" in found, "by the world that it plays in"
    assert "tests/offload/connector/test_cache_policy.py" in found, "by itself"
    assert not [name for name in found if name.startswith(("tests/tiers/", "tests/policies/"))]
    assert set(combinations.quick_files("v2")) < set(found)


def test_every_engine_test_of_a_combination_is_there() -> None:
    functions = {
        f"{path.relative_to(ROOT).as_posix()}::{line.partition('(')[0].removeprefix('def ')}"
        for path in python_files("tests/vllm")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def test_")
    }
    for engines in combinations.ENGINES.values():
        for name in engines:
            file, _, test = name.partition("::")
            if test:
                assert name.partition("[")[0] in functions, name
            else:
                assert (ROOT / file).is_file(), name


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
