"""Epochs of exports and imports: a server that starts finds what was imported, and no server finds
records of weights other than those of the model's files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from offload.admin.verify import RateLimit
from offload.namespaces.epoch_file import bump_epoch
from offload.namespaces.folders import (
    ClaimedFolder,
    claim_rank_folder,
    replica_folder,
    share_rank_folder,
)
from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import (
    CAPACITY,
    FIELDS,
    RECORD_NAMESPACE,
    ROOT,
    SIZE,
    Result,
    kvtiers,
    make_rank_folder,
    rank_folder_of,
)
from tiers.base import Tier
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.tier import LmdbTier
from tiers.offline.archive import read_frames
from tiers.testing import all_keys, assert_holds, key_of, put

NAMESPACE = Namespace.of(FIELDS)
NEW = ("--capacity", CAPACITY)


def tier_of(claimed: ClaimedFolder, kind: str, *, shared: bool) -> Tier:
    folder = claimed.folder
    who: dict[str, Any] = {"namespace": RECORD_NAMESPACE, "rank": 0, "epoch": claimed.epoch}
    if shared:
        who["noted_epoch"] = claimed.noted_epoch
    if kind == "file":
        return (SharedFileTier if shared else FileTier)(folder, CAPACITY, **who)
    sizes = {"reserve_bytes": 0, "grow_bytes": 1 << 20, "record_bytes": SIZE}
    return (SharedLmdbTier if shared else LmdbTier)(folder, CAPACITY, **who, **sizes)


def serve(
    root: Path, kind: str = "lmdb", *, shared: bool, resets: int = 0, numbers: Iterable[int] = ()
) -> set[int]:
    """Run a server on a path: it starts, is reset, stores these records, and ends. Returns the
    records that it finds when it starts, all of which it can read."""
    claimed = (
        share_rank_folder(root, NAMESPACE, rank=0, engine="t")
        if shared
        else claim_rank_folder(root, NAMESPACE, replica=0, rank=0, engine="t", starts=True)
    )
    with claimed:
        tier = tier_of(claimed, kind, shared=shared)
        return asyncio.run(_serve(tier, root, shared, resets, list(numbers)))


async def _serve(tier: Tier, root: Path, shared: bool, resets: int, new: list[int]) -> set[int]:
    await tier.open()
    found = [stored.key for stored in await all_keys(tier)]
    await assert_holds(tier, found, SIZE)
    for number in range(resets):
        await tier.reset(2 * number + 1 if shared else bump_epoch(replica_folder(root, NAMESPACE)))
    await put(tier, [key_of(number) for number in new], SIZE)
    await tier.aclose()
    return {int.from_bytes(key[:32], "big") for key in found}


def shared(root: Path, kind: str) -> None:
    """One engine is reset; then another stores records under the next common epoch."""
    serve(root, kind, shared=True, resets=1)
    serve(root, kind, shared=True, numbers=range(6))


def shared_odd(root: Path, kind: str) -> None:
    """The common epoch of an LMDB folder becomes odd if engines are reset again."""
    serve(root, kind, shared=True, resets=2)
    shared(root, kind)


def restarted(root: Path, kind: str) -> None:
    """A server that does not share is reset and starts again."""
    serve(root, kind, shared=False, numbers=range(9), resets=1)
    serve(root, kind, shared=False, numbers=range(6))


def epoch_in(file: Path) -> int:
    """The epoch that an export states."""
    with file.open("rb") as opened:
        [about] = [frame.about for frame in read_frames(opened) if frame.kind == "S"]
    assert about is not None
    return int(about["epoch"])


def export(root: Path, file: Path) -> None:
    result = kvtiers("export", root, file)
    assert result.code == 0, result.err


def refusal(file: Path, root: Path) -> str:
    """Why an import refuses the only rank of a file."""
    result = kvtiers("import", file, root, *NEW, "--json")
    assert result.code == 1
    return str(result.json["rank_folders"][0]["refused"])


SOURCES = {
    "shared-lmdb": (shared, "lmdb", 2),
    "shared-lmdb-odd": (shared_odd, "lmdb", 5),
    "shared-file": (shared, "file", 0),
    "restarted-lmdb": (restarted, "lmdb", 2),
    "restarted-file": (restarted, "file", 2),
}


@pytest.mark.parametrize("is_shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("into", ["lmdb", "file"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_server_finds_what_was_imported_after_a_reset(
    tmp_path: Path, source: str, into: str, is_shared: bool
) -> None:
    fill, kind, epoch = SOURCES[source]
    fill(tmp_path / "a", kind)
    export(tmp_path / "a", tmp_path / "f")
    assert epoch_in(tmp_path / "f") == epoch
    words = ["import", tmp_path / "f", tmp_path / "b", *NEW, "--type", into]
    assert kvtiers(*words).code == 0
    assert serve(tmp_path / "b", into, shared=is_shared) == set(range(6))


def test_a_folder_that_was_never_reset_receives_more(tmp_path: Path) -> None:
    """Epochs are counted in each folder separately, and both stand for the files' weights."""
    shared(tmp_path / "a", "lmdb")
    export(tmp_path / "a", tmp_path / "f")
    serve(tmp_path / "b", shared=True, numbers=range(20, 23))
    assert kvtiers("import", tmp_path / "f", tmp_path / "b").code == 0
    assert serve(tmp_path / "b", shared=True) == {*range(6), *range(20, 23)}


