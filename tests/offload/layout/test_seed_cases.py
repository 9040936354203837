"""Five real cases in which a model's block geometry was misunderstood.

Each comes from a public change in vllm-project/vllm (its pull request is in the name) and is tested
with the original sizes.
"""

import math

import pytest
import torch

from offload.errors import AlignmentError, UnsupportedSpecError
from offload.geometry.translate import expand_blocks
from offload.layout.checks import GroupInput, LayoutInput, build_layout
from offload.layout.groups import FULL, STATE, WINDOW
from offload.layout.prefix_match import PrefixMatcher
from offload.layout.registration import GroupCaches, register_kv_caches
from tests.texts import same_text


def make_input(*groups: GroupInput, hash_tokens: int, **more) -> LayoutInput:
    scheduler = math.lcm(hash_tokens, *(group.block_tokens for group in groups))
    values = {"num_blocks": 64, "scheduler_tokens": scheduler, **more}
    return LayoutInput(groups=groups, hash_tokens=hash_tokens, **values)


def make_group(group: int, kind: str, block: int, **more) -> GroupInput:
    spec = {FULL: "full_attention", WINDOW: "sliding_window", STATE: "mamba"}.get(kind, "")
    return GroupInput(
        group, more.pop("spec", spec), kind, (f"model.layers.{group}",), block, **more
    )


def test_case_1_pr_39596_mla_and_gqa_draft_layers_in_one_model():
    """MLA ``(2, 16, 96)`` with Eagle ``(2, 16, 8, 64)``, two blocks each, compared by bytes."""
    mla = torch.zeros(2, 16, 96, dtype=torch.float16)
    eagle = torch.zeros(2, 16, 8, 64, dtype=torch.float16)
    layers = {"model.layers.0.attn": mla, "draft.layers.0.attn": eagle}
    registration = register_kv_caches(2, [GroupCaches(0, 1, layers)])
    regions = registration.groups[0].regions
    assert [r.address for r in regions] == [mla.data_ptr(), eagle.data_ptr()]
    assert [r.page_bytes * 2 for r in regions] == [mla.nbytes, eagle.nbytes]
    assert [r.page_bytes for r in regions] == [mla.nbytes // 2, eagle.nbytes // 2]
    assert [r.block_stride for r in regions] == [mla.nbytes // 2, eagle.nbytes // 2]
    assert registration.groups[0].block_bytes == 16 * 96 * 2 + 16 * 8 * 64 * 2


def test_case_2_pr_42766_kernel_block_of_64_in_blocks_of_128():
    """One model runner presents ``num_blocks`` rows, the other twice as many, for the same
    bytes."""
    num_blocks, block, kernel_block = 10, 128, 64
    ratio = block // kernel_block
    whole = torch.zeros(num_blocks, 4, block, 64, dtype=torch.float16)
    split = whole.view(num_blocks * ratio, 4, kernel_block, 64)
    logical, kernel = (
        register_kv_caches(num_blocks, [GroupCaches(0, 1, {"layer": tensor})]).groups[0]
        for tensor in (whole, split)
    )
    assert logical == kernel
    assert logical.block_bytes == 4 * block * 64 * 2
    blocks = [3, 7, 0]
    assert expand_blocks(blocks, ratio) == [6, 7, 14, 15, 0, 1]
    assert len(expand_blocks(list(range(num_blocks)), ratio)) == split.shape[0]


def test_case_2_storage_that_is_not_split_with_the_block():
    """Packed MLA storage: 128 tokens in 32 stored states, kernel block 64, blocks interleaved with
    another layer's. Registered by bytes, nothing is split."""
    num_blocks, states, width, other = 10, 32, 576, 1000
    storage = torch.zeros(num_blocks * (states * width + other), dtype=torch.uint8)
    stride = states * width + other
    packed = torch.as_strided(storage, (num_blocks, 1, states, width), (stride, 1, width, 1))
    (region,) = register_kv_caches(num_blocks, [GroupCaches(0, 1, {"m": packed})]).groups[0].regions
    assert (region.page_bytes, region.block_stride) == (states * width, stride)


def case_3_layout():
    """Two full groups, a window of three blocks, a state, and a draft group, blocks of 16."""
    groups = [
        make_group(0, FULL, 16),
        make_group(1, FULL, 16),
        make_group(2, WINDOW, 16, window_tokens=47),
        make_group(3, STATE, 16),
        make_group(4, FULL, 16, draft=True),
    ]
    return build_layout(make_input(*groups, hash_tokens=16))


def keys_of(layout, chunks: int) -> list[list[bytes]]:
    return [[b"%d/%d" % (group.group, i) for i in range(chunks)] for group in layout.groups]


def test_case_3_pr_42828_longest_match_over_groups():
    layout = case_3_layout()
    matcher = PrefixMatcher(layout)
    keys = keys_of(layout, 10)
    everything = {key for group in keys for key in group}
    assert matcher.longest_match(keys, everything, 0, 159) == 144
    assert matcher.longest_match(keys, everything - {keys[1][6]}, 0, 159) == 96, "full"
    assert matcher.longest_match(keys, everything - {keys[2][2]}, 0, 159) == 144, "before window"
    assert matcher.longest_match(keys, everything - {keys[2][7]}, 0, 159) == 112, "in window"
    assert matcher.longest_match(keys, everything - {keys[3][8]}, 0, 159) == 128, "last state"
    assert matcher.longest_match(keys, everything - {keys[3][2]}, 0, 159) == 144, "other state"
    assert matcher.longest_match(keys, everything - {keys[4][9]}, 0, 159) == 128, "draft's last"


def test_case_3_load_mask_after_the_draft_dropped_its_block_once():
    layout = case_3_layout()
    ranges = PrefixMatcher(layout).load_ranges(0, 144)
    assert ranges == (range(9), range(9), range(6, 9), range(8, 9), range(9))
    mask = [[i in r for i in range(9)] for r in ranges]
    assert [sum(row) for row in mask] == [9, 9, 3, 1, 9]


def test_case_3_an_empty_load_mask():
    """Nothing to load and nothing to store are plain empty results."""
    matcher = PrefixMatcher(case_3_layout())
    assert matcher.load_ranges(64, 64) == (range(0),) * 5
    assert matcher.longest_match([[]] * 5, set(), 0, 15) == 0
    groups = make_group(0, FULL, 64), make_group(1, WINDOW, 16, window_tokens=15)
    layout = build_layout(make_input(*groups, hash_tokens=16))
    matcher = PrefixMatcher(layout)
    assert [matcher.reachable(layout.groups[1], i) for i in range(3)] == [False] * 3


def test_case_3_all_misfits_are_in_one_message():
    groups = [
        make_group(0, FULL, 16),
        make_group(1, "", 16, spec="cross_attention", refused="cross-attention: not a prefix"),
        make_group(2, STATE, 4096, unaligned_state=True),
    ]
    with pytest.raises(UnsupportedSpecError) as caught:
        build_layout(make_input(*groups, hash_tokens=16, context_parallel=2))
    same_text("layout_case_3", str(caught.value))


def test_case_3_layers_are_registered_into_their_own_group_only():
    tensors = {f"layer.{i}": torch.zeros(4, 8) for i in range(4)}
    groups = [
        GroupCaches(0, 1, {name: tensors[name] for name in ("layer.0", "layer.2")}),
        GroupCaches(1, 1, {name: tensors[name] for name in ("layer.1", "layer.3")}),
    ]
    registered = register_kv_caches(4, groups).groups
    assert [[r.layer for r in group.regions] for group in registered] == [
        ["layer.0", "layer.2"],
        ["layer.1", "layer.3"],
    ]


def test_case_4_pr_42097_blocks_expand_with_the_writers_ratio():
    """Groups of attention and Mamba, whose states are never split.
    ``tests/offload/geometry/test_translate.py`` tests two sides with ratios 34 and 66."""
    attention, mamba = [5, 6], [2]
    assert [expand_blocks(attention, 34), expand_blocks(mamba, 1)] == [list(range(170, 238)), [2]]
    assert [expand_blocks(ids, 2) for ids in ([0, 1, 2], [3, 4])] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9],
    ]


