"""Fixtures of the executor's tests."""

from __future__ import annotations

import pytest

from tiers.copy.lanes import EventTicket


@pytest.fixture
def synchronous_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without an event that the model's stream could wait for, as on a CPU: a fence waits
    for their end. How a GPU behaves: ``test_executor_cuda.py``."""
    monkeypatch.setattr(EventTicket, "submitted", None)
