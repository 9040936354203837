"""Fixtures for tests on real vLLM engines; every test in this folder has the marker ``vllm``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.tiny_model import make_llama
from tests.vllm.engine import close_nursery

HERE = Path(__file__).parent
VLLM_TIMEOUT_S = 1800  # many engines, each of which may wait for PATIENCE_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(VLLM_TIMEOUT_S))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama: 4 layers, one full-attention group, 8 KiB per page at block size 32."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    yield
    close_nursery()
