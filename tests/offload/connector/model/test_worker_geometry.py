"""Real tensors of vLLM in every layout are described, and chunks of one are translated to
another."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from offload.connector.model.layout import model_layout, page_regions
from offload.connector.model.worker_geometry import describe
from offload.geometry.translate import apply, expand_blocks, obstacles, translation_of
from offload.namespaces.geometry import COPIES, HEADS, OWN, Geometry
from tests.offload.connector.kv_cache_configs import full, mamba, mla, vllm_config
from tests.offload.connector.model.test_layout import BLOCKS, placed

HEADS_ALL, HEAD_SIZE, CHUNK_TOKENS = 4, 8, 64
NAMES = ["a", "b"]
Layout = KVCacheLayout
_ALL = list(KVCacheLayout)
PAIRS = [*zip(_ALL, _ALL[1:] + _ALL[:1], strict=True), *zip(_ALL[2:], _ALL, strict=False)]
"""Every layout as the writer's and as the reader's."""


class Worker:
    """One rank of an engine: vLLM's tensors, our regions, and their description."""

    def __init__(
        self,
        spec,
        layout: Layout = Layout.LBHNC,
        kernel: str = "FLASH_ATTN",
        kernel_tokens: int | None = None,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self.chunk_blocks = max(1, CHUNK_TOKENS // spec.block_size)
        config = placed([KVCacheGroupSpec(NAMES, spec)], layout)
        kernel_blocks = [kernel_tokens] if kernel_tokens else None
        self.caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)
        model = model_layout(config, vllm_config(), self.chunk_blocks)
        registration = page_regions(model, config, self.caches)
        self.regions = registration.groups[0].regions
        backend = SimpleNamespace(get_name=lambda: kernel)
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        about = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks),
            compilation_config=SimpleNamespace(
                static_forward_context=dict.fromkeys(NAMES, layer),
            ),
        )
        self.geometry: Geometry = describe(
            about, config, model, self.caches, registration, bytes(16)
        )

    def record(self, logical: dict[str, np.ndarray], blocks: list[int]) -> np.ndarray:
        """Write a chunk of the logical cache ``[heads, tokens, bytes]`` into these blocks as a
        kernel would, and return the resulting content of a slot."""
        for name, cache in self.caches.items():
            view = cache.view(torch.uint8)
            heads, tokens = view.shape[1], view.shape[2]
            all_heads = len(logical[name])
            first = self.rank * heads if heads * self.ranks == all_heads else 0
            mine = torch.from_numpy(logical[name][first : first + heads])
            ids = expand_blocks(blocks, cache.shape[0] // BLOCKS)
            for number, kernel_block in enumerate(ids):
                view[kernel_block] = mine[:, number * tokens : (number + 1) * tokens]
        found = [
            ctypes.string_at(region.address + block * region.block_stride, region.page_bytes)
            for block in blocks
            for region in self.regions
        ]
        return np.frombuffer(b"".join(found), np.uint8)

    @property
    def layer(self):
        return self.geometry.groups[0].layers[0]


def logical_cache(heads: int, content: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shape = (heads, CHUNK_TOKENS, content)
    return {name: random.integers(0, 255, shape, np.uint8) for name in NAMES}


def is_exact(writers: list[Worker], reader: Worker, logical: dict[str, np.ndarray]) -> bool:
    stored = writers[0].geometry
    assert obstacles(stored, reader.geometry) == []
    translation = translation_of(stored, reader.geometry, 0)
    blocks = {worker.rank: list(range(worker.chunk_blocks, 0, -1)) for worker in writers}
    records = {w.rank: w.record(logical, blocks[w.rank]) for w in writers}
    into = np.zeros(translation.chunk_bytes, np.uint8)
    apply(translation, [records[rank] for rank in translation.ranks], into)
    right = reader.record(logical, list(range(2, 2 + reader.chunk_blocks)))
    return len(right) == len(into) and bool((right == into).all())


def attention(ranks: int, block: int):
    return full(block, num_kv_heads=HEADS_ALL // ranks, head_size=HEAD_SIZE)


@pytest.mark.parametrize(("stored", "now"), PAIRS, ids=str)
def test_every_layout_is_read_with_every_other_and_by_other_ranks(
    stored: Layout, now: Layout
) -> None:
    logical = logical_cache(HEADS_ALL, 2 * HEAD_SIZE * 2)
    writers = [Worker(attention(2, 32), stored, ranks=2, rank=rank) for rank in range(2)]
    assert is_exact(writers, Worker(attention(1, 32), now), logical)
    assert is_exact(
        [Worker(attention(1, 64), stored)], Worker(attention(4, 16), now, ranks=4, rank=2), logical
    )


@pytest.mark.parametrize(("stored", "now"), [(16, 32), (64, 16), (16, 64)])
def test_other_kernel_block_sizes_are_read(stored: int, now: int) -> None:
    logical = logical_cache(HEADS_ALL, 2 * HEAD_SIZE * 2)
    writer = Worker(attention(1, 64), Layout.LBNHC, kernel_tokens=stored)
    reader = Worker(attention(2, 64), Layout.LBHNC, kernel_tokens=now, ranks=2, rank=1)
    assert writer.layer.kernel_blocks == 64 // stored
    assert is_exact([writer], reader, logical)


def test_a_kernel_that_orders_a_heads_tokens_in_its_own_way() -> None:
    """vLLM's CPU attention: heads can be distinguished, tokens cannot."""
    logical = logical_cache(HEADS_ALL, 2 * HEAD_SIZE * 2)
    one = Worker(attention(1, 32), kernel="CPU_ATTN")
    two = [Worker(attention(2, 32), kernel="CPU_ATTN", ranks=2, rank=rank) for rank in range(2)]
    assert (one.layer.split, one.layer.tokens, one.layer.heads) == (HEADS, 1, 4)
    assert is_exact(two, one, logical)
    assert all(is_exact([one], reader, logical) for reader in two)
    other = Worker(attention(1, 64), kernel="CPU_ATTN")
    [problem] = obstacles(one.geometry, other.geometry)
    assert problem.field == "groups[0].kernel_block_size"
    by_token = Worker(attention(1, 32), Layout.LBNHC, kernel="CPU_ATTN")
    assert by_token.layer.split == OWN  # heads lie between tokens, which does not suit the kernel


def test_padding_is_not_part_of_a_page() -> None:
    logical = logical_cache(HEADS_ALL, 2 * HEAD_SIZE * 2)
    padded = Worker(dataclasses.replace(attention(1, 32), page_size_padded=8192))
    writers = [Worker(attention(2, 32), ranks=2, rank=rank) for rank in range(2)]
    assert is_exact(writers, padded, logical)
    assert is_exact([padded], writers[1], logical)


def test_latents_are_read_by_any_rank_with_any_layout() -> None:
    logical = logical_cache(1, 24 * 2)
    for stored, now in itertools.product((Layout.LBHNC, Layout.BLHNC), repeat=2):
        writer = Worker(mla(32), stored, "CPU_MLA", kernel_tokens=None, ranks=2, rank=0)
        assert writer.layer.split == COPIES
        assert is_exact([writer], Worker(mla(32), now, "CPU_MLA", ranks=4, rank=1), logical)
    logical = logical_cache(1, 24 * 2)
    pages = [
        Worker(mla(64), kernel="CPU_MLA", kernel_tokens=16),
        Worker(mla(32), kernel="CPU_MLA", kernel_tokens=16),
    ]
    assert is_exact(pages[:1], pages[1], logical)


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        (attention(1, 32), "A_NEW_KERNEL"),
        (
            dataclasses.replace(attention(1, 32), kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
            "FLASH_ATTN",
        ),
        (mamba(32), ""),
    ],
    ids=["kernel", "quantized", "state"],
)
def test_unknown_kernels_are_described_as_a_whole(spec, kernel: str) -> None:
    """Ranks of the same shape read such pages; all others are refused."""
    same = Worker(spec, kernel=kernel, ranks=2, rank=1).geometry
    assert same.groups[0].layers[0].split == OWN
    assert obstacles(same, same) == []
    other = dataclasses.replace(same, ranks=1, rank=0)
    [problem] = obstacles(same, other)
    assert (problem.field, problem.flags) == ("parallel.tensor", "--tensor-parallel-size 2")
