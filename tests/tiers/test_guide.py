"""The tier of the guide "write a tier" fulfils the contract, and its code runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

from examples.custom_tier import SqliteTier
from examples.short_tier import CompressedTier
from tests.patience import PATIENCE_S
from tiers.base import ReadOutcome, Tier
from tiers.testing import TierContract, fetch, key_of, put

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/write-a-tier.md"


class TestSqliteTier(TierContract):
    payload_bytes = 4096
    capacity_bytes = 4 << 20

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SqliteTier(folder, capacity_bytes)


class TestCompressedTier(TierContract):
    payload_bytes = 4096
    capacity_bytes = 4 << 20

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return CompressedTier(capacity_bytes)


async def test_the_short_tier_is_short_and_detects_damage() -> None:
    source = (ROOT / "examples/short_tier.py").read_text()
    _, _, body = source.partition("class CompressedTier")
    assert sum(bool(line.strip()) for line in body.splitlines()) <= 60
    tier = CompressedTier(1 << 20)
    await tier.open()
    await put(tier, [key_of(1)], 5000)
    [(header, _, size)] = tier._records.values()
    tier._records[key_of(1)] = header, zlib.compress(bytes(5000)), size
    outcome, _ = await fetch(tier, key_of(1), 5000)
    assert outcome is ReadOutcome.CORRUPT
    await tier.aclose()


async def test_a_flipped_bit_is_corrupt(tmp_path: Path) -> None:
    tier = SqliteTier(tmp_path, 1 << 20)
    await tier.open()
    await put(tier, [key_of(1)], 5000)
    await tier._call(lambda: tier._run("UPDATE record SET payload = zeroblob(5000)"))
    outcome, _ = await fetch(tier, key_of(1), 5000)
    assert outcome is ReadOutcome.CORRUPT
    await tier.aclose()


def test_the_code_of_the_guide_runs(tmp_path: Path) -> None:
    """A folder with its files, and the contract test in it."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["test_my_tier.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    example = (ROOT / "examples/custom_tier.py").read_text()
    (tmp_path / "my_tier.py").write_text(example.replace("SqliteTier", "MyTier"))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    done = subprocess.run(
        [sys.executable, *command, "test_my_tier.py", "-k", "written or epoch"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