def test_a_shared_folder_receives_records_of_its_own_epoch(tmp_path: Path) -> None:
    shared_odd(tmp_path / "a", "lmdb")
    export(tmp_path / "a", tmp_path / "f")
    serve(tmp_path / "a", shared=True, numbers=range(20, 23))
    assert kvtiers("import", tmp_path / "f", tmp_path / "a").code == 0
    assert serve(tmp_path / "a", shared=True) == {*range(6), *range(20, 23)}


@pytest.mark.parametrize("is_shared", [False, True], ids=["exclusive", "shared"])
def test_records_from_before_a_reset_are_refused(tmp_path: Path, is_shared: bool) -> None:
    root = tmp_path / "a"
    serve(root, shared=is_shared, numbers=range(3))
    export(root, tmp_path / "old")
    serve(root, shared=is_shared, resets=1)
    serve(root, shared=is_shared, numbers=range(10, 12))
    said = refusal(tmp_path / "old", root)
    for words in ("a reset in between", str(rank_folder_of(root)), "epoch 2", "Name another path"):
        assert words in said
    assert serve(root, shared=is_shared) == {10, 11}


def reset_only(root: Path) -> None:
    """A running server has stored records after a reset."""
    serve(root, shared=False, resets=1, numbers=range(3))


def begun_only(root: Path) -> None:
    """A reset has begun an epoch, and the server was killed before the tier began it."""
    serve(root, shared=False, numbers=range(3))
    bump_epoch(replica_folder(root, NAMESPACE))


def restarted_without_its_tier(root: Path) -> None:
    """The next server began an even epoch, and has not opened the tier."""
    begun_only(root)
    bump_epoch(replica_folder(root, NAMESPACE))
    with claim_rank_folder(root, NAMESPACE, replica=0, rank=0, engine="t", starts=True):
        pass


def used_by_sharers_before(root: Path) -> None:
    """The index still contains the state of engines that shared the folder."""
    serve(root, shared=True, numbers=range(9))
    reset_only(root)


def begun_in_the_epoch_of_sharers(root: Path) -> None:
    """The server that was killed had gone on under the common epoch of engines that shared."""
    begun_only(root)
    assert serve(root, shared=True, numbers=range(6)) == set()
    assert serve(root, shared=False) == set(range(6))
    bump_epoch(replica_folder(root, NAMESPACE))


@pytest.mark.parametrize(
    "fill",
    [
        reset_only,
        begun_only,
        restarted_without_its_tier,
        used_by_sharers_before,
        begun_in_the_epoch_of_sharers,
    ],
)
def test_records_that_no_server_may_use_are_not_exported(tmp_path: Path, fill: Any) -> None:
    fill(tmp_path / "a")
    result = kvtiers("export", tmp_path / "a", tmp_path / "f")
    assert result.code == 1
    for words in (str(rank_folder_of(tmp_path / "a")), "was reset", "Start the server again"):
        assert words in result.err.replace("\n", " ")
    assert not (tmp_path / "f").exists()


