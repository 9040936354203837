"""A script fails while it writes to a shared LMDB tier: its event loop ends and cancels every task,
including those of the tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
ENDS_WITHIN_S = 90.0
SCRIPT = """
import asyncio, sys
from pathlib import Path
from tests.patience import turns
from tests.tiers.lmdb.shared.inside import index_of
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import key_of, put

tier = SharedLmdbTier(Path(sys.argv[1]), 8 << 20, record_bytes=4096)

async def main():
    await tier.open()
    writing = asyncio.ensure_future(put(tier, [key_of(n) for n in range(20)], 40_000))
    await turns(int(sys.argv[2]))
    raise KeyError("a fault of the script")

try:
    asyncio.run(main())
except KeyError:
    for threads in tier._threads_in_use():
        threads.stop()
    print("reserved", index_of(tier).state().reserved)
"""


@pytest.mark.parametrize("moment", [1, 2, 3, 5])
def test_a_script_that_fails_while_it_writes_ends(tmp_path: Path, moment: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "tier"), str(moment)],
        cwd=ROOT,
        timeout=ENDS_WITHIN_S,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.stdout == "reserved 0\n"
