"""The prefix matcher compared with a brute-force reading of its specification, on generated
layouts."""

import math
import random

import pytest

from offload.layout.groups import FULL, STATE, WINDOW, GroupLayout, ModelLayout
from offload.layout.prefix_match import PrefixMatcher, present_in
from tests.offload.layout.exhaustive_match import brute_force


def make_group(group: int, kind: str, block: int, **more) -> GroupLayout:
    chunk = more.pop("chunk_blocks", 1)
    return GroupLayout(group, kind, block, chunk, (f"layer.{group}",), 64, **more)


def make_layout(*groups: GroupLayout, scheduler: int = 1) -> ModelLayout:
    alignment = math.lcm(scheduler, *(group.chunk_tokens for group in groups))
    return ModelLayout(1024, 1, alignment, groups)


def keys_of(layout: ModelLayout, tokens: int) -> list[list[bytes]]:
    return [
        [b"%d/%d" % (g.group, i) for i in range(tokens // g.chunk_tokens)] for g in layout.groups
    ]


def random_layout(rng: random.Random) -> ModelLayout:
    groups = []
    for i in range(rng.randint(1, 4)):
        block = rng.choice([1, 2, 2, 4])
        kind = rng.choice([FULL, WINDOW, WINDOW, "local", STATE])
        chunk = 1 if kind == STATE else rng.choice([1, 1, 2])
        more = {"chunk_blocks": chunk, "draft": kind != STATE and rng.random() < 0.2}
        if kind == WINDOW:
            more["window_tokens"] = rng.randint(0, 12)
        if kind == "local":
            kind, more["span_tokens"] = WINDOW, rng.choice([3, 4, 8, 12])
        groups.append(make_group(i, kind, block, **more))
    return make_layout(*groups)


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    for case in range(60):
        layout = random_layout(rng)
        tokens = rng.randint(0, 40) + layout.alignment_tokens * rng.randint(0, 6)
        keys = keys_of(layout, tokens)
        share = rng.choice([0.3, 0.7, 0.9, 0.97, 1.0])
        present = {key for group in keys for key in group if rng.random() < share}
        start = rng.choice([0, 0, rng.randint(0, 5) * layout.alignment_tokens])
        limit = rng.choice([tokens, max(0, tokens - 1)])
        wanted = brute_force(layout, keys, present, start, limit)
        found = PrefixMatcher(layout).longest_match(keys, present, start, limit)
        assert found == max(start, wanted), (seed, case, layout, sorted(present), start, limit)


def test_load_ranges_contain_what_each_kind_needs():
    layout = make_layout(
        make_group(0, FULL, 4),
        make_group(1, WINDOW, 4, window_tokens=5),
        make_group(2, STATE, 4),
        make_group(3, WINDOW, 4, span_tokens=16),
    )
    matcher = PrefixMatcher(layout)
    assert matcher.load_ranges(0, 24) == (range(6), range(4, 6), range(5, 6), range(4, 6))
    assert matcher.load_ranges(20, 24)[:3] == (range(5, 6), range(5, 6), range(5, 6))
    assert matcher.load_ranges(0, 16)[3] == range(4, 4)
    assert matcher.load_ranges(24, 24) == (range(0),) * 4


def test_block_ranges_leave_out_unneeded_blocks_of_a_chunk():
    layout = make_layout(
        make_group(0, FULL, 2, chunk_blocks=4),
        make_group(1, WINDOW, 2, chunk_blocks=4, window_tokens=3),
    )
    matcher = PrefixMatcher(layout)
    assert matcher.load_ranges(4, 16) == (range(2), range(1, 2))
    assert matcher.block_ranges(4, 16) == (range(2, 8), range(6, 8))


def test_draft_group_drops_its_last_chunk_once():
    """Five chunks present: four are a hit; the fifth is proof and is not loaded."""
    layout = make_layout(make_group(0, FULL, 4), make_group(1, FULL, 4, draft=True))
    keys = keys_of(layout, 20)
    present = {key for group in keys for key in group}
    matcher = PrefixMatcher(layout)
    assert matcher.longest_match(keys, present, 0, 20) == 16
    assert matcher.longest_match(keys, present, 0, 19) == 16
    assert matcher.load_ranges(0, 16) == (range(4), range(4))


def test_start_is_returned_when_nothing_is_longer():
    layout = make_layout(make_group(0, FULL, 4))
    keys = keys_of(layout, 32)
    matcher = PrefixMatcher(layout)
    assert matcher.longest_match(keys, set(), 8, 32) == 8
    assert matcher.longest_match([[]], set(), 0, 3) == 0
    assert matcher.longest_match(keys, set(keys[0]), 8, 32) == 32
    assert matcher.longest_match(keys, set(keys[0][2:]), 8, 32) == 32, "before start: on GPU"


@pytest.mark.parametrize("seed", range(10))
def test_unreachable_chunks_serve_no_hit(seed):
    """Removing all unreachable chunks changes no hit from the beginning."""
    rng = random.Random(seed)
    for _ in range(40):
        layout = random_layout(rng)
        tokens = layout.alignment_tokens * rng.randint(1, 6) + rng.randint(0, 9)
        keys = keys_of(layout, tokens)
        present = {key for group in keys for key in group if rng.random() < 0.95}
        matcher = PrefixMatcher(layout)
        reachable = {
            key
            for group, group_keys in zip(layout.groups, keys, strict=True)
            for i, key in enumerate(group_keys)
            if key in present and matcher.reachable(group, i)
        }
        full = matcher.longest_match(keys, present, 0, tokens)
        assert matcher.longest_match(keys, reachable, 0, tokens) == full, (seed, layout)


@pytest.mark.parametrize("seed", range(10))
def test_reachable_chunks_are_those_that_some_boundary_needs(seed):
    rng = random.Random(seed)
    for _ in range(40):
        layout = random_layout(rng)
        step = layout.alignment_tokens
        for group in layout.groups:
            needed = set().union(*(needed_at(group, 0, b) for b in range(step, 7 * step, step)))
            chunks = range(6 * step // group.chunk_tokens)
            reachable = {i for i in chunks if PrefixMatcher(layout).reachable(group, i)}
            assert reachable == needed & set(chunks), (seed, group)


def needed_at(group: GroupLayout, start: int, boundary: int) -> set[int]:
    """Chunks without which the group cannot resume at ``boundary``, including a draft's proof."""
    size = group.chunk_tokens
    tokens = range(max(start, group.tail_start(boundary)), boundary)
    return {token // size for token in tokens} | ({boundary // size} if group.draft else set())


@pytest.mark.parametrize("seed", range(10))
def test_every_chunk_that_a_hit_could_need_is_listed(seed):
    rng = random.Random(seed)
    for _ in range(40):
        layout = random_layout(rng)
        step = layout.alignment_tokens
        keys = keys_of(layout, 8 * step)
        start, limit = sorted(rng.sample(range(7 * step), 2))
        start -= start % step
        wanted = set(PrefixMatcher(layout).wanted(keys, start, limit))
        for boundary in range(start + step, limit + 1, step):
            for group, mine in zip(layout.groups, keys, strict=True):
                needed = {mine[chunk] for chunk in needed_at(group, start, boundary)}
                assert needed <= wanted, (seed, layout, start, limit, boundary)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_gap_of_the_next_boundary_is_named(seed):
    rng, named = random.Random(seed), 0
    for _ in range(40):
        layout = random_layout(rng)
        step = layout.alignment_tokens
        keys = keys_of(layout, 8 * step)
        present = {key for group in keys for key in group if rng.random() < 0.8}
        matcher = PrefixMatcher(layout)
        hit = matcher.longest_match(keys, present, 0, 6 * step)
        lacks = {
            (at, chunk)
            for at, group in enumerate(layout.groups)
            for chunk in needed_at(group, 0, matcher.next_boundary(hit))
            if keys[at][chunk] not in present
        }
        found = matcher.first_missing(keys, present_in(present), 0, hit)
        assert found in lacks if lacks else found is None, (seed, layout, hit)
        named += len(lacks) > 0
    assert named


def test_presence_over_several_tiers():
    keys = [b"a", b"b", b"c", b"d"]
    assert present_in({b"a"})(keys) == b"\1\0\0\0"
    assert present_in({b"a"}, {b"c", b"a"}, {b"d": 1})(keys) == b"\1\0\1\1"


def test_lookup_of_8192_chunks_in_two_groups():
    """The work is bounded: no key is queried twice, and presence is queried in batches."""
    layout = make_layout(make_group(0, FULL, 16), make_group(1, WINDOW, 16, window_tokens=4095))
    tokens = 8192 * 16
    keys = [[b"%032d" % i + bytes([g]) for i in range(8192)] for g in range(2)]
    present = dict.fromkeys(key for group in keys for key in group)
    calls: list[int] = []

    def counted(batch):
        calls.append(len(batch))
        return bytes(map(present.__contains__, batch))

    matcher = PrefixMatcher(layout)
    assert matcher.longest_match(keys, counted, 0, tokens) == tokens
    assert sum(calls) <= 8192 + 4096 // 16 + 512
    assert len(calls) <= 8192 // 512 + 2


def test_worst_case_queries_each_chunk_once():
    """No chunk of the window group is present: a single pass, not a quadratic search."""
    layout = make_layout(make_group(0, FULL, 16), make_group(1, WINDOW, 16, window_tokens=4095))
    keys = [[b"%032d" % i + bytes([g]) for i in range(8192)] for g in range(2)]
    calls: list[int] = []

    def counted(batch):
        calls.append(len(batch))
        return bytes([key[-1] == 0 for key in batch])

    assert PrefixMatcher(layout).longest_match(keys, counted, 0, 8192 * 16) == 0
    assert sum(calls) == 2 * 8192
