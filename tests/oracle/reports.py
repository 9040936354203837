"""Records what the workers report to the connector's scheduler side."""

from __future__ import annotations

from typing import Any

import pytest

from offload.connector.connector import OffloadConnector


def failed_loads(connector: OffloadConnector, patch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose loads fail from now on, as reported to vLLM; the list grows."""
    names: list[str] = []
    update = connector.serving.side.update

    def noted(report: Any, finished: Any, failures: Any) -> None:
        names.extend(failures)
        update(report, finished, failures)

    patch.setattr(connector.serving.side, "update", noted)
    return names
