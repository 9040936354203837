"""Mooncake for tests, where it can be used."""

from __future__ import annotations

import pytest

from demo import mooncake
from tiers.mooncake_client import MooncakeSettings


def skip_without_mooncake() -> None:
    """Skip the module that says so while it is imported, where Mooncake is missing."""
    if missing := mooncake.why_not():
        pytest.skip(missing, allow_module_level=True)


class Master(mooncake.Master):
    """A master with settings for tiers."""

    def settings(self, segment_bytes: int = 256 << 20) -> MooncakeSettings:
        return MooncakeSettings(self.address, self.metadata, segment_bytes, host="127.0.0.1")
