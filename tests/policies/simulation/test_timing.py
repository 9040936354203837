"""The simulation with arrival times, against times that follow from its model."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from policies.registry import make_policy
from policies.simulation.cli import app
from policies.simulation.simulator import FlopModel, Infos, Result, SimTier
from policies.simulation.timing import STEP_TOKENS, Speeds, simulate_timed
from policies.simulation.trace import Request, Trace

TOKENS = 10
"""Tokens of a block."""
SPEEDS = Speeds(prefill=100, decode=10, read=1000, in_flight=1)


def prompt(first: int, blocks: int, time_s: float = 0.0, answer: int = 1) -> Request:
    """A request whose last block is not full: one token of it is always computed."""
    return Request(time_s, blocks * TOKENS + 1, ((first, blocks),), answer)


def tier(capacity: int, *held: Request) -> SimTier:
    made = SimTier(make_policy("lru"), capacity)
    infos = Infos(TOKENS, FlopModel())
    for request in held:
        blocks = request.blocks()
        made.store(blocks, [infos.plain(depth) for depth in range(len(blocks))], ())
    return made


def run(
    requests: list[Request],
    *,
    upper: int = 0,
    above: list[Request] | None = None,
    on_disk: list[Request] | None = None,
    look_ahead: float = 0.0,
    speeds: Speeds = SPEEDS,
) -> Result:
    trace = Trace("t", TOKENS, requests)
    lower = tier(10_000 if on_disk is not None else 0, *(on_disk or []))
    return simulate_timed(trace, tier(upper, *(above or [])), lower, speeds, look_ahead=look_ahead)


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


def test_computed_prompts_wait_for_each_other() -> None:
    """Two requests run at a time, but one prompt is computed at a time. Answers do not delay each
    other; the first one waits while the second prompt is computed."""
    speeds = Speeds(prefill=100, decode=10, read=1, in_flight=2)
    found = run([prompt(0, 10, answer=6), prompt(100, 10, 0.5, answer=6)], speeds=speeds).extra
    assert found["ttft_mean_s"] == close((1.01 + 2.02 - 0.5) / 2)
    assert found["ttft_p99_s"] == close(2.02 - 0.5)
    assert found["total_s"] == close(2.02 + 0.5)


def test_an_answer_waits_while_prompts_are_computed() -> None:
    """The first answer takes 2 s from 0.11 s on, but waits twice: for the prompt that arrives
    meanwhile, and for one whose read ends meanwhile. The fourth request needs its place."""
    speeds = Speeds(prefill=100, decode=10, read=100, in_flight=3)
    stored = prompt(100, 10)
    requests = [prompt(0, 1, answer=21), prompt(200, 10, 0.5, answer=100)]
    requests += [dataclasses.replace(stored, time_s=1.0, output_tokens=100), prompt(300, 10, 1.2)]
    found = run(requests, upper=100, on_disk=[stored], speeds=speeds).extra
    beside = speeds.prefill / STEP_TOKENS / speeds.decode
    ends = 0.11 + 2 + (1.01 + 0.01) * (1 - beside)
    ttft = [0.11, 1.01, 2.0 + 0.01 - 1.0, ends + 1.01 - 1.2]
    assert found["ttft_mean_s"] == close(sum(ttft) / 4)


def test_an_answer_continues_slowly_while_a_long_prompt_is_computed() -> None:
    """A step takes 0.2 s. Beside a prompt of 20 steps the answer of 9 more tokens ends after 9 of
    them, and the third request begins."""
    speeds = Speeds(prefill=5 * STEP_TOKENS, decode=50, read=1, in_flight=2)
    requests = [Request(0.0, 10, (), 10), Request(0.0, 20 * STEP_TOKENS - 10, (), 1)]
    requests += [Request(1.0, 5 * STEP_TOKENS, (), 1)]
    found = run(requests, speeds=speeds).extra
    assert found["ttft_p99_s"] == close(4.0)
    waits = [10 / speeds.prefill, 4.0, 4.0 + 1.0 - 1.0]
    assert found["ttft_mean_s"] == close(sum(waits) / 3)


def test_a_request_waits_for_the_one_before_it_and_for_its_reads() -> None:
    """One request runs at a time: the second is read when the answer of the first has ended."""
    both = [prompt(0, 10, answer=11), prompt(100, 10)]
    result = run(both, upper=100, on_disk=both)
    assert result.hit_blocks == 20
    assert result.extra["ttft_mean_s"] == close((0.11 + (0.11 + 1.0 + 0.11)) / 2)
    assert result.extra["read_per_needed"] == 1


def test_look_ahead_reads_while_a_request_waits() -> None:
    both = [prompt(0, 10, answer=11), prompt(100, 10)]
    found = run(both, upper=100, on_disk=both, look_ahead=0.5).extra
    assert found["ttft_mean_s"] == close((0.11 + (0.11 + 1.0 + 0.01)) / 2)
    assert (found["read_ahead_blocks"], found["wasted_blocks"]) == (10, 0)
    assert found["read_per_needed"] == 1


def test_hits_of_the_upper_tier_need_no_read() -> None:
    """Blocks that are read ahead are no hits of the upper tier: both runs have the same number."""
    above, below = prompt(0, 10, answer=11), prompt(100, 5)
    for look_ahead, read_ahead in ((0.0, 0), (0.5, 5)):
        found = run(
            [above, below], upper=100, above=[above], on_disk=[below], look_ahead=look_ahead
        )
        assert found.hit_blocks == 15
        assert found.extra["read_ahead_blocks"] == read_ahead
        assert found.extra["upper_hit_ratio"] == close(100 / (101 + 51))


def test_loads_come_before_look_ahead_and_join_its_reads() -> None:
    """Look-ahead is in its first batch when the request begins: it waits for that batch, and reads
    the rest itself."""
    requests = [prompt(0, 1, answer=1), prompt(100, 20), prompt(200, 20)]
    found = run(requests, upper=100, on_disk=requests[1:], look_ahead=0.5).extra
    # The first is computed for 0.11 s; 16 blocks of the second take 0.16 s and the others 0.04 s.
    # Meanwhile nothing is read for the third. It has 20 blocks to read after that.
    second = 0.2 + 0.01
    third = max(second, 0.2 + 0.16) + 0.04 + 0.01
    assert found["ttft_mean_s"] == close((0.11 + second + third) / 3)
    assert found["read_per_needed"] == 1


def test_look_ahead_is_bounded_by_its_share_of_the_upper_tier() -> None:
    """While the first request runs, there is space for the blocks of one other request. The third
    request is read when the second one begins, and waits for its read."""
    first = prompt(0, 1, answer=1000)
    waiting = [prompt(100 * number, 10) for number in range(1, 4)]
    found = run([first, *waiting], upper=40, on_disk=waiting, look_ahead=0.25).extra
    begin = 0.11 + 99.9
    expected = [0.11, begin + 0.01, begin + 0.1 + 0.01, begin + 0.2 + 0.01]
    assert found["ttft_mean_s"] == close(sum(expected) / 4)
    assert (found["read_ahead_blocks"], found["wasted_blocks"]) == (30, 0)
    assert found["read_per_needed"] == 1


def test_blocks_read_ahead_stay_until_their_request_begins() -> None:
    """The first request finds space for 8 of its 15 blocks. The rest of the tier belongs to the
    second request: 10 blocks that were read for it and 2 that were there before."""
    first, second = prompt(0, 15), prompt(100, 12)
    found = run([first, second], upper=20, above=[prompt(100, 2)], on_disk=[second],
                look_ahead=0.5).extra  # fmt: skip
    assert found["ttft_mean_s"] == close((1.51 + 1.51 + 0.01) / 2)
    assert (found["read_ahead_blocks"], found["wasted_blocks"]) == (10, 0)
    assert found["read_per_needed"] == 1


@given(
    st.lists(
        st.builds(
            prompt,
            st.integers(0, 6).map(lambda number: 20 * number),
            st.integers(0, 20),
            st.integers(0, 3).map(float),
            st.integers(0, 20),
        ),
        max_size=25,
    ),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(1, 4),
)
def test_every_request_is_answered(
    requests: list[Request], upper: int, look_ahead: float, in_flight: int
) -> None:
    """Every request is answered even when the tier is smaller than a prompt; nothing is read twice
    for one request."""
    requests.sort(key=lambda request: request.time_s)
    speeds = Speeds(prefill=100, decode=100, read=300, in_flight=in_flight)
    result = run(requests, upper=upper, on_disk=[], look_ahead=look_ahead, speeds=speeds)
    assert result.requests == len(requests)
    assert result.extra["wasted_blocks"] == 0
    assert result.extra["read_per_needed"] <= 1 + 1e-9
    assert result.extra["ttft_p99_s"] >= result.extra["ttft_mean_s"] - 1e-9
    assert math.isfinite(result.extra["total_s"])


def test_speeds_are_read_with_all_problems_at_once() -> None:
    assert Speeds.parse("read=5, in_flight=2") == Speeds(read=5, in_flight=2)
    with pytest.raises(ValueError, match=r'"reed" is unknown.*prefill must.*\(got "0"\).*whole'):
        Speeds.parse("reed=1,prefill=0,in_flight=1.5")


TRACE = [
    {"meta": {"name": "t", "block_tokens": 10, "licence": "none"}},
    *({"t": 0.1 * n, "in": 101, "out": 10, "r": [[20 * (n % 3), 10]]} for n in range(12)),
]


def test_the_command_compares_with_both_limits(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE), encoding="utf-8")
    command = [str(path), "--timing", "prefill=100,read=500,in_flight=1", "--policy", "lru"]
    command += ["--lower-capacity", "100%", "--capacity", "50%", "--jobs", "1", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["runs"]
    assert [(row["policy"], row["look_ahead"]) for row in rows] == [
        ("nothing stored", 0),
        ("lru / lru", 0),
        ("lru / lru", 0.25),
        ("all in the upper tier", 0),
    ]
    waits = [row["ttft_mean_s"] for row in rows]
    assert waits == sorted(waits, reverse=True)
    assert len(set(waits)) == len(waits)
    screen = CliRunner().invoke(app, command[:-1])
    assert screen.exit_code == 0, screen.output
    shown = next(line for line in screen.output.splitlines() if "all in the upper tier" in line)
    ratio = rows[-1]["upper_hit_ratio"]
    assert ratio == rows[-1]["token_hit_ratio"]
    assert shown.count(f"{ratio:.1%}") == 2


def test_options_that_do_not_fit_are_refused_together() -> None:
    command = ["t.jsonl", "--timing", "reed=1", "--mode", "exclusive", "--plot", "t.png"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    for text in ('--timing: "reed" is unknown', "--timing: needs a lower tier", "--plot: plots"):
        assert text in done.stderr
    done = CliRunner().invoke(app, ["t.jsonl", "--look-ahead", "0.2"])
    assert done.exit_code == 2
    assert "--look-ahead: has no effect without arrival times. Give --timing." in done.stderr
