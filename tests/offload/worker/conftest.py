"""Fixtures of the executor's tests."""

from __future__ import annotations

import pytest

from tiers.copy.base import EventTicket


@pytest.fixture
def synchronous_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have no event for which the model's stream could wait, as on a CPU: a fence waits for
    their end. ``test_executor_cuda.py`` tests the behaviour of a GPU."""
    monkeypatch.setattr(EventTicket, "submitted", None)
