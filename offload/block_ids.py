"""Block ids between two sides that split blocks differently.

One side's kernel may see a block as ``ratio`` kernel blocks, the other's as more or fewer. The
ids of kernel blocks only mean something with the ratio of the side that wrote them. Recurrent
states are never split: a state's block is one kernel block on every side.
"""

from __future__ import annotations

from collections.abc import Sequence


def expand_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Kernel blocks of blocks: block ``b`` is ``b * ratio .. (b + 1) * ratio - 1``.

    ``ratio`` is block size / kernel block size on the side that wrote the blocks.
    """
    return [block * ratio + part for block in blocks for part in range(ratio)]


def expand_groups(
    blocks: Sequence[Sequence[int]], is_state: Sequence[bool], writer_ratio: int
) -> list[list[int]]:
    """Kernel blocks of every group, with the writer's ratio; groups of states stay as they are."""
    return [
        list(group) if state else expand_blocks(group, writer_ratio)
        for group, state in zip(blocks, is_state, strict=True)
    ]


def trim_to_common(
    local: Sequence[int], remote: Sequence[int], has_state: bool
) -> tuple[list[int], list[int]]:
    """The kernel blocks that both sides have, paired in order.

    With states both sides begin at token 0 and round up to whole blocks, so the longer list has a
    tail that the other lacks. Without, the local list lacks the prefix that is cached already, so
    the remote list is cut at the front.
    """
    count = min(len(local), len(remote))
    if has_state:
        return list(local[:count]), list(remote[:count])
    return list(local[len(local) - count :]), list(remote[len(remote) - count :])
