"""The installed vLLM as the oracle: our longest hit equals its ``find_longest_cache_hit``.

Both get the same block hashes and the same cached blocks; vLLM's blocks are entered into its own
block pool under its own keys, which are also ours. With a start above 0, everything before the
start is only in vLLM's pool (the GPU's own cache, from which our lookup continues). With chunks of
several blocks, whole chunks are cached, and vLLM is set to align its hits as ours are. Some
behaviour of vLLM 0.32 is not copied or cannot be queried; these cases are compared only with the
definition:

* with two draft groups of windows, vLLM checks only one of them for the block that it drops, and
  returns more than both have;
* a draft window with blocks smaller than the alignment of hits is rounded down twice at the
  beginning of a prefix, so that vLLM returns less than the window has;
* hits of a single group, and those of chunked local attention, cannot be aligned to more than a
  block (those of a single full group are rounded down here).

The test generates no windows of one token, which depend on no earlier token, and no chunked local
attention whose span is not a multiple of the block, because vLLM cuts it in the middle of a span.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from offload.connector.model.layout import model_layout
from offload.layout.groups import FULL, ModelLayout
from offload.layout.keys import chunk_keys
from offload.layout.prefix_match import PrefixMatcher
from tests.offload.connector.kv_cache_configs import (
    chunked,
    config_of,
    full,
    groups_of,
    mamba,
    mla,
    sliding,
    sliding_mla,
    vllm_config,
)
from tests.offload.layout.exhaustive_match import brute_force

CASES_PER_SEED = 50


def theirs(
    config, cached: set[bytes], hashes: list[bytes], limit: int, use_eagle: bool, align: int
):
    """vLLM's longest hit if these blocks are cached, and the positions of the blocks that it
    uses."""
    matcher = get_kv_cache_coordinator(
        kv_cache_config=config,
        max_model_len=100_000,
        max_in_flight_tokens=100_000,
        use_eagle=use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=align,
        hash_block_size=config.hash_block_size,
        allow_partial_hash_hits=False,
    )
    pool = matcher.block_pool
    for key in cached:
        pool.cached_block_hash_to_block.insert(key, pool.blocks[1])
    blocks, hit, _ = matcher.find_longest_cache_hit(hashes, limit)
    used = [[i for i, block in enumerate(group) if not block.is_null] for group in blocks]
    return hit, used


def random_specs(rng: random.Random) -> list:
    """One to five groups; chunked local attention only where all blocks are equal, as in vLLM."""
    unit = rng.choice([1, 2, 4])
    equal = rng.random() < 0.5
    makers = [
        lambda b: full(b),
        lambda b: full(b, head_size=16),
        lambda b: mla(b),
        lambda b: sliding(b, rng.randint(2, 12 * unit + 1)),
        lambda b: sliding(b, 5 * unit),
        lambda b: sliding_mla(b, rng.randint(2, 6 * unit + 1)),
        lambda b: mamba(b),
        lambda b: mamba(b, tp_replicated=True),
    ]
    if equal:
        makers.append(lambda b: chunked(b, b * rng.randint(1, 6)))
    count = rng.choice([1, 2, 2, 3, 4, 5])
    if count == 1:
        return [rng.choice(makers)(unit)]
    return [
        rng.choice(makers)(unit if equal else unit * rng.choice([1, 2, 3])) for _ in range(count)
    ]


def is_chunked(spec) -> bool:
    """Avoids a combination that vLLM rejects with an assertion: draft heads with chunked local
    attention."""
    return isinstance(spec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True)
class Case:
    """``cached`` are the keys in the tiers; ``before`` are the keys in the GPU's own cache, which
    has everything up to ``start``. ``keys`` are the keys of our chunks."""

    config: KVCacheConfig
    layout: ModelLayout
    hashes: list[bytes]
    keys: list[list[bytes]]
    cached: set[bytes]
    before: set[bytes]
    start: int
    limit: int
    use_eagle: bool

    @property
    def excepted(self) -> bool:
        """True if one of vLLM's deviations may show (see the module's docstring)."""
        groups = self.config.kv_cache_groups
        block = groups[0].kv_cache_spec.block_size
        if self.layout.alignment_tokens != block:
            if any(is_chunked(group.kv_cache_spec) for group in groups):
                return True
            if len(groups) == 1 and self.layout.groups[0].kind != FULL:
                return True
        marked = [g.kv_cache_spec for g in groups if g.is_eagle_group]
        if self.use_eagle and not marked:
            marked = [group.kv_cache_spec for group in groups]
        windows = {spec for spec in marked if isinstance(spec, SlidingWindowSpec)}
        align = self.layout.alignment_tokens
        return len(windows) > 1 or any(spec.block_size != align for spec in windows)


def random_case(rng: random.Random, chunk_blocks: int = 1, started: bool = False) -> Case:
    specs = random_specs(rng)
    use_eagle = rng.random() < 0.4 and not any(map(is_chunked, specs))
    drafts = {i for i in range(len(specs)) if rng.random() < 0.5} if use_eagle else set()
    if len(specs) == 1 and chunk_blocks > 1:
        use_eagle, drafts = False, set()
    config = config_of(groups_of(*specs, drafts=drafts))
    layout = model_layout(config, vllm_config(draft_head=use_eagle), chunk_blocks)
    alignment = math.lcm(*(spec.block_size for spec in specs))
    tokens = rng.randint(0, max(alignment, layout.alignment_tokens) * rng.randint(1, 12))
    hashes = [b"%016d" % i for i in range(tokens // config.hash_block_size)]
    limit = max(0, tokens - 1)
    start = rng.randint(0, limit // alignment) * alignment if started else 0
    keys = [
        chunk_keys(hashes, group.group, group.chunk_tokens // config.hash_block_size)
        for group in layout.groups
    ]
    cached = random_presence(rng, config, layout, hashes)
    before = {
        key
        for group, spec in enumerate(config.kv_cache_groups)
        for key in block_keys(config, group, hashes)[: start // spec.kv_cache_spec.block_size]
    }
    return Case(config, layout, hashes, keys, cached, before, start, limit, use_eagle)


def block_keys(config, group: int, hashes: list[bytes]) -> list[bytes]:
    """vLLM's keys for the blocks of one group."""
    step = config.kv_cache_groups[group].kv_cache_spec.block_size // config.hash_block_size
    return [make_block_hash_with_group_id(end, group) for end in hashes[step - 1 :: step]]


