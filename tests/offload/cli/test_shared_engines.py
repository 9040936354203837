"""``clear`` and ``verify`` beside engines that share a folder of files. These hold no lock that
could be checked, but each has a file that shows that it is alive."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.namespaces.cleanup import remove_namespace
from tests.offload.cli.rank_folders import (
    CAPACITY,
    RECORD_NAMESPACE,
    ROOT,
    SIZE,
    damage,
    kvtiers,
    make_rank_folder,
)
from tiers.files.engines import CLOCKS_NS, SILENT_NS

ENGINE = """
import asyncio, sys
from tiers.files.shared_tier import SharedFileTier
from tiers.testing import key_of, put
async def live(folder, capacity, namespace, size):
    tier = SharedFileTier(folder, int(capacity), namespace=bytes.fromhex(namespace))
    await tier.open()
    await put(tier, [key_of(n) for n in range(6)], int(size))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await tier.aclose()
asyncio.run(live(*sys.argv[1:]))
"""


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[int]:
    """A process that shares a folder and has stored six records; returns its pid. It is killed at
    the end."""
    arguments = [folder, CAPACITY, RECORD_NAMESPACE.hex(), SIZE]
    command = [sys.executable, "-c", ENGINE, *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def grow_old(folder: Path) -> None:
    """Make every record look as if it was last used two days ago."""
    for path in folder.glob("epoch-0/*"):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)


def records(folder: Path) -> int:
    return len(list(folder.glob("epoch-0/*")))


def test_old_records_stay_while_an_engine_is_alive(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with engine(folder) as pid:
        grow_old(folder)
        result = kvtiers("clear", folder, "--unused-for", "1d", "--yes")
        assert result.code == 1
        assert f"shared by pid {pid}: not removed" in result.err
        assert records(folder) == 6
    result = kvtiers("clear", folder, "--unused-for", "1d", "--yes")
    assert (result.code, records(folder)) == (0, 0), "it was killed"


def test_a_namespace_stays_while_an_engine_is_alive(tmp_path: Path) -> None:
    """On a file system without locks, no process holds the namespace's claim."""
    folder = make_rank_folder(tmp_path, range(0), kind="file")
    for path in folder.iterdir():  # left by an exclusive tier
        path.unlink() if path.is_file() else path.rmdir()
    with engine(folder) as pid:
        result = kvtiers("clear", tmp_path, "--all", "--yes", "--json")
        [found] = result.json["namespaces"]
        assert (result.code, found["removed"], found["in_use_by"]) == (1, False, [pid])
        name = folder.relative_to(tmp_path).parts[0]
        assert not remove_namespace(tmp_path, name), "a server that starts and needs space"
        assert records(folder) == 6
    assert kvtiers("clear", tmp_path, "--all", "--yes").code == 0
    assert not folder.exists()


def test_damaged_records_stay_while_an_engine_is_alive(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with engine(folder) as pid:
        damage(folder, 3)
        result = kvtiers("verify", folder)
        assert result.code == 1
        assert f"pid {pid} uses it, so nothing was removed" in result.out
        assert records(folder) == 6
    result = kvtiers("verify", folder)
    assert (result.code, records(folder)) == (1, 5)


@pytest.mark.parametrize("silent_s", [0, 3600])
def test_engines_of_other_machines_are_judged_by_their_last_sign_of_life(
    tmp_path: Path, silent_s: int
) -> None:
    assert silent_s == 0 or silent_s * 10**9 > SILENT_NS + CLOCKS_NS
    folder = tmp_path / "kv"
    with engine(folder):
        pass
    [file] = (folder / "engines").iterdir()
    other = file.with_name("0" * 12 + file.name[12:])
    file.rename(other)
    os.utime(other, (time.time() - silent_s,) * 2)
    grow_old(folder)
    result = kvtiers("clear", folder, "--unused-for", "1d", "--yes")
    assert (result.code, records(folder)) == ((0, 0) if silent_s else (1, 6))
