"""``kvtiers why`` shows the records of a server's requests, and refuses files with other
content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload.namespaces.manifest import Namespace
from offload.planner.look_ahead.ahead_use import AheadUse
from offload.requests.miss_reasons import Miss, Reason
from offload.requests.request_file import RequestFile
from offload.requests.request_log import LoggedRequest
from tests.offload.cli.rank_folders import FIELDS, kvtiers
from tiers.testing import key_of

WHOLE = LoggedRequest("r", 1.0, 64, 0, 60).as_json()
"""A line that is a valid record."""


def recorded(folder: Path, *numbers: int) -> Path:
    """A server's file, with requests that missed these chunks."""
    file = folder / "requests.jsonl"
    written = RequestFile(str(file), 100, Namespace.of(FIELDS).name)
    for number in numbers:
        miss = Miss(Reason.NEVER_STORED, 0, 16, key_of(number))
        written(LoggedRequest(f"r{number}", 1.0, 64, 0, 60, miss=miss))
    written(LoggedRequest("hit", 1.0, 64, 0, 60, 60, {"cpu": 60}))
    written.close()
    return file


def test_what_look_ahead_did_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    written = RequestFile(str(file), 100, Namespace.of(FIELDS).name)
    late = AheadUse(48, 16, 1.23456)
    written(LoggedRequest("hit", 1.0, 64, 0, 60, 60, {"cpu": 60}, late, waited_s=2.34))
    written(LoggedRequest("in time", 1.0, 64, 0, 60, 60, {"cpu": 60}, AheadUse(44)))
    written(LoggedRequest("failed", 1.0, 64, 0, 60, 60, ahead=AheadUse(48, 16, 1.2, 32)))
    written.close()
    found = kvtiers("why", file, "--json").json["requests"]
    hit, in_time, failed = (
        {name: value for name, value in record.items() if name.startswith(("ahead_", "waited_"))}
        for record in found
    )
    assert hit == {
        "ahead_tokens": 48,
        "ahead_late_tokens": 16,
        "ahead_saved_s": 1.235,
        "waited_s": 2.34,
    }
    assert in_time == {"ahead_tokens": 44}
    assert failed == {"ahead_wasted_tokens": 32}, "nothing was loaded"
    shown = [kvtiers("why", file, "--request", record["request"]).out for record in found]
    hit_text, in_time_text, failed_text = (" ".join(text.split()) for text in shown)
    assert (
        "60 cpu, 48 of them read ahead (16 still being read), saved 1.2 s of reads, "
        "waited 2.3 s for reads"
    ) in hit_text
    assert "60 cpu, 44 of them read ahead │" in in_time_text
    assert "32 tokens were read ahead for nothing" in failed_text


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file = recorded(tmp_path, 1)
    with file.open("a") as half:
        half.write(json.dumps({"request": "half"})[:-3])
    assert len(kvtiers("why", file, "--json").json["requests"]) == 2


def test_a_file_without_requests(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    for text in ("", json.dumps(WHOLE), json.dumps(WHOLE)[:-3]):
        file.write_text(text)
        result = kvtiers("why", file)
        assert (result.code, result.out) == (0, "no request yet\n")
        assert kvtiers("why", file, "--json").json["requests"] == []
    result = kvtiers("why", recorded(tmp_path, 1), "--request", "of nobody")
    assert (result.code, result.out) == (0, "no request matches these options\n")


def test_what_clients_choose_does_not_control_the_terminal(tmp_path: Path) -> None:
    """A client can choose the id of its request."""
    file = tmp_path / "requests.jsonl"
    strange = {"request": "a\x1b]0;title\x07\n\u202e\ud800", "reason": "\x1b[2J"}
    file.write_text(json.dumps(WHOLE | strange) + "\n")
    result = kvtiers("why", file)
    assert result.code == 0
    assert r"a\x1b]0;title\x07\n\u202e\ud800 " in result.out
    assert r"1  \x1b[2J: this version" in result.out
    assert [one for one in result.out if not one.isprintable() and one != "\n"] == []
    assert kvtiers("why", file, "--json").json["requests"][0]["request"] == strange["request"]


@pytest.mark.parametrize("text", ["no json", '{"cpu": {}}', "[]", "[" * 100_000, "[" * 9 + "\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """A file is refused even if its only line has no end, like a line that is being written."""
    file = tmp_path / "other.json"
    file.write_text(text)
    result = kvtiers("why", file)
    assert (result.code, result.out) == (2, "")
    assert "is not a file of record_requests" in result.err


def test_a_reason_of_a_newer_version_is_shown(tmp_path: Path) -> None:
    file = recorded(tmp_path, 1)
    file.write_text(file.read_text().replace("never_stored", "[from] the future"))
    result = kvtiers("why", file)
    assert result.code == 0
    assert "[from] the future: this version" in result.out


@pytest.mark.parametrize(
    "line",
    [
        {"request": "r", "reason": "evicted"},
        {"request": "r", "reason": "evicted", "loaded_tokens": {"cpu": None}},
        {**WHOLE, "time": 1e300},
        {**WHOLE, "missing": {"group": 0}},
        {**WHOLE, "missing": {"group": 0, "at_token": 16, "key": "zz"}},
        {**WHOLE, "tier": 5},
        {**WHOLE, "ago_s": "long"},
        {**WHOLE, "ahead_tokens": "all"},
        {**WHOLE, "ahead_late_tokens": "16"},
        {**WHOLE, "ahead_saved_s": None},
        {**WHOLE, "ahead_wasted_tokens": [32]},
        ["request", "reason"],
        None,
    ],
)
def test_other_lines_of_json_are_not_records(tmp_path: Path, line: object) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps(line) + "\n")
    result = kvtiers("why", file)
    assert result.code == 2
    assert "is not a file of record_requests" in result.err