def random_presence(rng: random.Random, config, layout, hashes: list[bytes]) -> set[bytes]:
    """Choose cached blocks: for every group a run of chunks with holes, so that hits are neither
    empty nor complete."""
    cached = set()
    share = rng.choice([0.5, 0.8, 0.95, 1.0])
    for group in layout.groups:
        blocks, size = block_keys(config, group.group, hashes), group.chunk_blocks
        chunks = [blocks[i : i + size] for i in range(0, len(blocks) // size * size, size)]
        upto = len(chunks) if rng.random() < 0.5 else rng.randint(0, len(chunks))
        for chunk in chunks[:upto]:
            if rng.random() < share:
                cached.update(chunk)
    return cached


def our_hit(case: Case) -> int:
    return PrefixMatcher(case.layout).longest_match(case.keys, case.cached, case.start, case.limit)


def compare(case: Case, facts: object) -> None:
    """Raises ``AssertionError`` unless our answer is right."""
    found = our_hit(case)
    if case.excepted:
        everything = case.layout, case.keys, case.cached, case.start, case.limit
        assert found == brute_force(*everything), facts
        return
    align = case.layout.alignment_tokens
    union = case.cached | case.before
    expected, used = theirs(case.config, union, case.hashes, case.limit, case.use_eagle, align)
    rounded = expected // align * align
    assert found == max(case.start, rounded), facts
    if found > case.start and expected == rounded:
        ranges = PrefixMatcher(case.layout).block_ranges(case.start, found)
        sizes = [group.block_tokens for group in case.layout.groups]
        new = [
            [i for i in u if i * size >= case.start] for u, size in zip(used, sizes, strict=True)
        ]
        assert new == [list(r) for r in ranges], facts


@pytest.mark.parametrize("seed", range(100))
def test_longest_match_and_its_blocks_equal_vllm(seed):
    rng = random.Random(seed)
    for number in range(CASES_PER_SEED):
        case = random_case(rng)
        compare(case, (seed, number, case))


@pytest.mark.parametrize("seed", range(100))
def test_lookups_that_continue_after_the_gpus_own_cache_and_in_chunks(seed):
    rng = random.Random(f"started {seed}")
    for number in range(CASES_PER_SEED):
        case = random_case(rng, chunk_blocks=rng.choice([1, 1, 2, 3, 4]), started=True)
        compare(case, (seed, number, case))


def test_the_generated_cases_cover_every_kind():
    """The generator must produce every kind, drafts, mixed block sizes, and hits of all sorts."""
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        case = random_case(rng)
        hit = our_hit(case)
        specs = [group.kv_cache_spec for group in case.config.kv_cache_groups]
        seen["zero" if hit == 0 else "part" if hit < case.limit // 2 else "most"] += 1
        seen["mixed blocks"] += len({spec.block_size for spec in specs}) > 1
        seen["draft and hit"] += case.use_eagle and hit > 0
        seen["state and hit"] += hit > 0 and any(isinstance(s, MambaSpec) for s in specs)
        for spec in specs:
            seen[type(spec).__name__] += 1
        seen["excepted"] += case.excepted
    assert all(seen[name] > 60 for name in ("zero", "part", "most", "draft and hit")), seen
    assert all(seen[name] > 60 for name in ("mixed blocks", "state and hit")), seen
    assert len([name for name in seen if name.endswith("Spec")]) == 6, seen
    assert seen["excepted"] < 200, seen


def test_the_cases_with_a_start_cover_every_kind():
    """Lookups must continue past the start, also from the middle of a chunk, in all kinds of
    groups."""
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(3000):
        case = random_case(rng, chunk_blocks=rng.choice([1, 1, 2, 3, 4]), started=True)
        if not 0 < case.start < our_hit(case) or case.excepted:
            continue
        groups = case.layout.groups
        seen["further"] += 1
        seen["several groups in chunks"] += len(groups) > 1 and groups[0].chunk_blocks > 1
        seen["draft"] += case.use_eagle
        for kind in {group.kind for group in groups}:
            seen[kind] += 1
        seen["within a chunk"] += any(case.start % group.chunk_tokens for group in groups)
    assert len(seen) == 7, seen
    assert min(seen.values()) > 30, seen
