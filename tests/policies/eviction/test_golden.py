"""Short sequences with the evictions that each algorithm's paper requires."""

from __future__ import annotations

import pytest

from policies.registry import make_policy
from policies.testing import play

GOLDEN = [
    ("fifo", "+a +b +c a !1 +d !2", "a b c"),
    ("lru", "+a +b +c a !1 +d !2", "b c a"),
    ("lru", "+a,b,c !1", "c"),  # the tail of a request is evicted first
    ("lru", "+a,b +c a,b !2", "c b"),
    ("leaf-lru", "+a,b +c a,b !2", "c b"),
    ("leaf-lru", "+a,b +c +d a !9", "b c d a"),
    ("lfu", "+a +b +c a a b !3", "c b a"),
    ("lfu", "+a +b +c a b c a !1 +d !3", "b d c a"),
    ("slru", "+a +b +c a !3", "b c a"),
    # a returned; the entry queue keeps a quarter
    ("2q", "+a +b +c +d !1 +a +e !9", "a b c d a e"),
    # the ghost of a has taught it to keep one new key
    ("arc", "+a +b +c +d b !1 +a !9", "a c b a d"),
    ("sieve", "+a +b +c +d a !1 +e !1 !1 !1 !1", "b c d e a"),
    ("sieve", "+a +b +c +d a !1 -c !1 !1", "b d a"),  # the key at the hand is removed
    ("s3fifo", "+a +b +c a a !2 +d !9", "b c d a"),
    ("s3fifo", "+a +b +c +d !1 +a +e !9", "a b c d e a"),
    ("lirs", "+a +b +c +d !1 +e !1 +e !1", "a e b"),
    ("gdsf", "+a +b +c a a !1 +d !1 !9", "b c d a"),
    ("ttl", "+a +b +c a !3", "b c a"),
]


@pytest.mark.parametrize(("name", "script", "evicted"), GOLDEN)
def test_golden_sequence(name: str, script: str, evicted: str) -> None:
    assert play(make_policy(name), script) == evicted


def test_wtinylfu_keeps_what_is_requested_often() -> None:
    policy = make_policy("wtinylfu")
    old = " ".join(f"+{word}" for word in "abcdefgh")
    assert play(policy, f"{old} a a a b b b h h h !1 +x !1 +y !1 +y !1") == "c x y d"
