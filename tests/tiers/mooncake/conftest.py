"""A healthy store may need longer to answer than a user would wait."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE_S
from tiers.io import timed_calls


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "ANSWER_TIMEOUT_S", PATIENCE_S)
