"""A worker of these tests may take longer to close than a user would wait."""

from __future__ import annotations

import pytest

from offload.connector.worker import worker_side
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "RANK_CLOSE_TIMEOUT_S", PATIENCE_S)
