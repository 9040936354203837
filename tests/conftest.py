"""Settings for every test. The models are in ``tests/models``, the engines in ``tests/vllm``."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator

import pytest

from tests import order, processor

processor.pretend()

# The GPU tests run on machines that have little more than torch.
with contextlib.suppress(ImportError):
    import hypothesis

    # No time limits for single examples: machines are busy. The blob repeats a failure anywhere.
    hypothesis.settings.register_profile("kvtiers", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("kvtiers")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order.longest_first(items)


def pytest_collection_finish() -> None:
    """What the imports made stays until the end: the collector need not walk torch and vLLM (some
    0.5 s) again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is still frozen at the end is told as leaks by nanobind."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """A connector that is made in the test process sends our log lines to vLLM's handlers."""
    ours = [logging.getLogger(name) for name in ("offload", "tiers", "policies")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in ours]
    yield
    for logger, (handlers, propagate, level) in zip(ours, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
