"""Makes rank folders for the tests of the command line with real tiers, and starts live writers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from offload.cli import app
from offload.namespaces.folders import claim_rank_folder
from offload.namespaces.manifest import Namespace
from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT, Tier
from tiers.files.record_files import record_name
from tiers.files.tier import FileTier
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.index import LmdbIndex, Manifest, extents_of
from tiers.lmdb.tier import LmdbTier
from tiers.record import Identity
from tiers.testing import key_of, payload_of

ROOT = Path(__file__).resolve().parents[3]
FIELDS = {"model": {"name": "tiny/llama"}, "parallel": {"tp": 1}}
OTHER = {"model": {"name": "tiny/qwen"}, "parallel": {"tp": 1}}
RECORD_NAMESPACE = b"records of tiny."
SIZE = 20_000
CAPACITY = 24 << 20


@dataclass
class Result:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def kvtiers(*words: object) -> Result:
    """Run one command in this process. Use it only while no tier is open in this process."""
    found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return Result(found.exit_code, found.stdout, found.stderr)


def rank_folder_of(root: Path, fields: dict[str, Any] = FIELDS, rank: int = 0) -> Path:
    """The folder of a rank."""
    return root / Namespace.of(fields).name / "replica-0" / f"rank-{rank}"


def make_rank_folder(
    root: Path,
    numbers: Iterable[int],
    *,
    fields: dict[str, Any] = FIELDS,
    kind: str = "lmdb",
    rank: int = 0,
    **options: Any,
) -> Path:
    """Write these records with a tier, close it, and return its folder."""
    claimed = claim_rank_folder(root, Namespace.of(fields), replica=0, rank=rank, engine="t")
    with claimed:
        asyncio.run(_fill(claimed.folder, claimed.epoch, list(numbers), kind, rank, options))
    return claimed.folder


def use_records(root: Path, numbers: Iterable[int], kind: str = "lmdb") -> None:
    """Claim the folder of rank 0 as a server that starts does, use these records, and close it."""
    with claim_rank_folder(root, Namespace.of(FIELDS), replica=0, rank=0, engine="t") as claimed:
        asyncio.run(_use(_tier(claimed.folder, claimed.epoch, kind, 0, {}), list(numbers)))


async def _use(tier: Tier, numbers: list[int]) -> None:
    await tier.open()
    await tier.touch([key_of(number) for number in numbers])
    await tier.aclose()


async def _fill(
    folder: Path, epoch: int, numbers: list[int], kind: str, rank: int, options: dict[str, Any]
) -> None:
    tier = _tier(folder, epoch, kind, rank, options)
    await tier.open()
    keys = [key_of(number) for number in numbers]
    outcomes = await tier.write(keys, [payload_of(key, SIZE) for key in keys])
    assert {outcome.value for outcome in outcomes} <= {"ok"}
    await tier.aclose()


def _tier(folder: Path, epoch: int, kind: str, rank: int, options: dict[str, Any]) -> Tier:
    who: dict[str, Any] = {"namespace": RECORD_NAMESPACE, "rank": rank, "epoch": epoch}
    if kind == "file":
        return FileTier(folder, CAPACITY, **who)
    sizes = {"reserve_bytes": 0, "grow_bytes": 1 << 20, "record_bytes": SIZE}
    return LmdbTier(folder, CAPACITY, **who, **sizes, **options)


def open_index(folder: Path, rank: int = 0) -> LmdbIndex:
    """The index in a folder that no process uses."""
    manifest = Manifest(Identity(RECORD_NAMESPACE, rank), "")
    return LmdbIndex(folder, os.path.getsize(folder / "data.mdb"), manifest)


def records_of(folder: Path) -> dict[bytes, bytes]:
    """Keys and values of the index in a folder that no process uses."""
    index = open_index(folder)
    found = {key: value for table in index.tables() for key, value in table.items()}
    index.close()
    return found


def payload_offset(folder: Path, number: int) -> int:
    """The offset of a record's payload, which never moves. No process may use the folder."""
    return extents_of(records_of(folder)[key_of(number)])[0].start * ALIGNMENT


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def damage(folder: Path, number: int) -> None:
    """Flip one bit of a record's payload."""
    if (folder / PAYLOAD_NAME).exists():
        flip(folder / PAYLOAD_NAME, payload_offset(folder, number) + 100)
    else:
        [path] = folder.glob(f"epoch-*/{record_name(key_of(number))}")
        flip(path, ALIGNMENT + 100)


def wait_until_open(process: subprocess.Popen[Any], path: Path) -> None:
    """Wait until a process has opened this file, for example a lock that it is about to take."""
    end = time.monotonic() + PATIENCE_S
    while not _has_open(process.pid, path):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)


def _has_open(pid: int, path: Path) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{fd}") == str(path):
                return True
    return False


@dataclass
class Writer:
    """A live writer."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> tuple[int, int, int, int]:
        """Rounds, reads, wrong answers, and failures that the tier itself counted."""
        out, _ = self.process.communicate("stop\n", timeout=PATIENCE_S)
        assert self.process.returncode == 0, out
        rounds, reads, wrong, failures = json.loads(out.splitlines()[-1])
        return rounds, reads, wrong, failures


@contextlib.contextmanager
def writer(root: Path, kind: str = "lmdb", records: int = 200) -> Iterator[Writer]:
    """A process that writes and reads records below a path until the end of the block."""
    command = [
        sys.executable,
        "-m",
        "tests.offload.cli.writer_child",
        str(root),
        kind,
        str(records),
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, **pipes)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", line
        yield Writer(process)
    finally:
        process.kill()
        process.communicate()
