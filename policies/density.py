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

from bisect import bisect_right
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

Kind = tuple[Hashable, ...]
Curve = npt.NDArray[np.float64]

_BINS = 40
_FIRST = 64.0
_GROWTH = 1.5
_EDGES = np.concatenate(([0.0], _FIRST * _GROWTH ** np.arange(1, _BINS + 1)))
_WIDTHS = np.diff(_EDGES)
_STARTS = _EDGES[:-1].tolist()


def age_bin(age: float) -> int:
    """The bin of an age; the last one has no end."""
    return bisect_right(_STARTS, age) - 1


class ReuseTable:
    """Life tables per kind. ``prior`` is how many observations of its own a kind needs to count
    as much as its prefix; ``decay`` is what a relearning leaves of the past."""

    def __init__(self, prior: float = 10.0, decay: float = 0.95) -> None:
        self._prior = prior
        self._decay = decay
        self._rows: dict[Kind, int] = {}
        self._above: list[int] = []  # the row of a kind's prefix
        self._length: list[int] = []
        self._ended = np.zeros((16, _BINS))
        self._reused = np.zeros((16, _BINS))
        self._row((), 0)
        self._weight = 0.0
        self._count = 0.0
        self._worth: dict[Kind, list[float]] = {}

    def record(self, kind: Kind, age: float, weight: float, reused: bool) -> None:
        """A span's story ends: by a reuse, or because it is observed no longer."""
        row, place = self._row_of(kind), age_bin(age)
        self._ended[row, place] += weight
        if reused:
            self._reused[row, place] += weight
        self._weight += weight
        self._count += 1

    def known(self, kind: Kind) -> Kind:
        """The longest prefix of a kind that has a curve of its own."""
        while kind and kind not in self._worth:
            kind = kind[:-1]
        return kind

    def worth(self, kind: Kind, age: float) -> float:
        """The index of a span; 0 before anything was learned."""
        curve = self._worth.get(kind) or self._worth.get(self.known(kind))
        return curve[bisect_right(_STARTS, age) - 1] if curve else 0.0

    @property
    def learned(self) -> bool:
        """Whether there was anything to learn from yet."""
        return bool(self._worth)

    def relearn(self, waiting: Iterable[tuple[Kind, float, float]]) -> None:
        """Recompute all indices; ``waiting`` are spans (kind, age, weight) not reused so far."""
        if not self._count:
            return
        places = [(self._row_of(kind), age_bin(age), weight) for kind, age, weight in waiting]
        size = len(self._rows)
        ended, reused = self._ended[:size].copy(), self._reused[:size].copy()
        if places:
            rows, bins, weights = zip(*places, strict=True)
            np.add.at(ended, (rows, bins), weights)
        above, length = np.array(self._above), np.array(self._length)
        for level in range(max(self._length), 0, -1):
            here = np.flatnonzero(length == level)
            np.add.at(ended, above[here], ended[here])
            np.add.at(reused, above[here], reused[here])
        prior = self._prior * self._weight / self._count
        at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - 0.5 * (ended - reused)
        hazards = reused / np.maximum(at_risk, 1e-9)
        for level in range(1, max(self._length) + 1):
            here = np.flatnonzero(length == level)
            leaned = reused[here] + prior * hazards[above[here]]
            hazards[here] = leaned / (at_risk[here] + prior)
        enough = ended.sum(axis=1) >= prior
        enough[0] = True
        slopes = _steepest(hazards[enough])
        kinds = (kind for kind, own in zip(self._rows, enough.tolist(), strict=True) if own)
        self._worth = dict(zip(kinds, slopes, strict=True))
        self._fade()

    def _row_of(self, kind: Kind) -> int:
        row = self._rows.get(kind)
        return row if row is not None else self._row(kind, self._row_of(kind[:-1]))

    def _row(self, kind: Kind, above: int) -> int:
        """A new row; a prefix always has a smaller number than its extensions."""
        row = self._rows[kind] = len(self._rows)
        self._above.append(above)
        self._length.append(len(kind))
        if row == len(self._ended):
            self._ended = np.vstack((self._ended, np.zeros_like(self._ended)))
            self._reused = np.vstack((self._reused, np.zeros_like(self._reused)))
        return row

    def _fade(self) -> None:
        self._ended *= self._decay
        self._reused *= self._decay
        self._weight *= self._decay
        self._count *= self._decay


def _steepest(hazards: Curve) -> list[list[float]]:
    """Per kind (row) and bin, the steepest slope from the bin's start to a later point of the
    kind's curve (A, F)."""
    first = np.ones((len(hazards), 1))
    alive = np.hstack((first, np.cumprod(1.0 - np.clip(hazards, 0.0, 1.0), axis=1)))
    steps = (alive[:, 1:] + alive[:, :-1]) / 2 * _WIDTHS
    spent = np.hstack((0.0 * first, np.cumsum(steps, axis=1)))
    best = np.zeros_like(hazards)
    for place in range(_BINS):
        gain = alive[:, place, None] - alive[:, place + 1 :]
        time = spent[:, place + 1 :] - spent[:, place, None]
        best[:, place] = (gain / np.maximum(time, 1e-12)).max(axis=1)
    found: list[list[float]] = best.tolist()
    return found
