"""The weights change while a disk is away: the others are told at once, it when it is back."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload import tier_epochs
from offload.connector.owed_epochs import OwedEpochs
from offload.errors import TierUnavailableError
from offload.mounts import Spot
from offload.namespace import Namespace
from offload.namespace_folders import open_place, read_epoch, replica_folder
from offload.tier_epochs import TierEpochs

NAMESPACE = Namespace.of({"model": "a"})
PATIENCE_S = 20.0


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two tiers, opened once."""
    found = [str(tmp_path / name) for name in ("near", "far")]
    for path in found:
        open_place(path, NAMESPACE, replica=0, rank=0, engine="test", starts=True).close()
    return found


@pytest.fixture
def owed(paths: list[str]) -> Iterator[OwedEpochs]:
    epochs = OwedEpochs(TierEpochs(paths, NAMESPACE, 0).begin, retry_s=0.01)
    yield epochs
    epochs.close()
    for thread in threading.enumerate():
        if thread.name.startswith("kvtiers-epoch"):
            thread.join(PATIENCE_S)


def epoch_at(path: str) -> int:
    return read_epoch(replica_folder(path, NAMESPACE))


def taken(owed: OwedEpochs) -> dict[int, int]:
    end = time.monotonic() + PATIENCE_S
    while not (found := owed.take()):
        assert time.monotonic() < end, "the disk is back and was not told"
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("comes_back", ["as it was", "empty"])
def test_a_disk_that_is_away_is_told_when_it_is_back(
    paths: list[str], owed: OwedEpochs, comes_back: str
) -> None:
    far, elsewhere = Path(paths[1]), Path(paths[1] + "-elsewhere")
    assert owed.begin(range(2)) == {0: 1, 1: 1}
    far.rename(elsewhere)
    assert owed.begin(range(2)) == {0: 3}
    assert owed.begin(range(2)) == {0: 5}, "and once more"
    assert owed.take() == {}
    assert not far.exists()
    if comes_back == "empty":
        shutil.rmtree(elsewhere)
        far.mkdir(mode=0o700)
    else:
        elsewhere.rename(far)
    epoch = epoch_before = 1 if comes_back == "empty" else 3
    assert taken(owed) == {1: epoch}
    assert epoch_at(paths[1]) == epoch_before
    assert owed.take() == {}
    assert owed.begin(range(2)) == {0: 7, 1: epoch + 2}


def test_a_mount_point_without_its_disk_gets_no_folders(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = TierEpochs(paths, NAMESPACE, 0)
    shutil.rmtree(paths[1])
    Path(paths[1]).mkdir(mode=0o700)
    monkeypatch.setattr(tier_epochs, "spot_of", lambda _: Spot(-1, "/elsewhere"))
    with pytest.raises(TierUnavailableError, match="another file system"):
        epochs.begin(1)
    assert list(Path(paths[1]).iterdir()) == []
