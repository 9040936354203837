"""Fixtures for tests that query vLLM about models."""

from __future__ import annotations

import pytest

from tests.models.inspection import inspect_models_here


@pytest.fixture(scope="session", autouse=True)
def _models_are_inspected_here() -> None:
    inspect_models_here()
