"""Simulations in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from policies.simulation import jobs
from tests.patience import PATIENCE_S


def test_an_interrupt_waits_until_the_workers_are_started() -> None:
    """Another thread receives the signal, such as the thread of a progress bar."""
    end, shown = threading.Event(), []

    def start_interrupted() -> None:
        with jobs._interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            child = [sys.executable, "-c", "import signal; print(signal.pthread_sigmask(0, ()))"]
            shown.append(subprocess.check_output(child, text=True, timeout=PATIENCE_S))

    thread = threading.Thread(target=end.wait)
    thread.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            start_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()
        thread.join()
    assert len(shown) == 1, "the start was cut short"
    assert "SIGINT" in shown[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
