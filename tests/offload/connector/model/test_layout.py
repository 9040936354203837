"""vLLM's own configurations and allocations, translated into our types.

``allocate_kv_cache`` is vLLM's: it creates the tensors that a worker passes to a connector.
"""

import dataclasses

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from offload.connector.model.layout import layout_input, model_layout, page_regions
from offload.errors import PageSizeError, UnsupportedSpecError
from tests.offload.connector.kv_cache_configs import (
    chunked,
    config_of,
    full,
    groups_of,
    mamba,
    mla,
    sliding,
    vllm_config,
)
from tests.texts import same_text

BLOCKS = 8
BFLOAT = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}


def placed(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> KVCacheConfig:
    """A configuration with placements as vLLM computes them, groups overlaid from byte 0."""
    layers = [[(name, _layer_spec(group, name)) for name in group.layer_names] for group in groups]
    block_bytes = max(sum(spec.page_size_bytes for _, spec in group) for group in layers)
    outermost = layout.is_block_outermost
    tensors = []
    for group in layers:
        offset = 0
        for name, spec in group:
            strides = compute_layout_strides(
                spec,
                BLOCKS,
                1,
                layout,
                None,
                (None, block_bytes if outermost else None, *[None] * 3),
            )
            tensors.append(
                KVCacheTensor(block_bytes * BLOCKS, [name], strides[0], strides[1], offset)
            )
            offset += spec.page_size_bytes * (1 if outermost else BLOCKS)
    config = config_of(groups, num_blocks=BLOCKS)
    return dataclasses.replace(config, kv_cache_tensors=tensors)


def _layer_spec(group: KVCacheGroupSpec, name: str):
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def registered(config: KVCacheConfig, layout: KVCacheLayout, kernel_blocks=None):
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)
    return page_regions(model_layout(config, vllm_config(), 1), config, caches), caches


def check_pages(registration, caches: dict[str, torch.Tensor]) -> None:
    """Writing a number into one block of one layer changes exactly that page's bytes."""
    storage = next(iter(caches.values())).untyped_storage()
    whole = torch.tensor([], dtype=torch.uint8).set_(storage)
    for group in registration.groups:
        for layer in {region.layer for region in group.regions}:
            regions = [region for region in group.regions if region.layer == layer]
            for block in (0, BLOCKS // 2, BLOCKS - 1):
                whole.zero_()
                cache = caches[layer]
                ratio = cache.shape[0] // BLOCKS
                cache[block * ratio : (block + 1) * ratio].view(torch.uint8).fill_(7)
                wanted = set(whole.nonzero().flatten().tolist())
                found = {
                    region.address - storage.data_ptr() + block * region.block_stride + i
                    for region in regions
                    for i in range(region.page_bytes)
                }
                assert found == wanted, (layer, block)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_layout_of_vllm_is_registered(layout):
    groups = [KVCacheGroupSpec(["a", "b", "c"], full(16))]
    check_pages(*registered(placed(groups, layout), layout))


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=str)
def test_overlaid_groups(layout):
    """Sliding and full layers over one storage, as in Gemma-3 and gpt-oss."""
    groups = [
        KVCacheGroupSpec(["s0", "s1"], sliding(16, 64)),
        KVCacheGroupSpec(["f0", "f1"], full(16)),
    ]
    check_pages(*registered(placed(groups, layout), layout))


def test_kernel_blocks_smaller_than_blocks(caplog):
    caplog.set_level("INFO")
    config = placed([KVCacheGroupSpec(["a"], full(544))], KVCacheLayout.LBHNC)
    split, caches = registered(config, KVCacheLayout.LBHNC, [32])
    assert caches["a"].shape[0] == BLOCKS * 17
    assert "a block of 544 tokens is 17 kernel blocks of 32 tokens" in caplog.text
    check_pages(split, caches)


def test_padded_states_beside_attention():
    """A Mamba page padded to the attention page: only the state's bytes are copied."""
    attention = full(32)
    state = mamba(32, page_size_padded=attention.page_size_bytes)
    groups = [KVCacheGroupSpec(["m"], state), KVCacheGroupSpec(["a"], attention)]
    registration, caches = registered(placed(groups, KVCacheLayout.LBHNC), KVCacheLayout.LBHNC)
    check_pages(registration, caches)
    assert registration.groups[0].block_bytes == 4 * 6 * 2 + 2 * 3 * 4
    assert registration.groups[1].block_bytes == attention.page_size_bytes


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=str)
def test_layers_of_one_group_with_different_pages(layout):
    """A draft model that is wider than its target: four narrow layers and a wide one."""
    specs = {f"n{i}": full(32) for i in range(4)} | {"wide": full(32, num_kv_heads=8)}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))
    registration, caches = registered(placed([group], layout), layout)
    check_pages(registration, caches)
    assert registration.groups[0].block_bytes == 4 * 2048 + 8192
    config = placed([group], layout)
    assert model_layout(config, vllm_config(), 1).groups[0].block_bytes == 4 * 2048 + 8192


def test_mla_beside_gqa_draft_layers_in_a_packed_block():
    specs = {"m0": mla(16), "m1": mla(16), "draft": full(16)}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))
    layout = KVCacheLayout.BLHNC
    registration, caches = registered(placed([group], layout), layout)
    check_pages(registration, caches)


