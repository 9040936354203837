"""Every test here runs on a simulated clock, even tests that drive the scheduler side without an
``OracleEngine``, which always has this clock."""

from __future__ import annotations

from typing import Any

import pytest

from offload.connector.model.adapters import AdapterBook
from tests.oracle.clock import pass_time_by_steps


@pytest.fixture(autouse=True)
def _time_passes_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_time_by_steps(monkeypatch)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of requests that no hook can admit, so that kvtiers does not know them."""
    names: set[str] = set()
    identity_of = AdapterBook.identity_of

    def fail(book: AdapterBook, request: Any) -> bytes | None:
        if request.request_id in names:
            raise RuntimeError("a fault in a hook")
        return identity_of(book, request)

    monkeypatch.setattr(AdapterBook, "identity_of", fail)
    return names
