"""Files with data about prompts can be read only by their owner, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.requests.request_file import RequestFile
from offload.requests.trace_recorder import RecordedPrompt, TraceRecorder
from offload.worker.tier_factory import make_tier
from policies.simulation.trace_formats import read_trace
from tests.offload.cli.rank_folders import kvtiers, make_rank_folder
from tests.offload.worker.reopening_child import KEYS, SIZE, places
from tiers.testing import put


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def assert_private(root: Path) -> None:
    """Assert that every file has mode 0600 and every folder 0700, and that there are some."""
    found = [path for path in root.rglob("*") if not path.is_symlink()]
    assert any(path.is_file() for path in found)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    wrong = {
        str(path.relative_to(root)): oct(mode)
        for path, mode in modes.items()
        if mode != (0o700 if path.is_dir() else 0o600)
    }
    assert wrong == {}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["lmdb", "file"])
async def test_files_of_a_tier_are_private(tmp_path: Path, kind: str, shared: bool) -> None:
    root = tmp_path / "kv"
    [spec] = places(root, type=kind, shared=shared).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    await put(tier, KEYS, SIZE)
    assert_private(root)
    await tier.reset(1)
    await put(tier, KEYS, SIZE)
    await tier.aclose()
    assert_private(root)
    assert spec.claim is not None
    spec.claim.close()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("old", ["none", "open to all", "a link"])
def test_recordings_are_private(tmp_path: Path, name: str, old: str) -> None:
    """A recording is private even if an earlier server has left a file that others may read."""
    folder, elsewhere = tmp_path / "recorded", tmp_path / "elsewhere"
    folder.mkdir(0o700)
    path = folder / name
    if old == "a link":
        elsewhere.write_text("precious")
        path.symlink_to(elsewhere)
    elif old == "open to all":
        path.write_text("old")
    recorder = TraceRecorder(str(path), 16)
    recorder.record(RecordedPrompt(1.0, [b"a", b"b"], 32, {}, 0))
    recorder.close(30.0)
    requests = RequestFile(str(folder / "requests.jsonl"), 8, "namespace")
    requests.close()
    assert_private(folder)
    assert len(read_trace(path).requests) == 1
    assert old != "a link" or elsewhere.read_text() == "precious"


def test_an_export_is_private(tmp_path: Path) -> None:
    root, folder = tmp_path / "kv", tmp_path / "exports"
    make_rank_folder(root, range(3))
    assert_private(root)
    folder.mkdir(0o700)
    assert kvtiers("export", root, folder / "blocks.kvt").code == 0
    assert_private(folder)