RESET_SHARED = """
import sys
from pathlib import Path
from tests.offload.cli.test_import_epochs import serve
serve(Path(sys.argv[1]), sys.argv[2], shared=True, resets=1, numbers=range(20, 22))
serve(Path(sys.argv[1]), sys.argv[2], shared=True, numbers=range(20, 22))
"""


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("read_before", [2, 6], ids=["amid", "at-the-last-record"])
def test_an_export_of_a_shared_folder_that_is_reset_meanwhile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_before: int, kind: str
) -> None:
    """The reset discards all records, and others are stored before the export goes on."""
    shared(tmp_path / "a", kind)
    begun: list[int] = []

    def reset_once(rate_limit: RateLimit, byte_count: int) -> float:
        begun.append(byte_count)
        if len(begun) == read_before:
            command = [sys.executable, "-c", RESET_SHARED, str(tmp_path / "a"), kind]
            subprocess.run(command, cwd=ROOT, check=True)
        return 0.0

    monkeypatch.setattr(RateLimit, "delay_s", reset_once)
    result = kvtiers("export", tmp_path / "a", tmp_path / "f")
    assert len(begun) == read_before
    assert result.code == 1
    why = {"lmdb": "was reset during the export", "file": "began a new epoch"}[kind]
    assert why in result.err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def export_as_before(monkeypatch: pytest.MonkeyPatch, root: Path, file: Path) -> Result:
    """Export as versions did that did not look at the epoch."""
    with monkeypatch.context() as earlier:
        earlier.setattr("offload.admin.export.weights_problem", lambda *_: "")
        return kvtiers("export", root, file)


@pytest.mark.parametrize("there", ["nothing", "shared", "exclusive"])
def test_records_of_changed_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """In a shared folder the common epoch can have the same odd number."""
    serve(tmp_path / "a", shared=False, resets=3, numbers=range(3))
    assert export_as_before(monkeypatch, tmp_path / "a", tmp_path / "f").code == 0
    if there == "shared":
        shared_odd(tmp_path / "b", "lmdb")
    elif there == "exclusive":
        serve(tmp_path / "b", shared=False, resets=3, numbers=range(6))
    before = set() if there == "nothing" else set(range(6))
    assert "in no file" in refusal(tmp_path / "f", tmp_path / "b")
    if there != "exclusive":
        assert serve(tmp_path / "b", shared=True) == before


def test_a_folder_of_changed_weights_receives_nothing(tmp_path: Path) -> None:
    """Its next server would drop everything. A running one whose disk was away would read it."""
    shared_odd(tmp_path / "a", "lmdb")
    export(tmp_path / "a", tmp_path / "f")
    serve(tmp_path / "b", shared=False, resets=3, numbers=range(10, 12))
    assert "is at epoch 5: a reset in between" in refusal(tmp_path / "f", tmp_path / "b")


def test_a_folder_in_which_a_reset_has_begun_receives_nothing(tmp_path: Path) -> None:
    """Its next server drops everything. Both folders were at the common epoch 2."""
    shared(tmp_path / "a", "lmdb")
    export(tmp_path / "a", tmp_path / "f")
    begun_in_the_epoch_of_sharers(tmp_path / "b")
    assert "a reset in between" in refusal(tmp_path / "f", tmp_path / "b")


def test_a_folder_whose_epochs_disagree_receives_nothing(tmp_path: Path) -> None:
    """The next server begins empty there."""
    restarted(tmp_path / "a", "lmdb")
    export(tmp_path / "a", tmp_path / "f")
    restarted(tmp_path / "b", "lmdb")
    (replica_folder(tmp_path / "b", NAMESPACE) / "epoch").unlink()
    make_rank_folder(tmp_path / "c", [])
    source = replica_folder(tmp_path / "c", NAMESPACE) / "epoch"
    source.rename(replica_folder(tmp_path / "b", NAMESPACE) / "epoch")
    assert "beyond epoch 0 in the epoch file" in refusal(tmp_path / "f", tmp_path / "b")


def test_a_shared_folder_of_files_receives_nothing(tmp_path: Path) -> None:
    shared(tmp_path / "a", "file")
    export(tmp_path / "a", tmp_path / "f")
    assert "engines share the folder there" in refusal(tmp_path / "f", tmp_path / "a")


@pytest.mark.parametrize("numbers", [[], [1]])
def test_a_shared_tier_that_drops_records_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, numbers: list[int]
) -> None:
    serve(tmp_path, shared=False, resets=1)
    serve(tmp_path, shared=False, numbers=numbers)
    assert serve(tmp_path, shared=True) == set()
    assert ("begins empty: a server that did not share" in caplog.text) == bool(numbers)
