"""The records of requests: limited in memory and on disk, and read back by ``kvtiers why``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.requests.miss_reasons import MEANINGS, Miss, Reason
from offload.requests.request_file import RequestFile
from offload.requests.request_log import LoggedRequest, RequestLog
from offload.telemetry.removed_chunks import Cause, RemovalCauses, Removed


@pytest.mark.parametrize("text", [None, "no json\n", '{"request": 3}\n', "[]\n"])
def test_an_invalid_file_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "f.jsonl"
    if text is not None:
        file.write_text(text)
    shown = CliRunner().invoke(app, ["why", str(file), "--reason", "bad", "--last", "0"])
    assert shown.exit_code == 2
    assert "3 problems" in shown.output


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Reason)


def test_memory_is_bounded_by_the_limits() -> None:
    log = RequestLog(records_max=3)
    for number in range(10):
        log.add(LoggedRequest(str(number), 0.0, 0, 0))
    assert [record.request for record in log.last] == ["7", "8", "9"]
    causes = RemovalCauses(keys_max=100)
    for number in range(1000):
        causes.note([b"%d" % number], Removed(Cause.EVICTED, 0, float(number)))
        assert len(causes) <= 101
    assert causes.find(b"999")
    assert causes.find(b"950")
    assert causes.find(b"1") is None
    causes.note((b"x%d" % number for number in range(10**6)), Removed(Cause.LOST, 0, 0.0))
    assert len(causes) <= 101


@pytest.mark.parametrize("most", [24, 10_000])
def test_the_cause_of_the_latest_removal_is_found(most: int) -> None:
    """The test runs with and without a shared part."""
    causes = RemovalCauses(most)
    for number, cause in enumerate((Cause.NO_SPACE, Cause.EVICTED, Cause.CORRUPT)):
        causes.note([b"k", b"%d" % number], Removed(cause, 0, float(number)))
        causes.note([b"%d of %d" % (n, number) for n in range(5)], Removed(cause, 0, 0.0))
    assert causes.find(b"k") == Removed(Cause.CORRUPT, 0, 2.0)


def _record(number: int) -> LoggedRequest:
    return LoggedRequest(f"r{number}", 0.0, 64, 0, 60, miss=Miss(Reason.NEVER_STORED))


def test_the_file_keeps_the_last_requests_and_stays_small(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("what was there before")
    written = RequestFile(str(file), records_max=10)
    for number in range(95):
        written(_record(number))
    written.close()
    assert written.dropped == 0
    names = [json.loads(line)["request"] for line in file.read_text().splitlines()]
    assert names[-10:] == [f"r{number}" for number in range(85, 95)]
    assert len(names) <= 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl"]


def test_a_restart_keeps_what_the_previous_server_has_written(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    for numbers in (range(95), range(95, 100), range(100, 103)):
        written = RequestFile(str(file), records_max=10)
        for number in numbers:
            written(_record(number))
        written.close()
        with file.open("a") as torn:
            torn.write('{"request": "torn by a crash')
    names = [json.loads(line)["request"] for line in file.read_text().splitlines()[:-1]]
    assert names[-10:] == [f"r{number}" for number in range(93, 103)]
    assert len(names) == len(set(names)) <= 20


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("text")
    for name in ("requests.jsonl", "requests.jsonl.new"):
        (tmp_path / name).symlink_to(target)
    written = RequestFile(str(tmp_path / "requests.jsonl"), records_max=10)
    written(_record(1))
    written.close()
    assert target.read_text() == "text"
    assert not (tmp_path / "requests.jsonl").is_symlink()


def test_an_unwritable_file_ends_only_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("offload").propagate = True  # another test may have sent it to vLLM's log
    with caplog.at_level(logging.ERROR, logger="offload"):
        written = RequestFile(str(tmp_path / "missing" / "requests.jsonl"), records_max=10)
        for number in range(3000):
            written(_record(number))  # more than fits into the queue
        written.close()
    assert written.dropped > 0
    assert any("recording requests" in record.message for record in caplog.records)


def test_the_guide_lists_every_reason() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "misses.md").read_text()
    for reason, text in MEANINGS.items():
        assert f"| `{reason.value}` | {text} |" in guide
    reasons = guide.partition("\n## ")[0]  # other sections have other tables
    assert reasons.count("\n| `") == len(MEANINGS)
