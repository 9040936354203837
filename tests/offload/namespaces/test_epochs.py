"""The weights change while a disk is unavailable: the other tiers are reset at once, and its tier
when the disk is back."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.connector.scheduler.pending_epochs import BeginOne, PendingEpochs
from offload.errors import TierUnavailableError
from offload.namespaces import epochs as tier_epochs
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.epochs import TierEpochs, draw_epoch
from offload.namespaces.folders import claim_rank_folder, replica_folder
from offload.namespaces.manifest import Namespace
from offload.namespaces.mounts import MountPoint
from tests.patience import PATIENCE_S

NAMESPACE = Namespace.of({"model": "a"})


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two tiers, opened once."""
    found = [str(tmp_path / name) for name in ("near", "far")]
    for path in found:
        claim_rank_folder(path, NAMESPACE, replica=0, rank=0, engine="test", starts=True).close()
    return found


@pytest.fixture
def owed(paths: list[str]) -> Iterator[PendingEpochs]:
    yield from served(paths, TierEpochs(paths, NAMESPACE, 0).begin)


def served(paths: list[str], begin_one: BeginOne) -> Iterator[PendingEpochs]:
    epochs = PendingEpochs(len(paths), begin_one, retry_s=0.01)
    yield epochs
    epochs.close()
    for thread in threading.enumerate():
        if thread.name.startswith("kvtiers-epoch"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def epoch_at(path: str) -> int:
    return read_epoch(replica_folder(path, NAMESPACE))


def taken(owed: PendingEpochs) -> dict[int, int]:
    end = time.monotonic() + PATIENCE_S
    while not (found := owed.take()):
        assert time.monotonic() < end, "the disk is back and did not get the epoch"
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("comes_back", ["as it was", "empty"])
def test_an_unavailable_disk_gets_the_epoch_when_it_is_back(
    paths: list[str], owed: PendingEpochs, comes_back: str
) -> None:
    far, elsewhere = Path(paths[1]), Path(paths[1] + "-elsewhere")
    assert owed.reset(PATIENCE_S)
    assert owed.take() == {0: 1, 1: 1}
    far.rename(elsewhere)
    assert not owed.reset(PATIENCE_S)
    assert owed.take() == {0: 3}
    assert not owed.reset(PATIENCE_S), "a second disk failure must be handled as well"
    assert owed.take() == {0: 5}
    assert owed.take() == {}
    assert not far.exists()
    if comes_back == "empty":
        shutil.rmtree(elsewhere)
        far.mkdir(mode=0o700)
    else:
        elsewhere.rename(far)
    epoch = 1 if comes_back == "empty" else 3
    assert taken(owed) == {1: epoch}
    assert epoch_at(paths[1]) == epoch
    assert owed.take() == {}
    assert owed.reset(PATIENCE_S)
    assert owed.take() == {0: 7, 1: epoch + 2}


class Held:
    """Begins epochs, and hangs on the chosen tier."""

    def __init__(self, paths: list[str], tier: int, where: str) -> None:
        self.hangs, self.go_on = threading.Event(), threading.Event()
        self.asked = 0
        self._begin = TierEpochs(paths, NAMESPACE, 0).begin
        self._tier, self._where = tier, where

    def __call__(self, tier: int, noted: Callable[[], None]) -> int:
        if tier != self._tier:
            return self._begin(tier, noted)
        self.asked += 1
        self._hang("at once")
        return self._begin(tier, lambda: self._hold(noted))

    def _hold(self, noted: Callable[[], None]) -> None:
        noted()
        self._hang("in its syncs")

    def _hang(self, where: str) -> None:
        if where == self._where:
            self.hangs.set()
            self.go_on.wait()


@pytest.mark.parametrize("where", ["at once", "in its syncs"])
def test_a_hanging_disk_does_not_delay_a_reset(paths: list[str], where: str) -> None:
    """The reset waits for it only once. An epoch that it has placed before it hangs survives the
    process."""
    held = Held(paths, 1, where)
    for owed in served(paths, held):
        owed.reset(0.0)
        assert held.hangs.wait(PATIENCE_S)
        assert taken(owed) == {0: 1}
        assert epoch_at(paths[1]) == (1 if where == "in its syncs" else 0)
        assert owed.reset(3600.0) is (where == "in its syncs"), (
            "the reset must not wait for the disk"
        )
        assert owed.take() == {0: 3}
        held.go_on.set()
        assert taken(owed) == {1: 1}, (
            "one epoch is enough for both resets, because nothing was stored in between"
        )
        assert held.asked == 1
        assert owed.reset(PATIENCE_S)
        assert owed.take() == {0: 5, 1: 3}


CHILD = """
import os, signal, sys, threading, time
from offload.connector.scheduler.pending_epochs import BeginOne, PendingEpochs
from offload.namespaces.manifest import Namespace
from offload.namespaces.epochs import TierEpochs
def hangs(fd):
    threading.Event().wait()
os.fsync = hangs
owed = PendingEpochs(1, TierEpochs([sys.argv[1]], Namespace.of({"model": "a"}), 0).begin)
while not owed.reset(0.01):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_killed_right_after_a_reset_leaves_no_old_records(
    paths: list[str],
) -> None:
    """Old records are gone even if the disk cannot sync. The next server begins another epoch."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, paths[0]],
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    with claim_rank_folder(
        paths[0], NAMESPACE, replica=0, rank=0, engine="next", starts=True
    ) as place:
        assert place.epoch == 2


HUNG = """
import sys, threading
from offload.connector.scheduler.pending_epochs import PendingEpochs
hangs = threading.Event()
def hang(tier, *_):
    hangs.set()
    threading.Event().wait()
owed = PendingEpochs(1, hang, take_back_one=hang)
assert not owed.reset(0.0)
assert hangs.wait(float(sys.argv[1]))
threading.Thread.join = None  # so that waiting for a thread is an error and takes no time
owed.withdraw()
assert not owed.reset(0.0)
owed.close()
print("closed")
"""


def test_a_process_whose_disk_hangs_ends() -> None:
    """Neither ``withdraw``, ``close`` nor the interpreter waits for the thread of that disk."""
    command = [sys.executable, "-c", HUNG, str(PATIENCE_S)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (child.returncode, child.stdout) == (0, "closed\n"), child.stderr


def test_a_mount_point_without_its_disk_gets_no_folders(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = TierEpochs(paths, NAMESPACE, 0)
    shutil.rmtree(paths[1])
    Path(paths[1]).mkdir(mode=0o700)
    monkeypatch.setattr(tier_epochs, "mount_point_of", lambda _: MountPoint(-1, "/elsewhere"))
    with pytest.raises(TierUnavailableError, match="another file system"):
        epochs.begin(1)
    assert list(Path(paths[1]).iterdir()) == []


def test_epochs_of_shared_tiers_are_unique_and_never_that_of_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An odd epoch stands for weights that are in no file."""
    drawn = [draw_epoch() for _ in range(200)]
    assert all(epoch % 2 == 1 for epoch in drawn)
    assert len(set(drawn)) >= len(drawn) - 1, "by chance, two are equal in one of 50,000 runs"
    later = time.time() + 10.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert draw_epoch() > max(drawn)


def test_epochs_of_one_engine_grow_even_if_its_clock_is_set_back(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of them begin within a second."""
    epochs = TierEpochs(paths, NAMESPACE, 0, shared=[0, 1])
    drawn = [epochs.begin(0) for _ in range(50)]
    earlier = time.time() - 3600.0
    monkeypatch.setattr(time, "time", lambda: earlier)
    drawn += [epochs.begin(0) for _ in range(50)]
    assert drawn == sorted(set(drawn))
    assert all(epoch % 2 == 1 for epoch in drawn)
    assert epochs.begin(1) < drawn[0], "each tier has its own epochs"
