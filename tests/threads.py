"""That no thread is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.patience import PATIENCE_S


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Every thread that was started inside ends; one that has answered may still be about to."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(PATIENCE_S)
    assert not [thread.name for thread in left if thread.is_alive()]
