"""Guards and times vLLM's hooks: no exception leaves a hook.

An exception in any connector hook ends the engine for every tenant. A guarded hook returns
``default()`` instead, which is a miss, and counts the fault; the first faults are logged with a
traceback.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from policies.safe_text import safe_repr

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
ERRORS_LOGGED_MAX = 20
ERROR_LINES_MAX = 60
HOOKS = {"explain", "build_connector_meta", "look_ahead", "lookup"}
"""The names of all hooks in metrics. Those listed here are parts of hooks, which their callers
guard; each guarded method adds its own name."""


class HookClock:
    """The number of calls of a hook and their total time."""

    __slots__ = ("calls", "seconds", "slowest_s")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.slowest_s = 0.0

    def add(self, seconds: float) -> None:
        """Add one call."""
        self.calls += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)


class Faults:
    """Hook faults of one connector object by hook name, and the time spent in hooks."""

    def __init__(self) -> None:
        self.by_hook: dict[str, int] = {}
        self._clocks: dict[str, HookClock] = {}

    def clock(self, hook: str) -> HookClock:
        """The clock that measures one hook."""
        found = self._clocks.get(hook)
        if found is None:
            found = self._clocks[hook] = HookClock()
        return found

    def times(self) -> dict[str, float]:
        """Calls and seconds by flat name."""
        found: dict[str, float] = {}
        for hook, clock in self._clocks.items():
            found[f"hook_calls:{hook}"] = clock.calls
            found[f"hook_seconds:{hook}"] = clock.seconds
        return found

    def take_slowest(self) -> dict[str, float]:
        """The longest call of each hook since the previous call of this function, by flat name."""
        found = {f"hook_slowest_seconds:{h}": c.slowest_s for h, c in self._clocks.items()}
        for clock in self._clocks.values():
            clock.slowest_s = 0.0
        return found

    def note(self, hook: str, error: BaseException) -> None:
        """Count a fault, and log it unless too many have been logged."""
        self.by_hook[hook] = self.by_hook.get(hook, 0) + 1
        total = sum(self.by_hook.values())
        if total <= ERRORS_LOGGED_MAX:
            text = "kvtiers: hook %s failed and is treated as a miss: %s"
            logger.error(text, hook, described(error))
        if total == ERRORS_LOGGED_MAX:
            logger.error("kvtiers: further hook faults are counted, not logged")


def described(error: BaseException) -> str:
    """Describe an error and its causes, with the lines of code through which they passed.

    The standard library's traceback is not used because it reads the source files, and no hook may
    touch a file system.
    """
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < ERROR_LINES_MAX:
        lines.append(f"{'caused by ' if lines else ''}{safe_repr(cause)}")
        for frame, number in traceback.walk_tb(cause.__traceback__):
            code = frame.f_code
            lines.append(f"  at {code.co_filename}:{number} in {code.co_qualname}")
        cause = cause.__cause__ or cause.__context__
    return "\n".join(lines[:ERROR_LINES_MAX])


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, even if some raise errors; then raise the first of these errors."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # the other calls must still be made
            errors.append(error)
    if errors:
        raise errors[0]


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Make a method of an object with ``faults: Faults`` return ``default()`` when it raises."""

    def decorate(hook: F) -> F:
        name = hook.__name__.strip("_")
        HOOKS.add(name)

        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # no exception may leave a hook
                self.faults.note(name, error)
                return default()
            finally:
                self.faults.clock(name).add(time.perf_counter() - started)

        return call  # type: ignore[return-value]  # same signature by construction

    return decorate
