"""The model of a tier that loads share equally, compared with a simulation of it."""

from __future__ import annotations

import random

import pytest

from offload.planner.load_or_recompute import ReadQueue


def queue_of(tokens: list[int]) -> ReadQueue:
    queue = ReadQueue()
    for job, count in enumerate(tokens):
        queue.begin(job, count)
    return queue


def delivered_until_the_end_of(own: int, others: list[int]) -> int:
    """Deliver one token to each load in turn, to this load last, until this load has all its
    tokens."""
    left, mine, delivered = list(others), own, 0
    while mine:
        for at, count in enumerate(left):
            if count:
                left[at] -= 1
                delivered += 1
        mine -= 1
        delivered += 1
    return delivered


@pytest.mark.parametrize("seed", range(40))
def test_what_others_receive_meanwhile(seed: int) -> None:
    rng = random.Random(seed)
    others = [rng.randint(1, 60) for _ in range(rng.randint(0, 5))]
    queue, own = queue_of(others), rng.randint(1, 60)
    assert queue.before(own) + own == delivered_until_the_end_of(own, others)


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_load_within_a_bound(seed: int) -> None:
    rng = random.Random(seed)
    others = [rng.randint(1, 60) for _ in range(rng.randint(0, 5))]
    queue, bound = queue_of(others), rng.randint(0, 200)
    part = queue.part(bound)
    assert part + queue.before(part) <= bound
    assert part + 1 + queue.before(part + 1) > bound


def test_loads_that_have_ended_do_not_count() -> None:
    queue = queue_of([5, 7])
    queue.end(0)
    queue.end(0)
    assert (len(queue), queue.before(100)) == (1, 7)
    assert queue.begin(8, 3) == 3
