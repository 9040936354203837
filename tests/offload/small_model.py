"""A tiny KV cache in CPU tensors, with content that is a function of key, layer and byte."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import offload.worker.rank_memory
from offload.manager import OffloadManager, SimpleConfig, SimpleGroup, SimpleSpec
from tiers.base import Tier
from tiers.testing.simulated_copy import SimulatedCopyEngine

BLOCKS = 64
PAGES = {"layers.0": 3000, "layers.1": 3000, "draft.0": 5000}
BLOCK_TOKENS = 16


def kv_config() -> SimpleConfig:
    """Two groups: two layers with equal pages, and one with a larger page."""
    return SimpleConfig(
        BLOCKS,
        (
            SimpleGroup(("layers.0", "layers.1"), SimpleSpec(BLOCK_TOKENS, 3000)),
            SimpleGroup(("draft.0",), SimpleSpec(BLOCK_TOKENS, 5000)),
        ),
    )


def kv_caches() -> dict[str, torch.Tensor]:
    """One tensor per layer, block by block."""
    return {name: torch.zeros((BLOCKS, page), dtype=torch.uint8) for name, page in PAGES.items()}


def page(key: bytes, layer: str) -> np.ndarray[Any, Any]:
    """The content of this layer's page for this key."""
    seed = hashlib.sha256(key + layer.encode()).digest()
    return np.frombuffer(seed * (PAGES[layer] // 32 + 1), dtype=np.uint8)[: PAGES[layer]]


def keys(count: int, start: int = 0) -> list[bytes]:
    """Keys of one prefix."""
    return [hashlib.sha256(f"key {n}".encode()).digest() for n in range(start, start + count)]


def compute(
    caches: dict[str, torch.Tensor], names: Sequence[bytes], blocks: Sequence[int], group: int = 0
) -> None:
    """Write the content of the keys into blocks, as a forward pass would."""
    for layer in kv_config().kv_cache_groups[group].layer_names:
        for key, block in zip(names, blocks, strict=True):
            caches[layer][block] = torch.from_numpy(page(key, layer).copy())


def wrong_blocks(
    caches: dict[str, torch.Tensor], names: Sequence[bytes], blocks: Sequence[int], group: int = 0
) -> list[int]:
    """The blocks whose content differs from that of their key."""
    layers = kv_config().kv_cache_groups[group].layer_names
    return [
        block
        for key, block in zip(names, blocks, strict=True)
        if any(not np.array_equal(caches[n][block].numpy(), page(key, n)) for n in layers)
    ]


async def open_manager(
    caches: dict[str, torch.Tensor],
    tiers: Sequence[Tier] = (),
    slots: int = 16,
    **config: Any,
) -> OffloadManager:
    """A manager whose CPU tier has ``slots`` slots (including staging)."""
    settings: dict[str, Any] = {"cpu": {"capacity": slots * 8192}, "staging": 2 * 8192} | config
    return await OffloadManager.open(kv_config(), caches, settings, tiers=tiers)


def simulated_engines(
    monkeypatch: pytest.MonkeyPatch, *, automatic: bool
) -> list[SimulatedCopyEngine]:
    """Makes managers opened from now on copy without threads; returns the engines created."""
    made: list[SimulatedCopyEngine] = []

    def make(registration: Any, slab: Any, _device: torch.device) -> SimulatedCopyEngine:
        groups = registration.groups
        made.append(SimulatedCopyEngine(groups, slab, num_blocks=BLOCKS, automatic=automatic))
        return made[-1]

    monkeypatch.setattr(offload.worker.rank_memory, "make_engine", make)
    return made
