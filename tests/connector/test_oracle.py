"""The installed vLLM as the oracle: our longest hit equals its ``find_longest_cache_hit``.

Both are given the same block hashes and the same cached blocks; vLLM's are put into its own block
pool under its own keys, which are ours too. Two things of vLLM 0.32 with draft heads and sliding
windows are not copied; these cases are compared with the definition alone:

* with two draft groups of windows it checks only one of them for the block that it drops, and
  answers more than both have;
* a draft window with blocks smaller than the hits' alignment is rounded down twice at the
  beginning of a prefix, and answers less than it has.

Windows of one token are not generated (they read nothing before them), nor chunked local attention
whose span is no multiple of the block (vLLM cuts it in the middle of a span).
"""

import math
import random
from collections import Counter

import pytest
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from offload.connector.vllm_layout import model_layout
from offload.coordinator import Coordinator
from offload.keys import chunk_keys
from tests.connector.vllm_configs import (
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
from tests.offload.layout_oracle import brute_force

CASES_PER_SEED = 50


def theirs(config, cached: set[bytes], hashes: list[bytes], limit: int, use_eagle: bool):
    """vLLM's longest hit with these blocks cached, and the positions of the blocks it uses."""
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=config,
        max_model_len=100_000,
        max_in_flight_tokens=100_000,
        use_eagle=use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=config.hash_block_size,
        allow_partial_hash_hits=False,
    )
    pool = coordinator.block_pool
    for key in cached:
        pool.cached_block_hash_to_block.insert(key, pool.blocks[1])
    blocks, hit, _ = coordinator.find_longest_cache_hit(hashes, limit)
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
    """vLLM asserts that draft heads and chunked local attention do not meet."""
    return isinstance(spec, ChunkedLocalAttentionSpec)


def random_case(rng: random.Random):
    specs = random_specs(rng)
    use_eagle = rng.random() < 0.4 and not any(map(is_chunked, specs))
    drafts = {i for i in range(len(specs)) if rng.random() < 0.5} if use_eagle else set()
    config = config_of(groups_of(*specs, drafts=drafts))
    hash_tokens = config.hash_block_size
    alignment = math.lcm(*(spec.block_size for spec in specs))
    tokens = rng.randint(0, alignment * rng.randint(1, 12))
    hashes = [b"%016d" % i for i in range(tokens // hash_tokens)]
    cached = random_presence(rng, config, hashes)
    return config, hashes, cached, max(0, tokens - 1), use_eagle


def random_presence(rng: random.Random, config, hashes: list[bytes]) -> set[bytes]:
    """Cached blocks: of every group a run with holes, so that hits are neither all nor none."""
    cached = set()
    share = rng.choice([0.5, 0.8, 0.95, 1.0])
    for group, spec in enumerate(config.kv_cache_groups):
        step = spec.kv_cache_spec.block_size // config.hash_block_size
        ends = hashes[step - 1 :: step]
        upto = len(ends) if rng.random() < 0.5 else rng.randint(0, len(ends))
        cached |= {
            make_block_hash_with_group_id(end, group) for end in ends[:upto] if rng.random() < share
        }
    return cached


def layout_and_keys(config, hashes: list[bytes], use_eagle: bool):
    layout = model_layout(config, vllm_config(draft_head=use_eagle), chunk_blocks=1)
    keys = [
        chunk_keys(hashes, group.group, group.chunk_tokens // config.hash_block_size)
        for group in layout.groups
    ]
    return layout, keys


def is_excepted(config, use_eagle: bool) -> bool:
    """Whether one of vLLM's two oddities can show (see the module's head)."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    marked = [g.kv_cache_spec for g in config.kv_cache_groups if g.is_eagle_group]
    if use_eagle and not marked:
        marked = specs
    windows = {spec for spec in marked if isinstance(spec, SlidingWindowSpec)}
    alignment = math.lcm(*(spec.block_size for spec in specs))
    return len(windows) > 1 or any(spec.block_size != alignment for spec in windows)


@pytest.mark.parametrize("seed", range(100))
def test_longest_hit_and_its_blocks_equal_vllm(seed):
    rng = random.Random(seed)
    for case in range(CASES_PER_SEED):
        config, hashes, cached, limit, use_eagle = random_case(rng)
        expected, used = theirs(config, cached, hashes, limit, use_eagle)
        layout, keys = layout_and_keys(config, hashes, use_eagle)
        coordinator = Coordinator(layout)
        found = coordinator.longest_hit(keys, cached, 0, limit)
        facts = (seed, case, config.kv_cache_groups, sorted(cached), limit, use_eagle)
        if is_excepted(config, use_eagle):
            assert found == brute_force(layout, keys, cached, 0, limit), facts
        else:
            assert found == expected, facts
            assert used == [list(r) for r in coordinator.block_ranges(0, found)], facts


def test_generated_cases_are_worth_it():
    """The generator reaches every kind, drafts, mixed block sizes, and hits of all sorts."""
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        config, hashes, cached, limit, use_eagle = random_case(rng)
        layout, keys = layout_and_keys(config, hashes, use_eagle)
        hit = Coordinator(layout).longest_hit(keys, cached, 0, limit)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        seen["zero" if hit == 0 else "part" if hit < limit // 2 else "most"] += 1
        seen["mixed blocks"] += len({spec.block_size for spec in specs}) > 1
        seen["draft and hit"] += use_eagle and hit > 0
        seen["state and hit"] += hit > 0 and any(isinstance(s, MambaSpec) for s in specs)
        for spec in specs:
            seen[type(spec).__name__] += 1
        seen["excepted"] += is_excepted(config, use_eagle)
    assert all(seen[name] > 60 for name in ("zero", "part", "most", "draft and hit")), seen
    assert all(seen[name] > 60 for name in ("mixed blocks", "state and hit")), seen
    assert len([name for name in seen if name.endswith("Spec")]) == 6, seen
    assert seen["excepted"] < 200, seen