def test_case_5_pr_38554_num_blocks_comes_from_the_configuration():
    """Layers of one group with pages of 8,192 and 32,768 bytes; one is split into kernel blocks."""
    num_blocks = 12
    narrow = torch.zeros(num_blocks * 2, 4096, dtype=torch.uint8)
    wide = torch.zeros(num_blocks, 32768, dtype=torch.uint8)
    registration = register_kv_caches(
        num_blocks, [GroupCaches(0, 1, {"narrow": narrow, "wide": wide})]
    )
    assert registration.num_blocks == num_blocks
    assert [r.page_bytes for r in registration.groups[0].regions] == [8192, 32768]


def test_case_5_alignment_message_names_numbers_group_kind_and_a_working_remedy():
    groups = (make_group(0, FULL, 16), make_group(1, STATE, 10240, unaligned_state=True))
    given = make_input(*groups, hash_tokens=10240, prefix_caching=False)
    with pytest.raises(UnsupportedSpecError) as caught:
        build_layout(given)
    text = str(caught.value)
    assert "block size 16 is not a multiple of the hash block size 10240" in text
    assert "group 0 (full_attention; 1 layer: model.layers.0)" in text
    assert "--enable-prefix-caching" in text


def test_case_5_no_hint_about_prefix_caching_if_it_is_not_the_cause():
    """Prefix caching is on and there is no state, so that hint would be wrong."""
    groups = (make_group(0, FULL, 24), make_group(1, FULL, 16))
    with pytest.raises(AlignmentError) as caught:
        build_layout(make_input(*groups, hash_tokens=16))
    assert "prefix-caching" not in str(caught.value)
    assert "--prefix-match-unit 8" in str(caught.value)


def test_case_5_a_scratch_group_is_skipped():
    scratch = make_group(1, FULL, 10, skipped="scratch memory of one request")
    layout = build_layout(make_input(make_group(0, FULL, 16), scratch, hash_tokens=16))
    assert [group.group for group in layout.groups] == [0]
