"""Settings for every test. The models are in ``tests/models``, the engines in ``tests/vllm``."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import model_runner, order, processor

processor.pretend()
model_runner.pretend()

# If a script's shell starts the tests in the background, they ignore Ctrl-C. Processes that tests
# interrupt would inherit that, so it is undone here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The GPU tests run on machines with little more than torch.
with contextlib.suppress(ImportError):
    import hypothesis

    # No time limits for single examples, because machines are busy. The printed blob repeats a
    # failure on any machine.
    hypothesis.settings.register_profile("kvtiers", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("kvtiers")

WRITTEN_BYTES = 8 << 30
"""An upper bound of the space that the files of one run need at a time."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run before its first test if the files of a disk tier would not fit."""
    folder = session.config.getoption("basetemp") or tempfile.gettempdir()
    place = Path(folder) if Path(folder).exists() else Path(folder).parent
    disk = shutil.disk_usage(place)
    wanted = max(2 << 30, disk.total // 20) + WRITTEN_BYTES
    if disk.free < wanted:
        pytest.exit(
            f"{place} has {disk.free / 2**30:.1f} GiB free; tests need {wanted / 2**30:.1f} GiB,"
            f" because disk tiers keep 5 % of a file system free, at least 2 GiB, and tests write"
            f" up to {WRITTEN_BYTES >> 30} GiB. Free some space or set TMPDIR to another disk.",
            returncode=2,
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order.longest_first(items)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that the garbage collector does not walk torch and vLLM (some
    0.5 s) again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreeze them, because nanobind reports objects that are still frozen at exit as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Restore our loggers, because a connector created in the test process sends our log lines to
    vLLM's handlers."""
    ours = [logging.getLogger(name) for name in ("offload", "tiers", "policies")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in ours]
    yield
    for logger, (handlers, propagate, level) in zip(ours, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
