"""Readers and the writer of traces."""

from __future__ import annotations

import gzip
import json

import pytest

from policies.simulation.trace import (
    Request,
    Trace,
    TraceError,
    TraceWriter,
    json_lines,
    to_runs,
)
from policies.simulation.trace_formats import read_trace
from policies.testing import synthetic_trace


def _lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_written_trace_is_read_back(tmp_path, suffix) -> None:
    trace = synthetic_trace(1, requests=50)
    path = tmp_path / f"own{suffix}"
    with TraceWriter(path, trace.name, 16, licence="CC0") as writer:
        for request in trace.requests:
            writer.write(request)
    again = read_trace(path)
    assert again.requests == list(trace.requests)
    assert again.block_tokens == 16
    assert again.meta["licence"] == "CC0"
    assert (gzip.open if suffix.endswith("gz") else open)(path, "rb").read(1) == b"{"


def test_recorded_keys_become_numbers(tmp_path) -> None:
    path = tmp_path / "server.jsonl"
    with TraceWriter(path, "server", 32) as writer:
        writer.record(1.0, [b"k1", b"k2"], 70, session=4, last=True)
        writer.record(2.0, [b"k1", b"k3"], 64, stop="tool_use")
    first, second = read_trace(path).requests
    assert first == Request(1.0, 70, ((0, 2),), session=4, last=True)
    assert second.blocks() == [0, 2]
    assert b"k1" not in path.read_bytes()


def test_mooncake_drops_the_partial_block(tmp_path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 2353]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [46, 47]},
        {"timestamp": 2000, "input_length": 100, "output_length": 5, "hash_ids": [50]},
    ]
    trace = read_trace(_lines(tmp_path / "m.jsonl", rows))
    assert [(request.time_s, request.block_count) for request in trace.requests] == [(1, 2), (3, 2)]
    assert trace.requests[0].blocks() == trace.requests[1].blocks()
    assert trace.block_tokens == 512


def test_bailian_follows_parents_to_a_session(tmp_path) -> None:
    row = {"timestamp": 0.5, "input_length": 40, "output_length": 5, "type": "text", "turn": 1}
    rows = [
        {**row, "chat_id": 1, "parent_chat_id": -1, "hash_ids": [7, 8, 9]},
        {**row, "chat_id": 2, "parent_chat_id": -1, "hash_ids": [7, 10, 11]},
        {**row, "chat_id": 3, "parent_chat_id": 1, "hash_ids": [7, 8, 12]},
    ]
    trace = read_trace(_lines(tmp_path / "b.jsonl", rows))
    assert [request.session for request in trace.requests] == [0, 1, 0]
    assert trace.block_tokens == 16
    assert trace.unique_blocks() == 3  # of three ids each, of which two are full blocks


def test_kv_events_rebuild_the_chains(tmp_path) -> None:
    def stored(hashes, parent):
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "block_size": 16,
        }

    rows = [
        {"ts": 1.0, "events": [stored([11, 12], None), {"type": "AllBlocksCleared"}]},
        [2.0, [stored([13], 12), {"type": "BlockRemoved", "block_hashes": [11]}], 0],
        [3.0, [stored([14], 11)]],
    ]
    trace = read_trace(_lines(tmp_path / "e.jsonl", rows))
    assert [request.blocks() for request in trace.requests] == [[0, 1], [0, 1, 2], [0, 3]]
    assert trace.requests[1].prompt_tokens == 48


def test_kv_events_as_vllm_makes_them(tmp_path) -> None:
    """Events of several groups and tiers about the same tokens count once."""
    events = pytest.importorskip("vllm.distributed.kv_events")
    encode = pytest.importorskip("msgspec").json.encode

    def stored(hashes, parent, medium, group):
        return events.BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(range(16 * len(hashes))),
            block_size=16,
            lora_id=None,
            medium=medium,
            lora_name=None,
            group_idx=group,
        )

    first = [stored([b"1", b"2"], None, "GPU", group) for group in (0, 1)]
    second = [stored([b"3"], b"2", "GPU", 0), stored([b"1", b"2"], None, "CPU", 0)]
    batches = [events.KVEventBatch(ts=1.5, events=[*first, events.AllBlocksCleared()])]
    batches.append(events.KVEventBatch(ts=2.5, events=second, data_parallel_rank=0))
    path = tmp_path / "vllm.jsonl"
    path.write_bytes(b"".join(encode(batch) + b"\n" for batch in batches))
    trace = read_trace(path)
    assert [request.blocks() for request in trace.requests] == [[0, 1], [0, 1, 2]]
    assert trace.block_tokens == 16


OWN = '{"meta": {"block_tokens": 16}}\n'
EVENT = (
    '[1, [{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, '
    '"block_size": %s}]]\n'
)


