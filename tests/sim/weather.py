"""The faults of one rank's lower tier: calm, or some fault for a while ("weather").

The wrappers of ``tiers.testing.faults`` do the damage; the current weather switches each of them
on, and each counts the damage that it really did. Time and randomness come from the world.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Sequence

from tiers.adapters.wrapper import TierWrapper
from tiers.base import Key, Tier
from tiers.testing.faults import Damage, DamagingTier, FailingTier, FaultTier, FullTier

CALM_S = 0.004
"""The maximum duration of an operation in calm weather."""


class Sky(enum.Enum):
    """The kinds of weather."""

    CALM = "calm"
    SLOW = "a hundred times slower"
    VERY_SLOW = "slower than the deadline of an operation"
    FAILING = "every call fails"
    FLAKY = "every third call fails"
    FULL = "no space left"
    HANGING = "calls do not return"
    DAMAGING = "records come back damaged"
    LOSING = "records get lost"


class Weather:
    """The weather over one tier of one rank. ``since`` is the time at which it began (virtual
    seconds)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sky = Sky.CALM
        self.since = 0.0
        self.cleared = asyncio.Event()
        self.met: Counter[Sky] = Counter()

    def change(self, sky: Sky, now: float) -> None:
        """Let hanging operations continue once the weather is not HANGING any more."""
        if sky is not Sky.HANGING:
            self.cleared.set()
            self.cleared = asyncio.Event()
        self.sky, self.since = sky, now

    def is_now(self, *skies: Sky) -> bool:
        """Return True, and record it, if the weather is one of these."""
        if self.sky not in skies:
            return False
        self.met[self.sky] += 1
        return True

    def fails(self, call: int) -> bool:
        """The condition for ``FailingTier``."""
        return self.is_now(Sky.FAILING) or (call % 3 == 0 and self.is_now(Sky.FLAKY))


class DelayedTier(TierWrapper):
    """Every call takes its time; some hang, and some find their records missing. ``begun`` are the
    start times of the reads and writes under way, by method."""

    def __init__(self, inner: Tier, weather: Weather) -> None:
        super().__init__(inner)
        self._weather = weather
        self.begun: dict[str, list[float]] = {"read": [], "write": []}

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        if method in ("open", "keys"):
            return
        begun = self.begun.setdefault(method, [])
        now = asyncio.get_running_loop().time()
        begun.append(now)
        try:
            await self._wait()
            if method == "read" and self._weather.is_now(Sky.LOSING):
                await self.inner.delete(keys[:1])
        finally:
            begun.remove(now)

    async def _wait(self) -> None:
        weather = self._weather
        delay = weather.rng.random() * CALM_S
        if weather.is_now(Sky.SLOW):
            delay *= 100
        elif weather.is_now(Sky.VERY_SLOW):
            delay = 5.5 + delay
        await asyncio.sleep(delay)
        while weather.is_now(Sky.HANGING):
            await weather.cleared.wait()


def under(weather: Weather, medium: Tier, *, lying: bool = False) -> tuple[Tier, DelayedTier]:
    """The medium under this weather; with ``lying``, it returns damaged bytes as OK."""
    damage = weather.rng.choice(list(Damage))
    tier: FaultTier = DamagingTier(
        medium, damage, lambda _call: weather.is_now(Sky.DAMAGING), detected=not lying
    )
    tier = FullTier(tier, lambda _call: weather.is_now(Sky.FULL))
    delayed = DelayedTier(tier, weather)
    return FailingTier(delayed, weather.fails), delayed
