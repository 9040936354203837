"""Keys that are made on demand equal those that are made at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from offload.layout import request_keys as lazy_keys
from offload.layout.keys import chunk_keys
from offload.layout.request_keys import RequestKeys

PAGE = 4


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small pages; records how many keys were made each time."""
    counts: list[int] = []

    def counting(*arguments: Any) -> list[bytes]:
        found = chunk_keys(*arguments)
        counts.append(len(found))
        return found

    monkeypatch.setattr(lazy_keys, "PAGE", PAGE)
    monkeypatch.setattr(lazy_keys, "chunk_keys", counting)
    return counts


def hashes(count: int) -> list[bytes]:
    source = random.Random(count)
    return [source.randbytes(32) for _ in range(count)]


class Pair:
    """Keys on demand over a live list of block hashes, and a list of all keys to compare."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.group, self.per_chunk = self.random.randrange(300), self.random.choice([1, 2, 5])
        self.identity = self.random.choice([b"", b"adapter"])
        self.live: list[bytes] = []
        self.lazy = RequestKeys(self.group, self.per_chunk, self.identity)
        self.eager: list[bytes] = []
        self.asked = 0  # chunks before this one may have been requested

    def step(self) -> None:
        """One of the events in the life of a request's keys."""
        what = self.random.choice([self.append, self.grow, self.replace, *[self.ask] * 5])
        what()
        assert len(self.lazy) == len(self.eager)

    def append(self) -> None:
        """vLLM has computed more hashes, which the request's keys do not include yet."""
        self.live += [self.random.randbytes(32) for _ in range(self.random.choice([1, 3, 40]))]

    def grow(self) -> None:
        self.lazy.grow(self.live)
        self.eager = chunk_keys(self.live, self.group, self.per_chunk, 0, self.identity)

    def replace(self) -> None:
        """A session continues: hashes that nothing has requested change."""
        first = self.asked * self.per_chunk
        self.live[first:] = [self.random.randbytes(32) for _ in self.live[first:]]
        self.grow()

    def ask(self) -> None:
        """Read keys in one of the ways in which a list can be read."""
        count = len(self.eager)
        first, end = self.random.randint(0, count + 2), self.random.randint(0, count + 2)
        self.asked = max(self.asked, min(end, count))
        what = self.random.random()
        if what < 0.6:
            assert self.lazy[first:end] == self.eager[first:end]
        elif what < 0.7:
            self.asked = count
            assert self.lazy[-first::] == self.eager[-first::]
            assert self.lazy[first:end:3] == self.eager[first:end:3]
        elif what < 0.8 and count:
            self.asked = count
            at = self.random.randrange(-count, count)
            assert self.lazy[at] == self.eager[at]
        elif what < 0.9:
            self.lazy.make(end, self.random.randrange(20))
        else:
            frozen = self.lazy.frozen(end)
            before, live = self.eager[:end], list(self.live)
            self.live.clear()
            assert [*frozen] == before
            assert len(frozen) == len(before)
            self.live += live


@pytest.mark.parametrize("seed", range(60))
def test_keys_on_demand_are_the_same_keys(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(60):
        pair.step()
    assert [*pair.lazy] == pair.eager, f"seed {seed}"


def test_out_of_range_is_an_error() -> None:
    keys = RequestKeys(0, 2)
    keys.grow(hashes(7))
    for at in (3, -4):
        with pytest.raises(IndexError):
            keys[at]


def test_only_requested_keys_are_made_and_only_once(made: list[int]) -> None:
    keys = RequestKeys(0, 1)
    keys.grow(hashes(1000))
    assert keys[0:3] == keys[0:3]
    assert sum(made) == 3
    assert keys[500:504] == [*keys[500:502], keys[502], keys[503]]
    assert sum(made) <= 3 + 4 + PAGE
    keys[:]
    keys[:]
    assert sum(made) == 1000


def test_keys_are_made_ahead_in_parts(made: list[int]) -> None:
    keys = RequestKeys(0, 1)
    keys.grow(hashes(50))
    keys[20:22]
    parts = [keys.make(45, 15) for _ in range(4)]
    assert parts == [15, 15, 13, 0]
    assert sum(made) == 45
    keys[:45]
    assert sum(made) == 45
