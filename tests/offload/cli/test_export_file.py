"""The file of ``kvtiers export`` is complete or absent, is written by one export at a time, and is
private."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import pytest

from offload.admin.export import ExportFileError, export_file
from tests.forks import child_of_killed
from tests.offload.cli.rank_folders import ROOT, kvtiers, make_rank_folder
from tests.offload.cli.test_export_import import export, frames
from tests.patience import PATIENCE_S, turns


def until(process: subprocess.Popen[bytes], is_done: Callable[[], object]) -> None:
    """Wait until a process shows a sign of progress; it must not end before that."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_export_at_a_time_writes_a_file(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(120))
    words = (
        "export",
        tmp_path / "a",
        tmp_path / "f",
        "--rate",
        "4KiB",
    )  # it would take ten minutes
    command = [sys.executable, "-m", "offload.cli", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT)
    part = tmp_path / "f.part"
    try:
        until(process, lambda: part.exists() and part.stat().st_size)
        for options in ([], ["--overwrite"]):
            result = kvtiers("export", tmp_path / "a", tmp_path / "f", *options)
            assert (result.code, result.out) == (1, "")
            assert result.err == (
                f"kvtiers export: another export is writing {part}. Wait until it ends, or name "
                "another file\n"
            )
        assert part.stat().st_size, "the second export truncated the file"
        assert not (tmp_path / "f").exists()
    finally:
        process.kill()
        process.wait()
    assert part.exists()  # and delays no other
    assert export(tmp_path / "a", tmp_path / "f")["rank_folders"][0]["records"] == 120
    assert [frame.kind for frame in frames(tmp_path / "f")] == ["M", "S", *"R" * 120, "E"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "f"]


@pytest.mark.parametrize("ended", ["published", "given up", "before it was opened"])
def test_an_export_that_ends_while_another_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """One export ends while the other checks the name, opens the part file and locks it."""
    path, part = tmp_path / "f", tmp_path / "f.part"

    def lock(fd: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            return real(fd, how)
        if ended == "published":
            part.rename(path)
            path.write_text("whole")
        elif ended == "given up":
            part.unlink()
        else:
            path.write_text("whole")
        return real(fd, how)

    real = fcntl.flock
    monkeypatch.setattr("fcntl.flock", lock)
    words = "in the meantime" if ended == "before it was opened" else "another export is writing"
    with pytest.raises(ExportFileError, match=words), export_file(path, overwrite=False) as file:
        file.write(b"of the second")
    assert ended == "given up" or path.read_text() == "whole"
    assert not part.exists()


@pytest.mark.parametrize(
    ("number", "without"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, (signal.SIGINT,))],
    ids=["SIGINT", "SIGTERM", "SIGTERM in the background of a script"],
)
def test_an_interrupted_export_leaves_no_file(
    number: signal.Signals, without: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    make_rank_folder(tmp_path / "a", range(40))
    part = tmp_path / "f.part"
    part.write_bytes(b"")
    part.chmod(0o644)  # left by another export
    words = ("export", tmp_path / "a", tmp_path / "f", "--rate", "1KiB")  # it would take minutes
    command = [sys.executable, "-m", "offload.cli", *map(str, words)]
    ignored = {other: signal.signal(other, signal.SIG_IGN) for other in without}  # inherited
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for other, before in ignored.items():
            signal.signal(other, before)
        until(process, lambda: part.stat().st_mode & 0o777 == 0o600)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class LateFile:
    """Takes the bytes of a write only when the writer waits for it; one write may fail."""

    def __init__(self, file: IO[bytes], failing: int = -1) -> None:
        self._file = file
        self._until_failure = failing

    async def writelines(self, parts: Iterable[bytes]) -> None:
        await turns()
        if not self._until_failure:
            raise OSError(errno.EIO, "planted")
        self._until_failure -= 1
        self._file.writelines(parts)

    async def close(self) -> None:
        self._file.close()


def test_a_payload_does_not_change_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(fd: int, mode: str, **_options: object) -> LateFile:
        return LateFile(os.fdopen(fd, mode, closefd=False))

    make_rank_folder(tmp_path / "a", range(6))
    export(tmp_path / "a", tmp_path / "f")
    monkeypatch.setattr("aiofiles.open", opened)
    export(tmp_path / "a", tmp_path / "late")
    assert (tmp_path / "late").read_bytes() == (tmp_path / "f").read_bytes()


@pytest.mark.parametrize("failing", [0, 1, 4, 8])
def test_a_failed_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The last one, of the end frame, is number 8."""

    async def opened(fd: int, mode: str, **_options: object) -> LateFile:
        return LateFile(os.fdopen(fd, mode, closefd=False), failing)

    make_rank_folder(tmp_path / "a", range(6))
    monkeypatch.setattr("aiofiles.open", opened)
    result = kvtiers("export", tmp_path / "a", tmp_path / "f")
    assert (result.code, result.err) == (1, f"kvtiers export: {tmp_path}/f.part: planted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from offload.cli import main
main()
"""


@pytest.mark.parametrize("missing_bytes", [1, 1000, 50_000])
def test_an_export_that_does_not_fit_on_the_disk_leaves_no_file(
    tmp_path: Path, missing_bytes: int
) -> None:
    """The failed write ends while the next record is read, or at the end."""
    make_rank_folder(tmp_path / "a", range(6))
    export(tmp_path / "a", tmp_path / "f")
    limit = (tmp_path / "f").stat().st_size - missing_bytes
    (tmp_path / "f").unlink()
    words = (sys.executable, "-c", LIMITED, limit, "export", tmp_path / "a", tmp_path / "f")
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"kvtiers export: {tmp_path}/f.part: File too large. Free some space, or name another "
        "file\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(2))
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "f.part").symlink_to(tmp_path / "precious")
    assert kvtiers("export", tmp_path / "a", tmp_path / "f").code == 1
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_path_that_is_not_a_regular_file_is_not_replaced(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(1))
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "f.part")
    assert kvtiers("export", tmp_path / "a", tmp_path / "f").code == 1
    # and the command does not block on it
    result = kvtiers("export", tmp_path / "a", tmp_path / "pipe", "--overwrite")
    assert result.code == 2
    assert "is not a regular file" in result.err
    assert (tmp_path / "pipe").is_fifo()


KILLED = """
from pathlib import Path
from offload.admin.export import export_file

with export_file(Path(sys.argv[1]), overwrite=False) as file:
    fork_and_die()
"""


def test_an_export_does_not_wait_for_the_child_of_a_killed_one(tmp_path: Path) -> None:
    with (
        child_of_killed(KILLED, tmp_path / "f"),
        export_file(tmp_path / "f", overwrite=False) as file,
    ):
        file.write(b"whole")
    assert (tmp_path / "f").read_bytes() == b"whole"
