"""A clock that a test sets forward, so that deadlines pass without waiting."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """Replaces the module ``time`` in a module that measures time."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    @classmethod
    def replace(cls, module: ModuleType, patch: pytest.MonkeyPatch) -> Clock:
        """Let ``module`` measure with a new clock."""
        made = cls()
        patch.setattr(module, "time", made)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """The real time, set forward."""
        return time.monotonic() + self.ahead_s
