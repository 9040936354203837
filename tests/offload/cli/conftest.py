"""A folder for tests that act as another user."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own folders are open only to root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
