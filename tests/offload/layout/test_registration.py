"""Registration by bytes: in every layout, the regions of a page contain exactly its bytes.

Each layout is checked in the same way: fill the tensor of one layer with numbers through its own
indexing, read the bytes at the regions' addresses, and compare.
"""

import ctypes

import pytest
import torch

from offload.errors import PageSizeError
from offload.layout.registration import GroupCaches, page_shape, register_kv_caches
from tests.texts import same_text

BLOCKS = 6


def read(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def pages_by_regions(regions, block: int) -> bytes:
    return b"".join(read(r.address + block * r.block_stride, r.page_bytes) for r in regions)


def regions_of(*tensors: torch.Tensor, page_bytes: dict | None = None, blocks: int = BLOCKS):
    layer = tensors[0] if len(tensors) == 1 else list(tensors)
    caches = GroupCaches(0, 1, {"layer": layer}, page_bytes or {})
    return register_kv_caches(blocks, [caches]).groups[0].regions


def numbered(tensor: torch.Tensor) -> torch.Tensor:
    """Every element of the view gets its own number (int32)."""
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.int32).view(tensor.shape))
    return tensor


def view(storage: torch.Tensor, shape, stride, offset=0) -> torch.Tensor:
    return torch.as_strided(storage, shape, stride, offset)


def physical(order: str, layers: int = 3) -> list[torch.Tensor]:
    """Layer views ``[B, H, N, C]`` of one storage whose dimensions lie in this order."""
    sizes = {"L": layers, "B": BLOCKS, "H": 2, "N": 4, "C": 5}
    whole = torch.zeros([sizes[dim] for dim in order], dtype=torch.int32)
    logical = whole.permute([order.index(dim) for dim in "LBHNC"])
    return [logical[layer] for layer in range(layers)]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_physical_order_of_dimensions(order):
    for tensor in physical(order):
        numbered(tensor)
        regions = regions_of(tensor)
        assert sum(region.page_bytes for region in regions) == 2 * 4 * 5 * 4
        for block in range(BLOCKS):
            wanted = sorted(tensor[block].flatten().tolist())
            found = torch.frombuffer(bytearray(pages_by_regions(regions, block)), dtype=torch.int32)
            assert sorted(found.tolist()) == wanted, (order, block)


@pytest.mark.parametrize(
    ("order", "count"), [("LBHNC", 1), ("BLHNC", 1), ("LHBNC", 2), ("BHLNC", 2)]
)
def test_pages_are_cut_only_where_bytes_are_not_adjacent(order, count):
    assert all(len(regions_of(tensor)) == count for tensor in physical(order))


@pytest.mark.parametrize("ratio", [1, 2, 17])
def test_kernel_blocks_register_to_the_same_bytes(ratio):
    whole = torch.zeros(BLOCKS, 34, 8, dtype=torch.int32)
    split = whole.view(BLOCKS * ratio, 34 // ratio, 8)
    assert regions_of(split) == regions_of(whole)


def test_padded_pages_are_copied_without_padding():
    storage = torch.zeros(BLOCKS * 100, dtype=torch.int8)
    padded = view(storage, (BLOCKS, 1, 1, 100), (100, 100, 100, 1))
    unpadded = view(storage, (BLOCKS, 1, 1, 88), (100, 100, 100, 1))
    expected = regions_of(unpadded)
    assert (expected[0].page_bytes, expected[0].block_stride) == (88, 100)
    assert regions_of(padded, page_bytes={"layer": 88}) == expected


def test_each_tensor_of_a_list_of_states_is_a_region():
    storage = torch.zeros(BLOCKS * 96, dtype=torch.int8)
    conv = view(storage, (BLOCKS, 32), (96, 1))
    ssm = view(storage, (BLOCKS, 48), (96, 1), 32)
    regions = regions_of(conv, ssm, page_bytes={"layer": 80})
    assert [(r.address - storage.data_ptr(), r.page_bytes) for r in regions] == [(0, 32), (32, 48)]


def test_layers_that_share_their_pages_are_copied_once():
    tensor = torch.zeros(BLOCKS, 8)
    caches = GroupCaches(0, 1, {"a": tensor, "b": tensor})
    assert register_kv_caches(BLOCKS, [caches]).groups[0].block_bytes == 32


def test_groups_keep_their_own_layers():
    """Two groups over one storage (overlaid blocks): each has its own layers' regions only."""
    storage = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    wide = view(storage, (BLOCKS, 64), (64, 1))
    narrow = view(storage, (BLOCKS, 16), (64, 1), 16)
    groups = [GroupCaches(0, 1, {"wide": wide}), GroupCaches(3, 2, {"narrow": narrow})]
    first, second = register_kv_caches(BLOCKS, groups).groups
    assert [r.layer for r in first.regions] == ["wide"]
    assert [(r.layer, r.page_bytes) for r in second.regions] == [("narrow", 16)]
    assert (second.group, second.chunk_bytes) == (3, 32)


def test_problems_of_all_layers_are_in_one_error():
    layers = {
        "model.layers.0": torch.zeros(BLOCKS + 1, 8),
        "model.layers.1": torch.zeros(BLOCKS, 8),
        "model.layers.2": torch.zeros(BLOCKS, 8),
        "model.layers.3": torch.zeros(0, 8),
    }
    pages = {"model.layers.1": 36, "model.layers.2": 32}
    with pytest.raises(PageSizeError) as caught:
        register_kv_caches(BLOCKS, [GroupCaches(2, 1, layers, pages)])
    same_text("layout_pages", str(caught.value))


def test_region_outside_its_storage_is_an_error():
    """torch does not allow a view to leave its storage, so the storage is shortened afterwards."""
    tensor = torch.zeros(BLOCKS, 8)
    tensor.untyped_storage().resize_(BLOCKS * 32 - 4)
    with pytest.raises(PageSizeError, match=r"bytes \[0, 192\) .* storage of 188 bytes"):
        page_shape(tensor, BLOCKS)


def test_registration_keeps_the_memory_alive():
    tensor = torch.zeros(BLOCKS, 8)
    registration = register_kv_caches(BLOCKS, [GroupCaches(0, 1, {"layer": tensor})])
    assert registration.tensors[0] is tensor
