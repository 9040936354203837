"""What a worker adds to the identity of its records."""

from __future__ import annotations

import pytest
import torch

from offload.connector.setup import _form_of

BLOCKS = 6


def form(*shape: int, dtype: torch.dtype = torch.bfloat16) -> bytes:
    return _form_of(BLOCKS, {"layers.0": torch.empty(shape, dtype=dtype)})


@pytest.mark.parametrize(
    "other",
    [
        form(2 * BLOCKS, 4, 16, 64),  # two kernel blocks in a block: other order, same bytes
        form(BLOCKS, 32, 4, 64),
        form(BLOCKS, 4, 32, 64, dtype=torch.float16),
    ],
)
def test_another_order_of_bytes_in_a_page_is_another_identity(other: bytes) -> None:
    assert form(BLOCKS, 4, 32, 64) != other


def test_the_number_of_blocks_is_not_part_of_it() -> None:
    more = _form_of(2 * BLOCKS, {"layers.0": torch.empty((2 * BLOCKS, 4, 32, 64)).bfloat16()})
    assert form(BLOCKS, 4, 32, 64) == more


def test_state_lists_count_tensor_by_tensor() -> None:
    states = [torch.empty((BLOCKS, 8)), torch.empty((BLOCKS, 3))]
    assert _form_of(BLOCKS, {"mamba.0": states}) != _form_of(BLOCKS, {"mamba.0": states[::-1]})
