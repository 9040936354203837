"""The blocks that a step may overwrite, group by group and for every kind of request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.connector.scheduler.block_tables import BlockTables, ChunkBatches
from offload.layout.groups import FULL, STATE, GroupLayout, ModelLayout
from offload.layout.prefix_match import PrefixMatcher

GROUPS = (GroupLayout(0, FULL, 4, 1, ("full",)), GroupLayout(2, STATE, 8, 1, ("state",)))
TABLES = BlockTables(ModelLayout(100, 4, 8, GROUPS))
"""vLLM's group 1 is not offloaded: the order of its table is unknown."""


def output(**more: Any) -> Any:
    """A step of vLLM's scheduler with only the fields that are read here."""
    nobody = SimpleNamespace(
        req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
    )
    plain = {"scheduled_new_reqs": [], "scheduled_cached_reqs": nobody}
    return SimpleNamespace(
        **plain | {"new_block_ids_to_zero": None, "kv_cache_block_copies": None} | more
    )


def test_only_whole_blocks_before_the_computed_tokens_keep_their_content() -> None:
    tables = ([1, 2, 3], [11, 12], [21, 22])
    others = [11, 12, 21, 22]  # states and groups that are not offloaded: every block
    assert list(TABLES.beyond(tables, 0)) == [1, 2, 3, *others]
    assert list(TABLES.beyond(tables, 4)) == [2, 3, *others]
    assert list(TABLES.beyond(tables, 7)) == [2, 3, *others], "the second block is half computed"
    assert list(TABLES.beyond(tables, 12)) == others


def test_a_step_writes_the_blocks_of_its_requests_and_of_work_before_it() -> None:
    new = SimpleNamespace(block_ids=([1, 2], [3], [4]), num_computed_tokens=4)
    cached = SimpleNamespace(
        req_ids=["running", "without", "resumed"],
        new_block_ids=[([5], [], [6]), None, ([7, 8], [9], [10])],
        resumed_req_ids={"resumed"},
        num_computed_tokens=[100, 100, 4],
    )
    step = output(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        new_block_ids_to_zero=[30, 31],
        kv_cache_block_copies=[SimpleNamespace(src_block_id=40, dst_block_id=41)],
    )
    found = list(TABLES.rewritten(step))
    assert found == [2, 3, 4, 5, 6, 8, 9, 10, 30, 31, 41]
    assert list(TABLES.rewritten(output())) == []


@pytest.mark.parametrize(
    ("hit", "blocks"),
    [
        (range(24), [10, 11, 12, 13, 14, 15]),
        (range(4, 24), [-1, 11, 12, 13, 14, 15]),
        (range(12, 24), [-1, 13, 14, 15]),
        (range(12, 20), [-1, 13, 14, -1]),
    ],
)
def test_a_load_skips_the_blocks_outside_its_hit(hit: range, blocks: list[int]) -> None:
    """Chunks have two blocks. vLLM's own cache may share the first of them with other requests."""
    layout = ModelLayout(100, 4, 8, (GroupLayout(0, FULL, 4, 2, ("full",)),))
    identity: Any = SimpleNamespace(keys=[[b"a", b"b", b"c"]], origin=None)
    chunks = range(hit.start // 8, 3)
    batches = ChunkBatches(layout, PrefixMatcher(layout))
    (found,) = batches.of_load(identity, [[10, 11, 12, 13, 14, 15]], [chunks], hit)
    assert list(found.blocks) == blocks
    assert list(found.keys) == [b"a", b"b", b"c"][chunks.start :]
