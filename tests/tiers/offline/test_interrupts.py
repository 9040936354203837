"""Ctrl-C ends a command between two callbacks of its event loop."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tiers.offline.interrupts import run_until_interrupted


class InterruptedFuture(asyncio.Future[None]):
    """Ctrl-C arrives while the loop passes a result to this future."""

    def set_result(self, result: None) -> None:
        signal.raise_signal(signal.SIGINT)
        super().set_result(result)


def test_an_interrupt_while_a_future_gets_its_result_is_no_error() -> None:
    errors: list[dict[str, Any]] = []
    steps: list[str] = []

    async def command() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        waits = InterruptedFuture()
        loop.call_soon(waits.set_result, None)
        try:
            await waits
            await asyncio.sleep(0)
            steps.append("goes on")
        finally:
            await asyncio.sleep(0)
            steps.append("cleans up")

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(command())
    assert (errors, steps) == ([], ["cleans up"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["made", "closed"])
def test_an_interrupt_does_not_leave_a_loop_half_way(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    class Loop(asyncio.SelectorEventLoop):
        def __init__(self) -> None:
            if moment == "made":
                signal.raise_signal(signal.SIGINT)
            super().__init__()
            steps.append("made")

        def close(self) -> None:
            if moment == "closed":
                signal.raise_signal(signal.SIGINT)
            super().close()
            steps.append("closed")

    async def command() -> None:
        try:
            await asyncio.sleep(0)
            steps.append("goes on")
        finally:
            steps.append("cleans up")

    monkeypatch.setattr(asyncio.events, "new_event_loop", Loop)
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(command())
    goes_on = ["goes on"] if moment == "closed" else []
    assert steps == ["made", *goes_on, "cleans up", "closed"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_a_command_that_cleans_up_for_too_long() -> None:
    async def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        finally:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second interrupt had no effect")

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(command())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_cancellation_that_is_no_interrupt_stays_one() -> None:
    async def command() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(command())


def test_a_command_may_run_in_any_thread() -> None:
    async def command() -> str:
        return "done"

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run_until_interrupted, command()).result(timeout=60) == "done"
    assert run_until_interrupted(command()) == "done"
