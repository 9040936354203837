"""The stage with vLLM's own tests fails when it should (``tests.upstream``)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tests.upstream import source
from tests.upstream.__main__ import CHOSEN, NOT_FETCHED, Outcome, judge, main, outcome, unlisted

FILE = "core/test_scheduler.py"


def case(name: str, inside: str = "") -> ElementTree.Element:
    module = "tests.v1.core.test_scheduler"
    return ElementTree.fromstring(
        f"<testcase classname='{module}' name='{name}'>{inside}</testcase>"
    )


def test_outcomes_are_read_from_the_report() -> None:
    ours = "<properties><property name='ours' value='1'/></properties>"
    no_model = "<failure message='x'>Invalid repository ID or local directory specified</failure>"
    assert outcome(case("test_a", ours)) == (f"{FILE}::test_a", Outcome("passed", attached=True))
    assert outcome(case("test_a", "<failure/>"))[1].result == "failed"
    assert outcome(case("test_a", "<error/>"))[1].result == "failed"
    assert outcome(case("test_a", "<skipped/>"))[1].result == "skipped"
    assert outcome(case("test_a", no_model))[1].result == "no model"


def test_a_failure_that_is_not_listed_fails() -> None:
    passed, failed = Outcome("passed", attached=True), Outcome("failed", attached=True)
    listed, other = f"{FILE}::test_cross_attn_x", f"{FILE}::test_x"
    good = {f"{FILE}::test_a": passed, listed: failed}
    assert judge(FILE, good, plain=False) == []
    assert judge(FILE, good | {other: failed}, plain=False) == [f"{other} failed"]
    assert judge(FILE, good, plain=True) == [f"{listed} failed"]


def test_a_file_that_does_not_use_our_code_fails() -> None:
    outcomes = {f"{FILE}::test_a": Outcome("passed", attached=False)}
    assert judge(FILE, outcomes, plain=False) == [f"{FILE}: our parts took part in no test"]


def test_a_file_in_no_list_is_named() -> None:
    new = "kv_connector/unit/test_something_new.py"
    assert unlisted([*CHOSEN["run"], "core/test_output.py", new]) == [new]


def test_without_an_index_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    assert main([]) == NOT_FETCHED
    assert "NOT RUN: vLLM's own tests" in capsys.readouterr().out