def test_events_in_which_a_block_is_its_own_ancestor_are_read(tmp_path) -> None:
    rows = [
        [1, [{"type": "BlockStored", "block_hashes": [one], "parent_block_hash": parent,
              "block_size": 16}]]
        for one, parent in ((1, 2), (2, 1), (1, 2), (3, 1))
    ]  # fmt: skip
    trace = read_trace(_lines(tmp_path / "e.jsonl", rows))
    assert trace.unique_blocks() == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense\n", "not JSON lines, at line 1: "),
        ("[" * 100_000, "not JSON lines, at line 1: "),
        ('{"timestamp": 0, "input_length": 1024, "hash_ids": "abc"}\n', "hash_ids is not a list"),
        ('{"timestamp": 0, "input_length": 1024, "hash_ids": [null]}\n', "hash_ids is not a list"),
        ('{"timestamp": 0, "input_length": Infinity, "hash_ids": [1]}\n', "OverflowError"),
        ('{"what": 1}\n', "no known format"),
        ("", "no known format"),
        ('{"meta": {"name": "x"}}\n', "block_tokens"),
        ('{"meta": {"block_tokens": 16}}\n{"t": 1}\n', 'line 2: has no "in"'),
        ('{"meta": {"block_tokens": 16}}\n', "no request"),
        ('{"meta": {"block_tokens": 0}}\n', "line 1: block_tokens must be at least 1 (got 0)"),
        ('{"meta": {"block_tokens": Infinity}}\n', "line 1 must be meta with block_tokens"),
        (OWN + '{"t": 1, "in": 32, "r": [[0, 1000000000000]]}\n', "line 2: ValueError"),
        (OWN + '{"t": 1, "in": 32, "r": [[0, 2], [7, -1]]}\n', "line 2: ValueError"),
        (EVENT % "Infinity", "line 1: OverflowError"),
    ],
)
def test_a_bad_file_is_reported_with_its_fault(tmp_path, text, complaint) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.jsonl") as caught:
        read_trace(path)
    assert complaint in str(caught.value)


def test_a_file_that_is_not_text_has_no_line(tmp_path) -> None:
    path = tmp_path / "bad.jsonl.gz"
    whole = gzip.compress(b"\n".join(b"%d" % (number**9) for number in range(9999)))
    damaged = whole[:10] + b"\xff" * 100
    for content in (b"no gzip", gzip.compress(b"\xff\xfe"), whole[:5], damaged):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"bad\.jsonl\.gz: not JSON lines: "):
            list(json_lines(path))


def test_the_missing_end_of_a_compressed_file_is_reported(tmp_path, caplog) -> None:
    """A trace has no end while its server runs, or permanently if the server was killed."""
    path = tmp_path / "cut.jsonl.gz"
    rows = [{"number": number**9} for number in range(9999)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    path.write_bytes(whole[: len(whole) // 2])
    found = [row for _, row in json_lines(path)]
    assert 1000 < len(found) < len(rows)
    assert found == rows[: len(found)]
    assert f"{path} is not complete: it ends after line {len(found)}" in caplog.text


def test_an_incomplete_last_line_is_ignored(tmp_path) -> None:
    """A trace ends in the middle of a line while its server runs, or permanently if the server was
    killed."""
    trace = synthetic_trace(1, requests=5)
    path = tmp_path / "own.jsonl"
    with TraceWriter(path, trace.name, 16) as writer:
        for request in trace.requests:
            writer.write(request)
    whole = path.read_text()
    for end in (1, 5, len(whole.splitlines()[-1])):
        path.write_text(whole[: -1 - end])
        assert read_trace(path).requests == list(trace.requests)[:-1], end
    path.write_text(whole[:-1])  # everything except the end of the line
    assert read_trace(path).requests == list(trace.requests)
    lines = whole.splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:-5] + "\n", *lines[3:]]))
    with pytest.raises(TraceError, match="at line 3"):
        read_trace(path)


def test_unknown_format_lists_the_known_ones(tmp_path) -> None:
    with pytest.raises(TraceError, match="kv-events"):
        read_trace(tmp_path / "x", format="csv")


def test_unique_blocks_counts_overlapping_runs_once() -> None:
    requests = [Request(0, 1, runs) for runs in (((0, 5),), ((3, 4),), ((3, 1), (20, 2)))]
    assert Trace("t", 16, requests).unique_blocks() == len({*range(7), 20, 21})


def test_runs_are_ranges_in_order() -> None:
    assert to_runs([5, 6, 7, 2, 9, 10]) == ((5, 3), (2, 1), (9, 2))
    assert to_runs([]) == ()
    assert Request(0, 0, ((5, 3), (2, 1))).blocks() == [5, 6, 7, 2]


def test_part_takes_a_share_of_the_requests() -> None:
    trace = synthetic_trace(2, requests=100)
    assert len(trace.part(0.25, 0.5).requests) == 25
    assert trace.part(0.5, 1).requests[-1] == trace.requests[-1]


def test_a_trace_of_our_format_contains_its_block_size(tmp_path) -> None:
    trace = tmp_path / "own.jsonl"
    trace.write_text(
        '{"meta": {"block_tokens": 16}}\n{"t": 1, "in": 32, "out": 1, "r": [[0, 2]]}\n'
    )
    assert read_trace(trace, block_tokens=16).block_tokens == 16
    with pytest.raises(TraceError, match=r"16 tokens per block \(got 512\)"):
        read_trace(trace, block_tokens=512)
