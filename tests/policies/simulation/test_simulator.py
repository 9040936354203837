"""The simulator: one tier, two tiers, hints, time, and the command line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from policies.admission import AdmitAll, FrequencyAdmission, SecondUse, WriteBudget
from policies.eviction.lru import LruPolicy
from policies.eviction.ttl import TtlPolicy
from policies.simulation.cli import app
from policies.simulation.jobs import parse_block_bytes, parse_capacity, parse_spec, rounding_note
from policies.simulation.simulator import FlopModel, Infos, SimTier, bound, simulate
from policies.simulation.trace import Request, Trace, TraceWriter
from policies.simulation.two_tiers import MODES, simulate_two
from policies.testing import INFO, synthetic_trace
from tests.imports import ROOT

TRACE = synthetic_trace(7, requests=500)


def _hits(policy, capacity, **more):
    return simulate(TRACE, policy, capacity, **more).hit_blocks


def test_counts_computed_by_hand() -> None:
    requests = [
        Request(0, 40, ((0, 2),)),
        Request(1, 64, ((0, 4),)),
        Request(2, 40, ((9, 2),)),  # evicts 3 and 2, the deepest of the oldest
        Request(3, 70, ((0, 4),)),
    ]
    result = simulate(Trace("hand", 16, requests), LruPolicy(), 4)
    assert (result.hit_blocks, result.hit_tokens, result.prompt_tokens) == (4, 64, 214)
    assert (result.stored_blocks, result.evicted_blocks) == (8, 4)
    model = FlopModel(per_token=2.0, per_pair=1.0)
    assert model.prefix(10) == 70.0
    assert result.flops_saved_ratio == pytest.approx(
        2 * FlopModel().prefix(32) / sum(FlopModel().prefix(r.prompt_tokens) for r in requests)
    )


def test_a_prompt_larger_than_the_tier_keeps_its_head() -> None:
    requests = [Request(0, 160, ((0, 10),)), Request(1, 160, ((0, 10),))]
    log: list[int] = []
    simulate(Trace("large", 16, requests), LruPolicy(), 4, hit_log=log)
    assert log == [0, 4]


def test_capacities_of_write_through_inclusive_and_exclusive() -> None:
    def two(mode, **more):
        return simulate_two(TRACE, LruPolicy(), LruPolicy(), (40, 120), mode, **more)

    assert two("write-through").hit_blocks == _hits(LruPolicy(), 120)
    assert two("inclusive").hit_blocks == _hits(LruPolicy(), 120)
    exclusive = two("exclusive")
    assert exclusive.hit_blocks == pytest.approx(_hits(LruPolicy(), 160), rel=0.02)
    assert exclusive.extra["lower_writes"] > two("write-through").extra["lower_writes"]
    selective = two("selective", admission=SecondUse())
    assert selective.extra["lower_writes"] < 0.7 * two("write-through").extra["lower_writes"]
    for result in (two("write-through"), exclusive):
        parts = result.extra["upper_ratio"] + result.extra["lower_ratio"]
        assert parts == pytest.approx(result.token_hit_ratio)


def test_modes_are_checked() -> None:
    with pytest.raises(ValueError, match="write-through, inclusive, exclusive, selective"):
        simulate_two(TRACE, LruPolicy(), LruPolicy(), (4, 9), "both")
    with pytest.raises(ValueError, match="valid only with the mode selective"):
        simulate_two(TRACE, LruPolicy(), LruPolicy(), (4, 9), MODES[0], admission=AdmitAll())


def test_hints_of_a_trace_reach_policies_by_level() -> None:
    request = Request(
        0, 64, ((0, 4),), 0, 7, "tool_use", last=True, return_s=9.0, one_shot=True, pinned=1
    )
    model = FlopModel()
    assert Infos(16, model, "none").stored(request, 0).hints == {}
    assert Infos(16, model, "none").ended(request) == {}
    assert Infos(16, model, "end").ended(request) == {"session_end": True}
    infos = Infos(16, model, "all")
    assert infos.stored(request, 0).hints == {"session": 7, "one_shot": True, "pinned": True}
    assert infos.stored(request, 1).hints == {"session": 7, "one_shot": True}
    assert infos.ended(request) == {"session_end": True, "tool_call": True, "return_s": 9.0}
    assert infos.plain(3).depth_tokens == 64
    assert infos.plain(3).cost == pytest.approx(model.prefix(64) - model.prefix(48))
    with pytest.raises(ValueError, match="none, end, all"):
        Infos(16, model, "some")


def test_admission_keeps_chunks_out() -> None:
    assert simulate(TRACE, LruPolicy(), 100, admission=AdmitAll()).hit_blocks == _hits(
        LruPolicy(), 100
    )
    for admission in (SecondUse(), FrequencyAdmission(2, 4096)):
        result = simulate(TRACE, LruPolicy(), 100, admission=admission)
        assert 0 < result.stored_blocks < 0.7 * simulate(TRACE, LruPolicy(), 100).stored_blocks


def test_write_budget_is_a_token_bucket_on_the_trace_time() -> None:
    budget = WriteBudget(bytes_per_s=2, burst_bytes=3)
    now = [0.0]
    budget.use_clock(lambda: now[0])
    assert [budget.admit(key, INFO) for key in range(5)] == [True, True, True, False, False]
    now[0] = 1.0
    assert [budget.admit(key, INFO) for key in range(4)] == [True, True, False, False]
    now[0] = 1000.0
    assert [budget.admit(key, INFO) for key in range(5)] == [True, True, True, False, False]
    now[0] = -99.0  # a clock that jumps back adds nothing and breaks nothing
    assert not budget.admit(9, INFO)
    result = simulate(TRACE, LruPolicy(), 100, admission=WriteBudget(2.0, 5.0))
    assert result.stored_blocks <= 2 * TRACE.requests[-1].time_s + 5


def test_ttl_expires_and_holds() -> None:
    policy = TtlPolicy(ttl_s=100, hold_s=10)
    now = [0.0]
    policy.use_clock(lambda: now[0])
    for key in ("old", "tool", "new"):
        policy.insert(key, INFO)
        now[0] += 1
    policy.touch(["old"])
    policy.advise(["tool"], {"tool_call": True, "return_s": 5.0})

    def order() -> list[object]:
        return policy.victims(9, lambda key: True)

    assert order() == ["new", "old", "tool"]
    now[0] = 18.1  # the hold of 5 + 10 s is over: as if just used
    assert order() == ["new", "old", "tool"]
    policy.touch(["new"])
    assert order() == ["old", "tool", "new"]
    now[0] = 101.5  # "tool" was inserted at 1 s, "old" at 0
    assert order() == ["old", "tool", "new"]
    policy.touch(["old", "tool"])
    assert order() == ["old", "tool", "new"]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5%", 50),
        ("0.01%", 1),
        ("800blocks", 800),
        ("2 MiB", 128),
        ("1GiB", 65536),
        ("2 mib", 128),
        ("2MB", 122),
        ("16384B", 1),
    ],
)
def test_capacities_are_parsed(text: str, blocks: int) -> None:
    assert parse_capacity(text, 1000, 16384) == blocks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.01%", "capacity 0.01% is 0.10 blocks: 1 block is used"),
        ("1.5blocks", "capacity 1.5blocks is 1.50 blocks: 1 block is used"),
        ("100KiB", "capacity 100KiB is 6.25 blocks: 6 blocks are used"),
        ("12.34%", ""),  # 123.4 blocks: the difference does not matter
        ("5%", ""),
    ],
)
def test_a_rounded_capacity_is_reported(text: str, words: str) -> None:
    assert rounding_note(text, 1000, 16384) == words


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("1048576", 1 << 20), ("1MiB", 1 << 20), ("1.5 kib", 1536), ("2MB", 2_000_000)],
)
def test_the_size_of_a_block(text: str, size: int) -> None:
    assert parse_block_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1.5B", "5%", "3blocks", "x", "9" * 400])
def test_bad_sizes_of_a_block(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size like 2MiB"):
        parse_block_bytes(text)


@pytest.mark.parametrize("text", ["5", "x%", "5 parsecs", "5G", "9" * 400 + "%"])
def test_bad_capacities(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be like 5%, 800blocks or 10GiB"):
        parse_capacity(text, 1000, 16384)
    with pytest.raises(ValueError, match="needs the bytes of a block"):
        parse_capacity("1GiB", 1000, 0)


def test_specs_with_options() -> None:
    assert parse_spec("a:B,x=1,y=0.5,z=true,w=text") == {
        "name": "a:B",
        "x": 1,
        "y": 0.5,
        "z": True,
        "w": "text",
    }
    with pytest.raises(ValueError, match="must be option=value"):
        parse_spec("arc,7")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "synthetic.jsonl.gz"
    with TraceWriter(path, "synthetic", 16) as writer:
        for request in synthetic_trace(7, requests=300).requests:
            writer.write(request)
    return path


def test_command_line(trace_file, tmp_path) -> None:
    arguments = [
        str(trace_file),
        "--policy",
        "lru",
        "--policy",
        "policies.eviction.fifo:FifoPolicy",
    ]
    arguments += ["--capacity", "5%", "--capacity", "40blocks", "--jobs", "2"]
    arguments += ["--csv", str(tmp_path / "o.csv"), "--plot", str(tmp_path / "o.png"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["runs"]
    names = {row["policy"] for row in rows}
    assert names == {"optimum", "infinite", "lru", "policies.eviction.fifo:FifoPolicy"}
    trace = synthetic_trace(7, requests=300)
    lru = next(r for r in rows if r["policy"] == "lru" and r["capacity_blocks"] == 40)
    expected = simulate(trace, LruPolicy(), 40).token_hit_ratio
    assert lru["token_hit_ratio"] == pytest.approx(expected, abs=1e-6)
    best = bound(trace, 40).token_hit_ratio
    assert lru["of_optimum"] == pytest.approx(expected / best, abs=1e-3)
    with (tmp_path / "o.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 7
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"


def test_command_line_with_two_tiers(trace_file) -> None:
    arguments = [str(trace_file), "--policy", "adaptive", "--capacity", "5%", "--jobs", "1"]
    arguments += ["--lower-capacity", "20%", "--mode", "selective", "--admission", "second-use"]
    done = CliRunner().invoke(app, [*arguments, "--hints", "end", "--part", "0:0.5"])
    assert done.exit_code == 0, done.output
    assert "optimum" in done.output
    assert "adaptive / lru" in done.output
    assert "disk writes" in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "lfru"], 'Did you mean "lru"?'),
        (["--capacity", "5"], "must be like 5%"),
        (["--format", "csv"], '--format: is unknown (got "csv"). Use one of: auto, kvtiers'),
        (["--hints", "some"], '--hints: is unknown (got "some"). Use one of: none, end, all.'),
        (["--mode", "exclusiv"], '--mode: is unknown (got "exclusiv"). Did you mean "exclusive"?'),
        (["--mode", "write-back"], "--mode: is unknown"),
        (["--mode", "exclusive"], "--mode: exclusive needs a lower tier. Give --lower-capacity."),
        (["--lower-capacity", "9%", "--mode", "selective"], "--admission: belongs to --mode"),
        (["--lower-capacity", "9%", "--admission", "all"], "--admission: belongs to --mode"),
        (["--admission", "al"], "--admission: "),
        (["--mode", "x", "--hints", "y", "--policy", "z"], "3 problems: "),
        (["--capacity", "1.2.3%"], 'capacity "1.2.3%" must be like'),
        (["--part", "a:b"], 'part "a:b" must be like 0.5:1'),
        (["--part", "0.5:0.2"], 'part "0.5:0.2" must be like 0.5:1'),
        (["--part", "0:0.001"], "holds no request"),
        (["--csv", "no/such/o.csv"], "no folder no/such to write o.csv in"),
        (
            ["--json", "o.json"],
            "--json takes no file name, because it prints to stdout: o.json was",
        ),
        (["--json", "-"], "--json takes no file name, because it prints to stdout: - was read"),
    ],
)
def test_command_line_reports_what_is_wrong(trace_file, arguments, text) -> None:
    done = CliRunner().invoke(app, [str(trace_file), *arguments, "--jobs", "1"])
    assert done.exit_code == 2
    assert text in " ".join(done.output.replace("│", " ").split())


def test_rounding_is_reported_below_the_table_and_in_the_json(trace_file) -> None:
    arguments = [str(trace_file), "--capacity", "0.001%", "--policy", "lru", "--jobs", "1"]
    shown = CliRunner().invoke(app, arguments)
    words = "note: synthetic: capacity 0.001% is 0.0"
    assert any(line.startswith(words) for line in shown.stdout.splitlines()), shown.stdout
    [note] = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["notes"]
    assert note.endswith("1 block is used")


def test_results_are_printed_before_an_unwritable_file_is_reported(trace_file) -> None:
    arguments = [str(trace_file), "--capacity", "5%", "--jobs", "1", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--csv", "/dev/full"])
    assert done.exit_code == 1
    assert len(json.loads(done.stdout)["runs"]) == 4
    [line] = done.stderr.splitlines()
    assert line.startswith("kvtiers simulate: /dev/full: cannot be written: No space left on")


def test_the_simulator_checks_its_own_sums() -> None:
    class Leaky(LruPolicy):
        def insert(self, key, info):
            if key != 3:
                super().insert(key, info)

    with pytest.raises(AssertionError, match="keys, the tier"):
        simulate(TRACE, Leaky(), 100_000)


def test_protected_keys_are_not_evicted_by_their_own_request() -> None:
    tier = SimTier(LruPolicy(), 4)
    tier.store([0, 1, 2, 3], [INFO] * 4, ())
    tier.touch([0, 1, 2, 3])
    assert tier.store([9], [INFO], [0, 1, 2, 3, 9]) == 0
    assert tier.resident == {0, 1, 2, 3}


def test_the_command_starts_without_numpy_and_torch() -> None:
    """numpy and torch take longer to import than the rest of the command."""
    program = "import sys, policies.simulation.cli as _; print({'numpy', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
