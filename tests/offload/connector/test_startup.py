"""A worker's part of the identity of its records, and the messages at start-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.config.schema import parse_config
from offload.connector.model.layout import model_layout
from offload.connector.startup import ServerSetup, _form_of
from offload.namespaces.manifest import Namespace
from tests.offload.connector.kv_cache_configs import config_of, full, groups_of, mamba, vllm_config

BLOCKS = 6


def form(*shape: int, dtype: torch.dtype = torch.bfloat16, kernel: str = "CPU_ATTN") -> bytes:
    return _form_of(BLOCKS, {"layers.0": torch.empty(shape, dtype=dtype)}, {"layers.0": kernel})


@pytest.mark.parametrize(
    "other",
    [
        # two kernel blocks in a block: another order of the same bytes
        form(2 * BLOCKS, 4, 16, 64),
        form(BLOCKS, 32, 4, 64),
        form(BLOCKS, 4, 32, 64, dtype=torch.float16),
        # equal shapes, but K packed in a kernel-specific way
        form(BLOCKS, 4, 32, 64, kernel="ROCM_ATTN"),
    ],
)
def test_another_order_of_bytes_in_a_page_is_another_identity(other: bytes) -> None:
    assert form(BLOCKS, 4, 32, 64) != other


def test_the_number_of_blocks_is_not_part_of_the_identity() -> None:
    caches = {"layers.0": torch.empty((2 * BLOCKS, 4, 32, 64)).bfloat16()}
    more = _form_of(2 * BLOCKS, caches, {"layers.0": "CPU_ATTN"})
    assert form(BLOCKS, 4, 32, 64) == more


def test_each_tensor_of_a_list_of_states_is_part_of_the_identity() -> None:
    states = [torch.empty((BLOCKS, 8)), torch.empty((BLOCKS, 3))]
    one, other = ({"mamba.0": tensors} for tensors in (states, states[::-1]))
    assert _form_of(BLOCKS, one, {"mamba.0": ""}) != _form_of(BLOCKS, other, {"mamba.0": ""})


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (True, ["kvtiers: vLLM uses blocks of 32 and 64 tokens instead of the given --block-size"]),
        (False, []),
    ],
)
def test_the_block_size_in_use_is_logged(
    given: bool, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The size is logged even if vLLM has replaced the given size by its own, as for hybrid
    models."""
    caplog.set_level("INFO")
    geometry: Any = config_of(groups_of(full(32), mamba(64)))
    config: Any = vllm_config()
    config.cache_config.user_specified_block_size = given
    config.cache_config.block_size = 64
    config.kv_transfer_config = SimpleNamespace(kv_load_failure_policy="recompute", engine_id="e")
    layout = model_layout(geometry, config, 1)
    settings = parse_config({"cpu": {"capacity": "1GiB"}})
    ServerSetup(config, geometry, settings, layout, Namespace.of({}), 0, 1, 0).announce()
    assert [line for line in caplog.messages if "--block-size" in line] == lines
