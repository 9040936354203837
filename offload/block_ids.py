"""Block ids where engines split blocks differently.

One side's kernel may see a block as ``ratio`` kernel blocks, another's as more or fewer. The ids of
kernel blocks only mean something with the ratio of the side that wrote them. Recurrent states are
never split: a state's block is one kernel block on every side.
"""

from __future__ import annotations

from collections.abc import Sequence


def expand_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Kernel blocks of blocks: block ``b`` is ``b * ratio .. (b + 1) * ratio - 1``.

    ``ratio`` is block size / kernel block size on the side that wrote the blocks; 1 for states.
    """
    return [block * ratio + part for block in blocks for part in range(ratio)]
