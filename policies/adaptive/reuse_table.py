"""Learns online how soon spans of a kind are reused, and what their space is worth.

For each kind, a life table over ages (time since last use, in blocks touched meanwhile; bins grow
by half) gives the probability of a reuse at each age. Spans that have not returned yet count as
censored (E. L. Kaplan, P. Meier, "Nonparametric estimation from incomplete observations", JASA 53,
1958). Kinds are tuples; a kind with few observations relies on its prefix, recursively.

The worth of a span at age a is its Gittins index (J. C. Gittins, "Bandit processes and dynamic
allocation indices", J. R. Stat. Soc. B 41(2), 1979): the best ratio, over all horizons, of the
chance of a reuse before the horizon to the expected time until reuse or horizon. It corresponds to
"hit density" in LHD (N. Beckmann, H. Chen, A. Cidon, NSDI 2018), but does not depend on the current
eviction rate. Let F be the probability of a reuse up to an age, and A the expected time until the
reuse or that age: the index is the steepest slope from (A(a), F(a)) to a later point of this curve.
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
    """The bin of an age; the last bin has no upper bound."""
    return bisect_right(_STARTS, age) - 1


class ReuseTable:
    """Life tables per kind. A kind needs ``prior`` observations to count as much as its prefix. The
    weight of an observation halves after ``half_life`` further ones.

    Callers refer to kinds by their rows (``row``), which never change.
    """

    def __init__(self, prior: float = 10.0, half_life: float = 6000.0) -> None:
        self._prior = prior
        self._half_life = half_life
        self._rows: dict[Kind, int] = {}
        self._above: list[int] = []  # the row of a kind's prefix
        self._length: list[int] = []
        self._known: list[int] = []
        self._curves: list[list[float]] = []  # the rows of the known kinds
        self._new: list[tuple[int, float, float, bool]] = []
        self._ended = np.zeros((1, _BINS))
        self._reused = np.zeros((1, _BINS))
        self._weight = 0.0
        self._count = 0.0
        self.learned = False  # true after the first observation
        self._add_row((), 0)

    def row(self, kind: Kind) -> int:
        """The row of a kind; a prefix always has a smaller row number than its extensions."""
        row = self._rows.get(kind)
        return row if row is not None else self._add_row(kind, self.row(kind[:-1]))

    def record(self, row: int, age: float, weight: float, reused: bool) -> None:
        """Record the end of an observation: a reuse, or the time until which the span was not
        reused."""
        self._new.append((row, age, weight, reused))

    def known(self, row: int) -> int:
        """The row of the longest prefix of this kind that has its own curve."""
        return self._known[row]

    def worth(self, row: int, age: float) -> float:
        """The index of a span; 0 before anything has been learned."""
        return self._curves[row][bisect_right(_STARTS, age) - 1]

    def relearn(self, waiting: Iterable[tuple[int, float, float, bool]]) -> None:
        """Recompute all indices; ``waiting`` are spans (row, age, weight, False) that have not been
        reused so far."""
        self._take_in_new()
        if not self._count:
            return
        ended, reused = self._ended.copy(), self._reused.copy()
        rows, bins, weights, _ = _columns(waiting)
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
        slopes = iter(_steepest(hazards[enough]))
        for row, own in enumerate(enough.tolist()):
            self._known[row] = row if own else self._known[self._above[row]]
            self._curves[row] = next(slopes) if own else self._curves[self._above[row]]
        self.learned = True

    def _add_row(self, kind: Kind, above: int) -> int:
        row = self._rows[kind] = len(self._rows)
        self._above.append(above)
        self._length.append(len(kind))
        self._known.append(self._known[above] if row else 0)
        self._curves.append(self._curves[above] if row else [0.0] * _BINS)
        return row

    def _take_in_new(self) -> None:
        """Decay past observations by the number of new ones, and add the new ones."""
        fresh = np.zeros((len(self._rows), _BINS))
        left = 0.5 ** (len(self._new) / self._half_life)
        size = len(self._ended)
        ended, reused = fresh.copy(), fresh
        ended[:size] = self._ended * left
        reused[:size] = self._reused * left
        rows, bins, weights, again = _columns(self._new)
        np.add.at(ended, (rows, bins), weights)
        np.add.at(reused, (rows, bins), weights * again)
        self._ended, self._reused = ended, reused
        self._weight = self._weight * left + float(weights.sum())
        self._count = self._count * left + len(self._new)
        self._new.clear()


def _columns(
    observations: Iterable[tuple[int, float, float, bool]],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Curve, Curve]:
    """Observations as arrays: rows, age bins, weights and reuse (0 or 1)."""
    rows, ages, weights, reused = tuple(zip(*observations, strict=True)) or ((), (), (), ())
    bins = np.searchsorted(_EDGES[:-1], np.array(ages), side="right") - 1
    return (
        np.array(rows, np.intp),
        bins,
        np.array(weights, np.float64),
        np.array(reused, np.float64),
    )


def _steepest(hazards: Curve) -> list[list[float]]:
    """Per kind (row) and bin, the steepest slope from the bin's start to a later point of the
    kind's curve (A, F)."""
    alive = np.ones((_BINS + 1, len(hazards)))  # by bin first, because whole rows are used below
    np.cumprod(1.0 - np.clip(hazards.T, 0.0, 1.0), axis=0, out=alive[1:])
    spent = np.zeros_like(alive)
    np.cumsum((alive[1:] + alive[:-1]) / 2 * _WIDTHS[:, None], axis=0, out=spent[1:])
    best = np.zeros_like(hazards.T)
    for at in range(_BINS):
        gain = alive[at] - alive[at + 1 :]
        time = spent[at + 1 :] - spent[at]
        best[at] = (gain / np.maximum(time, 1e-12)).max(axis=0)
    found: list[list[float]] = best.T.tolist()
    return found
