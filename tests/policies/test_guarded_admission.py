"""Faults of admission policies."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from policies.base import AdmissionPolicy, EntryInfo, Key
from policies.guarded import GuardedAdmission

INFO = EntryInfo()


class Failing(AdmissionPolicy):
    """Refuses one chunk and then fails."""

    def __init__(self, fail: Any) -> None:
        self._fail = fail
        self.calls = 0

    def admit(self, key: Key, info: EntryInfo) -> bool:
        self.calls += 1
        return False if self.calls == 1 else bool(self._fail())


class Truthless:
    def __bool__(self) -> bool:
        raise ValueError("neither")


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (lambda: 1 // 0, "ZeroDivisionError"),
        (lambda: sys.exit(3), "SystemExit(3)"),
        (Truthless, "neither"),
    ],
)
def test_the_first_fault_admits_every_chunk(
    fail: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Failing(fail)
    guard = GuardedAdmission(policy, "disk")
    with caplog.at_level(logging.ERROR):
        assert [guard.admit(b"k", INFO) for _ in range(5)] == [False, True, True, True, True]
    assert policy.calls == 2
    (record,) = caplog.records
    assert "Failing of tier disk" in record.message
    assert said in record.message
