"""The folders of lower tiers, and what happens there when a medium has failed and another one, or
the same, comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.errors import TierUnavailableError
from offload.namespaces import epoch_file
from offload.namespaces.epoch_file import bump_epoch, raise_epoch, read_epoch
from offload.namespaces.folders import replica_folder
from offload.namespaces.mounts import MountPoint, mount_point_of
from offload.worker import tier_claim
from offload.worker.tier_factory import TierSpec, make_tier
from tests.offload.worker import reopening_child
from tests.offload.worker.reopening_child import KEYS, NAMESPACE, SIZE, fail, places, tier_at
from tiers.adapters import reopening
from tiers.base import ReadOutcome, WriteOutcome
from tiers.testing import all_keys, assert_holds, assert_misses, fetch, payload_of, put

CHILD = [sys.executable, "-m", "tests.offload.worker.reopening_child"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "RETRY_S", 0.0)


def epoch_at(path: Path) -> int:
    return read_epoch(replica_folder(path, NAMESPACE))


def bump(path: Path) -> int:
    return bump_epoch(replica_folder(path, NAMESPACE))


def renew(spec: TierSpec, epoch: int = 0) -> TierSpec:
    return spec.renewed(epoch)


def release(spec: TierSpec) -> None:
    """Release the claim, as the end of a process does."""
    assert spec.claim is not None
    spec.claim.close()


async def filled(path: Path, *, version: int = 0, kind: str = "lmdb", epoch: int = 0) -> None:
    """A server that has stored ``KEYS``, advanced to ``epoch`` and ended."""
    [spec] = places(path, type=kind).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    await tier.write(KEYS, [payload_of(key, SIZE, version) for key in KEYS])
    if epoch:
        await tier.reset(epoch)
    await tier.aclose()
    release(spec)


async def stored_in(epoch: int, path: Path) -> None:
    """A server that has stored ``KEYS`` in this epoch and ended."""
    [spec] = places(path).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    await tier.reset(epoch)
    await put(tier, KEYS, SIZE)
    await tier.aclose()
    release(spec)


# -- epochs ----------------------------------------------------------------------------------


def epoch_begun_and_killed(path: Path, comes_back: str) -> int:
    process = subprocess.Popen([*CHILD, str(path), comes_back], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        return int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("comes_back", ["nothing", "different", "same", "late"])
async def test_old_weights_are_forgotten_even_if_killed_before_the_reset(
    tmp_path: Path, comes_back: str
) -> None:
    """The disk was lost, the tier began empty, new weights got an epoch, and then ``kill -9``."""
    path = tmp_path / "kv"
    await filled(tmp_path / "other", version=1)
    epoch = epoch_begun_and_killed(path, comes_back)
    assert epoch_at(path) == epoch
    tier = tier_at(path)
    info = await tier.open()
    assert (info.record_count, await all_keys(tier)) == (0, [])
    assert info.found_epoch < info.epoch == epoch + 1, "a start with the weights of the files"
    await tier.aclose()


@pytest.mark.parametrize("kind", ["lmdb", "file"])
async def test_a_folder_of_an_older_epoch_returns_nothing(tmp_path: Path, kind: str) -> None:
    """A restored snapshot: the same keys, computed with older weights."""
    path, snapshot = tmp_path / "kv", tmp_path / "snapshot"
    await filled(path, version=1, kind=kind)
    shutil.copytree(path, snapshot)
    for _ in range(3):
        bump(path)
    tier = tier_at(path, type=kind)
    lost: list[int] = []
    tier.on_loss(lambda: lost.append(1))
    await tier.open()
    await put(tier, KEYS[:2], SIZE)
    os.rename(path, tmp_path / "away")
    await fail(tier)
    os.rename(snapshot, path)
    assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.MISS
    assert lost == [1]
    assert epoch_at(path) == 6
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    assert bump(path) == 7
    await tier.reset(7)
    assert epoch_at(path) == 7
    await tier.aclose()


@pytest.mark.parametrize(("recovery", "losses"), [("off", 1), ("quiet", 0)])
async def test_records_that_a_reopened_tier_drops_are_reported(
    tmp_path: Path, recovery: str, losses: int
) -> None:
    """Otherwise every request would find out by a load that fails."""
    path, away, lost = tmp_path / "kv", tmp_path / "away", list[int]()
    tier = tier_at(path, recovery=recovery)
    tier.on_loss(lambda: lost.append(1))
    await tier.open()
    await put(tier, KEYS, SIZE)
    os.rename(path, away)
    await fail(tier)
    os.rename(away, path)
    await tier.touch(KEYS)
    assert len(await all_keys(tier)) == (0 if losses else len(KEYS))
    assert lost == [1] * losses
    await tier.aclose()


async def test_a_tier_that_begins_empty_remembers_changed_weights(tmp_path: Path) -> None:
    """The weights were changed, so the epoch is odd; then another disk came back. Records stored
    from now on must not look like those of a server with the weights of the files."""
    path, other = tmp_path / "kv", tmp_path / "other"
    await stored_in(1, other)
    tier = tier_at(path)
    await tier.open()
    assert bump(path) == 1
    await tier.reset(1)
    await put(tier, KEYS[:2], SIZE)
    os.rename(path, tmp_path / "away")
    await fail(tier)
    os.rename(other, path)
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    assert epoch_at(path) % 2 == 1
    await tier.aclose()


async def test_a_reset_that_the_tier_has_reached_by_itself_remembers_changed_weights(
    tmp_path: Path,
) -> None:
    """Another disk came back, of a later epoch. The scheduler began an epoch there, and before the
    reset arrived, an earlier operation opened the tier: it begins empty, under the same epoch. The
    reset then has to begin one more, which must not be that of a server with the weights of the
    files."""
    path, other = tmp_path / "kv", tmp_path / "other"
    await stored_in(5, other)
    [spec] = places(path).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    assert bump(path) == 1
    await tier.reset(1)
    os.rename(path, tmp_path / "away")
    await fail(tier)
    os.rename(other, path)
    begun = bump(path)
    await tier.touch(KEYS)
    await put(tier, KEYS[:2], SIZE)
    assert epoch_at(path) == begun == 7
    await tier.reset(begun)
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await tier.aclose()
    release(spec)
    tier = tier_at(path)
    await tier.open()
    assert await all_keys(tier) == [], "records of weights that are in no file"
    await tier.aclose()


async def test_the_epoch_file_is_never_behind_a_tier(tmp_path: Path) -> None:
    """The file is ahead even after a reset to an epoch that the tier has already had."""
    path = tmp_path / "kv"
    tier = tier_at(path)
    await tier.open()
    for asked, epoch in ((3, 3), (1, 5), (4, 6), (9, 9)):
        await tier.reset(asked)
        assert tier.stats()["epoch"] == epoch_at(path) == epoch
    await tier.aclose()


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize("epoch", [1, 2, 3, 4])
async def test_a_copy_made_during_resets_revives_nothing(
    tmp_path: Path, kind: str, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``cp -r`` read the epoch file, then the weights were replaced, then it read the rest: the
    file says 0, and the records belong to later weights, or to a start after those."""
    path = tmp_path / "kv"
    await filled(path, kind=kind)
    file = replica_folder(path, NAMESPACE) / "epoch"
    early = file.read_bytes()
    [spec] = places(path, type=kind).specs()
    tier = make_tier(spec, 4096)
    await tier.open()
    for begun in range(1, epoch + 1):
        await tier.reset(begun)
    await tier.write(KEYS, [payload_of(key, SIZE, version=1) for key in KEYS])
    await tier.aclose()
    release(spec)
    file.write_bytes(early)
    [spec] = places(path, type=kind).specs()
    tier = make_tier(spec, 4096)
    info = await tier.open()
    assert (info.record_count, await all_keys(tier)) == (0, [])
    await assert_misses(tier, KEYS, SIZE)
    assert info.epoch == epoch_at(path) > epoch
    assert info.epoch % 2 == 0, "a start with the weights of the files"
    assert f"of epoch {epoch}, beyond epoch 0" in caplog.text
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await tier.aclose()
    release(spec)
    tier = tier_at(path, type=kind)  # records that are stored from now on must stay
    assert (await tier.open()).record_count == len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


