"""No exception leaves a vLLM hook: it becomes a miss, a counter and a log line.

An exception in any connector hook ends the engine for every tenant. A guarded hook answers
``default()`` instead and counts the fault; the first ones are logged with a traceback.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
LOGGED_MAX = 20


class Faults:
    """Hook faults of one connector object, by hook name."""

    def __init__(self) -> None:
        self.by_hook: dict[str, int] = {}

    def note(self, hook: str, error: BaseException) -> None:
        """Count a fault; log it unless there were too many already."""
        self.by_hook[hook] = self.by_hook.get(hook, 0) + 1
        total = sum(self.by_hook.values())
        if total <= LOGGED_MAX:
            logger.error(
                "kvtiers: hook %s failed, treated as a miss: %r", hook, error, exc_info=error
            )
        if total == LOGGED_MAX:
            logger.error("kvtiers: further hook faults are counted, not logged")


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Make a method of an object with ``faults: Faults`` answer ``default()`` when it raises."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # the whole point: nothing may leave a hook
                self.faults.note(hook.__name__, error)
                return default()

        return call  # type: ignore[return-value]  # same signature by construction

    return decorate
