"""Descriptors: which bytes are copied where, compared with one copy per page, and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.copy.known_caches import batch
from tiers.copy.base import CopyBatch, GroupRegions, PageRegion, TransferError
from tiers.copy.descriptors import CopyShape, DescriptorBuilder, merge_adjacent

SLAB = 10_000_000
STRIDE = 8192
SLOTS = 6
BLOCKS = 20


def builder(*groups: GroupRegions, num_blocks: int | None = BLOCKS) -> DescriptorBuilder:
    return DescriptorBuilder(
        groups, slab_address=SLAB, slot_stride=STRIDE, slot_count=SLOTS, num_blocks=num_blocks
    )


def group_of(regions: list[PageRegion], chunk_blocks: int = 1, group: int = 0) -> GroupRegions:
    return GroupRegions(group, chunk_blocks, tuple(regions))


def expected_bytes(group: GroupRegions, one: CopyBatch) -> dict[int, int]:
    """Slot byte address -> KV byte address, from the definition, byte by byte."""
    pairs: dict[int, int] = {}
    for slot, blocks in zip(one.slots.tolist(), one.blocks.tolist(), strict=True):
        at = SLAB + slot * STRIDE
        for block in blocks:
            for region in group.regions:
                for i in range(region.page_bytes):
                    if block >= 0:
                        pairs[at + i] = region.address + block * region.block_stride + i
                at += region.page_bytes
    return pairs


def described_bytes(build: DescriptorBuilder, one: CopyBatch) -> dict[int, int]:
    copies = build.build([one])
    pairs: dict[int, int] = {}
    for block, slot, size in zip(copies.blocks, copies.slots, copies.sizes, strict=True):
        for i in range(int(size)):
            assert int(slot) + i not in pairs, "a slot byte is written twice"
            pairs[int(slot) + i] = int(block) + i
    return pairs


layouts = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=5
)


@given(
    layout=layouts,
    chunk_blocks=st.integers(1, 4),
    one_stride=st.booleans(),
    data=st.data(),
)
def test_every_byte_goes_where_the_definition_says(
    layout: list[tuple[int, int, bool]], chunk_blocks: int, one_stride: bool, data: st.DataObject
) -> None:
    regions = []
    address = 1000
    block_bytes = sum(page for page, _, _ in layout)
    for i, (page, padding, adjacent) in enumerate(layout):
        stride = block_bytes if one_stride else page + padding
        regions.append(PageRegion(f"layer.{i}", address, stride, page))
        address += page if adjacent else 1000
    group = group_of(regions, chunk_blocks)
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True))
    row = st.lists(st.integers(-2, BLOCKS - 1), min_size=chunk_blocks, max_size=chunk_blocks)
    consecutive = st.integers(0, BLOCKS - chunk_blocks).map(
        lambda first: list(range(first, first + chunk_blocks))
    )
    blocks = [data.draw(row | consecutive) for _ in slots]
    one = CopyBatch(
        0,
        np.array(blocks, dtype=np.int64).reshape(len(slots), chunk_blocks),
        np.array(slots, dtype=np.int64),
    )
    assert described_bytes(builder(group), one) == expected_bytes(group, one)


def test_adjacent_layers_become_one_copy_and_dense_blocks_one_run() -> None:
    pages = [PageRegion(f"layer.{i}", 1000 + 10 * i, 40, 10) for i in range(4)]
    build = builder(group_of(pages, chunk_blocks=4))
    assert build.shape(0) == CopyShape(copies_per_block=1, smallest_bytes=40, alignment=8)
    copies = build.build([batch([2], [[5, 6, 7, 3]])])
    assert copies.sizes.tolist() == [120, 40]
    assert copies.blocks.tolist() == [1000 + 5 * 40, 1000 + 3 * 40]
    assert copies.slots.tolist() == [SLAB + 2 * STRIDE, SLAB + 2 * STRIDE + 120]
    assert copies.nbytes == 160


def test_padded_blocks_are_not_joined() -> None:
    build = builder(group_of([PageRegion("layer.0", 1000, 48, 40)], chunk_blocks=2))
    assert build.build([batch([0], [[5, 6]])]).sizes.tolist() == [40, 40]


def test_a_skipped_block_ends_a_run_and_keeps_its_place() -> None:
    build = builder(group_of([PageRegion("layer.0", 1000, 40, 40)], chunk_blocks=4))
    copies = build.build([batch([0], [[-1, 0, -1, 2]])])
    assert copies.blocks.tolist() == [1000, 1080]
    assert copies.slots.tolist() == [SLAB + 40, SLAB + 120]


def test_layers_out_of_order_or_of_other_strides_stay_apart() -> None:
    backwards = [PageRegion("b", 1010, 20, 10), PageRegion("a", 1000, 20, 10)]
    assert merge_adjacent(backwards) == backwards
    strides = [PageRegion("a", 1000, 20, 10), PageRegion("b", 1010, 30, 10)]
    assert merge_adjacent(strides) == strides


def test_several_groups_in_one_job() -> None:
    first = group_of([PageRegion("a", 1000, 10, 10)])
    second = group_of([PageRegion("b", 5000, 20, 20)], chunk_blocks=2, group=7)
    copies = builder(first, second).build([batch([0], [[1]]), batch([1], [[2, 4]], group=7)])
    assert copies.blocks.tolist() == [1010, 5040, 5080]
    assert copies.sizes.tolist() == [10, 20, 20]


def test_no_batches_are_no_copies() -> None:
    build = builder(group_of([PageRegion("a", 1000, 10, 10)]))
    assert len(build.build([])) == 0
    assert len(build.build([batch([], [])])) == 0
    assert len(build.build([batch([1], [[-1]])])) == 0


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (batch([0], [[BLOCKS]]), "block 20 requested, the KV cache has 20"),
        (batch([SLOTS], [[0]]), "slots 6 to 6 requested, the slab has 6"),
        (batch([0, -1], [[0], [1]]), "slots -1 to 0 requested"),
        (batch([0], [[0, 1]]), r"blocks of shape \(1, 2\)"),
        (CopyBatch(0, np.zeros((2, 1), np.int64), np.zeros(1, np.int64)), "shape"),
        (batch([0], [[0]], group=3), "group 3 is not registered"),
    ],
)
def test_anything_out_of_range_is_refused(one: CopyBatch, message: str) -> None:
    build = builder(group_of([PageRegion("a", 1000, 10, 10)]))
    with pytest.raises(TransferError, match=message):
        build.build([one])


def test_invalid_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group 0 has 8200 bytes, but a slot .* only 8192"):
        builder(group_of([PageRegion("a", 0, 4100, 4100)], chunk_blocks=2))
    one = group_of([PageRegion("a", 0, 10, 10)])
    with pytest.raises(ValueError, match="group 0 is given twice"):
        builder(one, one)
    with pytest.raises(ValueError, match="no bytes"):
        builder(group_of([]))
    with pytest.raises(ValueError, match="or a layer has none"):
        builder(group_of([PageRegion("a", 0, 10, 10), PageRegion("b", 100, 10, 0)]))


def test_alignment_is_the_smallest_of_all_numbers() -> None:
    pages = [PageRegion("a", 4096, 512, 256), PageRegion("b", 8192, 512, 256)]
    shape = builder(group_of(pages)).shape(0)
    assert (shape.copies_per_block, shape.smallest_bytes) == (2, 256)
    assert shape.alignment == 128  # the alignment of the slab's address here, 10,000,000
    pages[1] = PageRegion("b", 8200, 512, 256)
    assert builder(group_of(pages)).shape(0).alignment == 8
