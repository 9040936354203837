"""The KV cache layout that the connector requests from vLLM, and the result of vLLM's own rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

ALL = ["LBNHC", "LBHNC", "BLHNC"]


def config(**extra: Any) -> Any:
    """The part of a ``VllmConfig`` that the rule needs."""
    transfer = KVTransferConfig(
        kv_connector="OffloadConnector",
        kv_connector_module_path="offload.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu": {"capacity": "1GiB"}, **extra},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer, cache_config=SimpleNamespace(kv_cache_layout=None)
    )


@pytest.mark.parametrize(
    ("extra", "supported", "resolved"),
    [
        ({}, ALL, "LBNHC"),  # nothing is requested: vLLM's first choice
        ({"kv_layout": "vllm"}, ALL, "LBNHC"),
        ({"kv_layout": "block_contiguous"}, ALL, "BLHNC"),
        # If a backend cannot read the layout, vLLM warns and uses its own; the server starts.
        ({"kv_layout": "block_contiguous"}, ["LBHNC"], "LBHNC"),
    ],
)
def test_vllm_resolves_the_requested_layout(
    extra: dict[str, Any], supported: list[str], resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert resolve_kv_cache_layout(config(**extra), [supported]).name == resolved
