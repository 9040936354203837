"""How soon spans of a kind are used again, learned online, and what room for them is worth.

For each kind a life table over ages (time since last use, in blocks touched meanwhile; bins grow
by half) gives the chance of a reuse at each age, with spans that have not come back yet counted
as censored (E. L. Kaplan, P. Meier, "Nonparametric estimation from incomplete observations", JASA
53, 1958). Kinds are tuples; a kind with few observations leans on its prefix, and so on up.

The worth of a span at age a is its Gittins index (J. C. Gittins, "Bandit processes and dynamic
allocation indices", J. R. Stat. Soc. B 41(2), 1979): the best ratio, over all horizons, of the
chance of a reuse before the horizon to the expected time until reuse or horizon. It is what "hit
density" is in LHD (N. Beckmann, H. Chen, A. Cidon, NSDI 2018), without the dependence on the
present eviction rate. With F the chance of a reuse until an age and A the expected time until
then, it is the steepest slope from (A(a), F(a)) to a later point of that curve.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import log

import numpy as np
import numpy.typing as npt

Kind = tuple[Hashable, ...]
Curve = npt.NDArray[np.float64]

_BINS = 40
_FIRST = 64.0
_GROWTH = 1.5
_EDGES = np.concatenate(([0.0], _FIRST * _GROWTH ** np.arange(1, _BINS + 1)))
_WIDTHS = np.diff(_EDGES)
_LOG_GROWTH = log(_GROWTH)
_LATER = np.triu(np.ones((_BINS, _BINS + 1), dtype=bool), 1)


def age_bin(age: float) -> int:
    """The bin of an age; the last one has no end."""
    if age < _FIRST * _GROWTH:
        return 0
    return min(_BINS - 1, int(log(age / _FIRST) / _LOG_GROWTH))


class ReuseTable:
    """Life tables per kind. ``prior`` is how many observations of its own a kind needs to count
    as much as its prefix; ``decay`` is what a relearning leaves of the past."""

    def __init__(self, prior: float = 10.0, decay: float = 0.95) -> None:
        self._prior = prior
        self._decay = decay
        self._reused: dict[Kind, list[float]] = {}
        self._ended: dict[Kind, list[float]] = {}
        self._weight = 0.0
        self._count = 0.0
        self._worth: dict[Kind, list[float]] = {}

    def record(self, kind: Kind, age: float, weight: float, reused: bool) -> None:
        """A span's story ends: by a reuse, or because it is observed no longer."""
        ended = self._ended.get(kind)
        if ended is None:
            ended = self._ended[kind] = [0.0] * _BINS
            self._reused[kind] = [0.0] * _BINS
        place = age_bin(age)
        ended[place] += weight
        if reused:
            self._reused[kind][place] += weight
        self._weight += weight
        self._count += 1

    def worth(self, kind: Kind, age: float) -> float:
        """The index of a span; 0 before anything was learned."""
        curve = self._worth.get(kind)
        while curve is None:
            if not kind:
                return 0.0
            kind = kind[:-1]
            curve = self._worth.get(kind)
        return curve[age_bin(age)]

    @property
    def learned(self) -> bool:
        """Whether there was anything to learn from yet."""
        return bool(self._worth)

    def relearn(self, waiting: Iterable[tuple[Kind, float, float]]) -> None:
        """Recompute all indices; ``waiting`` are spans (kind, age, weight) not reused so far."""
        ended: dict[Kind, Curve] = {}
        reused: dict[Kind, Curve] = {}
        for kind, row in self._ended.items():
            self._add(ended, kind, np.array(row))
            self._add(reused, kind, np.array(self._reused[kind]))
        censored: dict[Kind, list[float]] = {}
        for kind, age, weight in waiting:
            censored.setdefault(kind, [0.0] * _BINS)[age_bin(age)] += weight
        for kind, row in censored.items():
            self._add(ended, kind, np.array(row))
        if not self._count:
            return
        prior = self._prior * self._weight / self._count
        hazards: dict[Kind, Curve] = {}
        for kind in sorted(ended, key=len):
            events = reused.get(kind, np.zeros(_BINS))
            at_risk = np.cumsum(ended[kind][::-1])[::-1] - 0.5 * (ended[kind] - events)
            if kind:
                events, at_risk = events + prior * hazards[kind[:-1]], at_risk + prior
            hazards[kind] = events / np.maximum(at_risk, 1e-9)
        slopes = _steepest(np.stack(list(hazards.values())))
        self._worth = dict(zip(hazards, slopes, strict=True))
        self._fade()

    def _add(self, sums: dict[Kind, Curve], kind: Kind, row: Curve) -> None:
        """Book a row under a kind and all its prefixes."""
        for length in range(len(kind) + 1):
            known = sums.get(kind[:length])
            sums[kind[:length]] = row if known is None else known + row

    def _fade(self) -> None:
        for rows in (self._ended, self._reused):
            for kind, row in rows.items():
                rows[kind] = [value * self._decay for value in row]
        self._weight *= self._decay
        self._count *= self._decay


def _steepest(hazards: Curve) -> list[list[float]]:
    """Per kind (row) and bin, the steepest slope from the bin's start to a later point of the
    kind's curve (A, F)."""
    first = np.ones((len(hazards), 1))
    alive = np.hstack((first, np.cumprod(1.0 - np.clip(hazards, 0.0, 1.0), axis=1)))
    steps = (alive[:, 1:] + alive[:, :-1]) / 2 * _WIDTHS
    spent = np.hstack((0.0 * first, np.cumsum(steps, axis=1)))
    gain = alive[:, :-1, None] - alive[:, None, :]
    time = spent[:, None, :] - spent[:, :-1, None]
    slopes = np.divide(gain, time, out=np.zeros_like(gain), where=_LATER & (time > 1e-12))
    best: list[list[float]] = slopes.max(axis=2).tolist()
    return best