def test_compressed_storage_is_its_bytes():
    """DeepSeek-V4-like: one stored state for four tokens, aligned pages."""
    spec = mla(64, tokens_per_state=4, alignment=256)
    config = placed([KVCacheGroupSpec(["m"], spec)], KVCacheLayout.LBHNC)
    registration, caches = registered(config, KVCacheLayout.LBHNC)
    check_pages(registration, caches)
    assert spec.page_size_bytes == 768
    assert registration.groups[0].block_bytes == 16 * 24 * 2


def test_a_flattened_group_has_the_same_tokens():
    """The scheduler sees one layer's spec instead of all: only the bytes differ."""
    specs = {"n": full(32), "wide": full(32, num_kv_heads=8)}
    whole = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))
    flat = KVCacheGroupSpec(list(specs), specs["n"])
    worker = model_layout(config_of([whole]), vllm_config(), 2)
    scheduler = model_layout(config_of([flat]), vllm_config(), 2)
    (group,) = scheduler.groups
    assert group.block_bytes < worker.groups[0].block_bytes
    resized = dataclasses.replace(group, block_bytes=worker.groups[0].block_bytes)
    assert dataclasses.replace(scheduler, groups=(resized,)) == worker


def test_rules_and_windows():
    specs = [full(32), mla(32), sliding(32, 100), chunked(32, 64), mamba(32)]
    groups = layout_input(config_of(groups_of(*specs)), vllm_config(), 1).groups
    assert [group.kind for group in groups] == ["full", "full", "window", "window", "state"]
    assert [group.window_tokens for group in groups] == [0, 0, 99, 0, 0]
    assert [group.span_tokens for group in groups] == [0, 0, 0, 64, 0]
    retained = groups_of(sliding(32, 100, extra_retained_tokens=3))
    assert layout_input(config_of(retained), vllm_config(), 1).groups[0].window_tokens == 102


def test_draft_groups_are_those_whose_last_block_vllm_drops():
    specs = [full(32), sliding(32, 64), sliding(32, 64)]
    marked = layout_input(config_of(groups_of(*specs, drafts={1})), vllm_config(), 1)
    assert [group.draft for group in marked.groups] == [False, True, True]
    unmarked = layout_input(config_of(groups_of(*specs)), vllm_config(draft_head=True), 1)
    assert all(group.draft for group in unmarked.groups)
    assert not any(
        g.draft for g in layout_input(config_of(groups_of(*specs)), vllm_config(), 1).groups
    )


def test_context_parallel_blocks_cover_more_tokens():
    layout = model_layout(config_of(groups_of(full(16)), hash_tokens=64), vllm_config(dcp=4), 1)
    assert layout.groups[0].block_tokens == 64


def test_scratch_and_rebuilt_groups_are_skipped():
    ring = CircularBufferSpec(block_size=8, **BFLOAT)
    rebuilt = KVCacheGroupSpec(["r"], full(16), enable_kv_transfer=False)
    groups = [*groups_of(full(16), ring), rebuilt]
    layout = model_layout(config_of(groups), vllm_config(), 1)
    assert [group.group for group in layout.groups] == [0]
    assert len(layout.skipped) == 2
    assert "layer.1" in layout.skipped[0]


def refused(*groups: KVCacheGroupSpec, **settings) -> str:
    with pytest.raises(UnsupportedSpecError) as caught:
        model_layout(config_of(list(groups)), vllm_config(**settings), 1)
    return str(caught.value)


def test_encoder_decoder_is_refused():
    groups = groups_of(full(16), CrossAttentionSpec(block_size=16, **BFLOAT))
    same_text("layout_cross_attention", refused(*groups))


def test_encoder_only_layers_are_skipped():
    groups = groups_of(full(16), EncoderOnlyAttentionSpec(block_size=16, **BFLOAT))
    assert len(model_layout(config_of(groups), vllm_config(), 1).skipped) == 1


def test_mamba_without_align_is_refused():
    groups = groups_of(full(16), mamba(4096, "none"))
    same_text("layout_mamba_none", refused(*groups, prefix_caching=False))


def test_context_parallel_with_several_groups_is_refused():
    groups = groups_of(full(16), mamba(16))
    same_text("layout_context_parallel", refused(*groups, dcp=2))


def test_scales_per_token_and_head_are_refused():
    spec = full(16, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    same_text("layout_token_scales", refused(*groups_of(spec)))


def test_missing_and_unknown_layers_are_named():
    config = placed([KVCacheGroupSpec(["a", "b"], full(16))], KVCacheLayout.LBHNC)
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    caches["stranger"] = torch.zeros(BLOCKS, 4)
    caches["shares a"] = caches["a"]
    del caches["b"]
    with pytest.raises(PageSizeError) as caught:
        page_regions(model_layout(config, vllm_config(), 1), config, caches)
    same_text("layout_layer_names", str(caught.value))


def test_tensors_in_the_wrong_place_are_named():
    """Layers whose tensors were swapped, and a tensor with another stride."""
    config = placed([KVCacheGroupSpec(["a", "b", "c"], full(16))], KVCacheLayout.LBHNC)
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    caches["a"], caches["b"] = caches["b"], caches["a"]
    caches["c"] = caches["c"][::2].repeat(2, 1, 1, 1)
    with pytest.raises(PageSizeError) as caught:
        page_regions(model_layout(config, vllm_config(), 1), config, caches)
    same_text("layout_wrong_place", str(caught.value))


def test_pipeline_parallelism_is_refused():
    same_text("layout_pipeline_parallel", refused(*groups_of(full(16)), pp=2))