def test_raising_an_epoch_never_lowers_one_that_was_raised_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = replica_folder(tmp_path, NAMESPACE)
    release(places(tmp_path).specs()[0])
    real = epoch_file.locked

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        monkeypatch.setattr(epoch_file, "locked", real)
        assert bump_epoch(folder, epoch_min=9) == 9
        with real(folder):
            yield

    monkeypatch.setattr(epoch_file, "locked", late)
    assert raise_epoch(home, 5) == 9
    assert epoch_at(tmp_path) == 9


# -- place and capacity ----------------------------------------------------------------------


def test_a_reopened_tier_keeps_its_capacity(tmp_path: Path) -> None:
    """The scheduler relies on it, whatever else is on the disk by then."""
    [spec] = places(tmp_path).specs()
    other = tmp_path / "0123456789abcdef0123456789abcdef"
    other.mkdir()
    (other / "data").write_bytes(bytes(20 << 20))
    again = renew(renew(spec))
    assert again.capacity_bytes == spec.capacity_bytes


def test_a_tier_is_reopened_only_on_its_previous_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mnt" / "kv"
    [spec] = places(path).specs()
    here = mount_point_of(path)
    shutil.rmtree(tmp_path / "mnt")
    with pytest.raises(FileNotFoundError):
        renew(spec)
    path.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(
        tier_claim, "mount_point_of", lambda _: MountPoint(here.device + 1, "/elsewhere")
    )
    with pytest.raises(TierUnavailableError, match="another file system"):
        renew(spec)
    assert list(path.iterdir()) == []
    monkeypatch.setattr(
        tier_claim, "mount_point_of", lambda _: MountPoint(here.device + 1, here.mount)
    )
    assert renew(spec, 7).epoch == epoch_at(path) == 7  # another disk, mounted at the same place


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A small separate file system at ``folder``."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"needs permission to mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        # The tier's files are open, as when a disk is unplugged, so only a lazy unmount works.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_mount_point_without_its_disk_is_not_used(tmp_path: Path) -> None:
    """The mount point is not used even if it contains a folder of the same namespace, left by a
    start without the disk."""
    mount = tmp_path / "disk"
    mount.mkdir()
    path = mount / "kv"
    [early] = places(path).specs()
    release(early)
    before = sorted(mount.rglob("*"))
    with mounted(mount):
        [spec] = places(path).specs()
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match="another file system"):
            renew(spec, 5)
    assert sorted(mount.rglob("*")) == before
    assert epoch_at(path) == 0
    with mounted(mount):  # another disk, new and empty
        path.mkdir(mode=0o700)
        again = renew(spec, 5)
        assert again.epoch == epoch_at(path) == 5
        release(again)


def test_the_child_and_the_test_use_the_same_folder(tmp_path: Path) -> None:
    """The control: an epoch that the child's functions begin is the one that is read here."""
    [spec] = reopening_child.places(tmp_path).specs()
    assert bump(tmp_path) == 1
    assert spec.claim is not None
    spec.claim.keep_epoch(5)
    assert epoch_at(tmp_path) == 5
    spec.claim.keep_epoch(2)
    assert epoch_at(tmp_path) == 5
    assert bump(tmp_path) == 7
