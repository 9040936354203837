"""Checks that no thread is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.patience import PATIENCE_S


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Every thread that was started inside must end; a thread that has returned its result may
    still need a moment."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(PATIENCE_S)
    assert not [thread.name for thread in left if thread.is_alive()]
