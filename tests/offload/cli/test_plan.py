"""``kvtiers plan`` and ``bench``: numbers that can be computed by hand, and refusals."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo.tiny_model import make_llama
from offload.admin.capacity_plan import (
    Machine,
    ModelSize,
    Simulated,
    capacity_blocks,
    estimate_capacity,
)
from policies.simulation.simulator import bound
from policies.simulation.synthetic_trace import Mix, mix_trace
from policies.simulation.trace import Request, Trace, TraceWriter
from tests.offload.cli.rank_folders import ROOT, kvtiers

GIB = 1 << 30


def plan(*words: object) -> dict:
    result = kvtiers("plan", *words, "--json")
    assert result.code == 0, result.err
    return result.json


def test_how_much_tiers_hold_and_how_fast_they_load() -> None:
    found = plan("--token-bytes", "64KiB", "--cpu", "4GiB", "--disk", "64GiB", "--link", "20GB",
                 "--disk-read", "2GB", "--prefill-tokens-per-s", "100000")  # fmt: skip
    cpu, disk = found["tiers"]
    assert cpu["tokens"] == (4 * GIB - (256 << 20)) // (64 << 10)  # including staging
    assert 0.99 < disk["tokens"] / (64 * GIB // (64 << 10)) < 1.0  # including the index
    assert cpu["chunks"] == cpu["tokens"] // 16
    assert cpu["loads_tokens_per_s"] == pytest.approx(20e9 / 65536)
    assert disk["loads_tokens_per_s"] == pytest.approx(2e9 / 65536)
    assert (cpu["pays"], disk["pays"]) == (True, False)
    assert found["hit_ratio"] is None
    assert next(n for n in found["notes"] if "break_even leaves it out" in n).startswith("disk")
    assert not any("assumed" in note for note in found["notes"])


def test_a_cpu_tier_that_does_not_pay_is_never_left_out() -> None:
    """Only lower tiers have a break-even check. Values that are not numbers must not be numbers in
    JSON either."""
    found = plan("--token-bytes", "64KiB", "--cpu", "4GiB", "--prefill-tokens-per-s", "inf")
    [note] = [note for note in found["notes"] if "computing is faster" in note]
    assert "loads would slow requests down" in note
    assert found["prefill_tokens_per_s"] is None


def test_every_assumption_has_a_note() -> None:
    found = plan("--token-bytes", "64KiB", "--cpu", "4GiB", "--disk", "64GiB")
    assert [tier["pays"] for tier in found["tiers"]] == [None, None]
    notes = "\n".join(found["notes"])
    for words in ("18.6GiB/s to each GPU", "reads 1.86GiB/s (--disk-read)", "is not known: give"):
        assert words in notes
    options = ["--gpu-tflops", "800", "--parameters", "8e9"]
    found = plan("--token-bytes", "64KiB", "--cpu", "4GiB", *options)
    assert found["prefill_tokens_per_s"] == pytest.approx(0.4 * 800e12 / 16e9)
    assert any(note.startswith("estimated, not measured") for note in found["notes"])


def alternating(count: int, block_tokens: int = 16) -> Trace:
    """Two prompts of 10 blocks in turn, one request per second."""
    requests = [Request(float(n), 10 * block_tokens, ((100 * (n % 2), 10),)) for n in range(count)]
    return Trace("alternating", block_tokens, requests)


def write(trace: Trace, path: Path) -> Path:
    with TraceWriter(path, trace.name, trace.block_tokens) as writer:
        for request in trace.requests:
            writer.write(request)
    return path


def test_hits_and_writes_of_a_trace(tmp_path: Path) -> None:
    """With space for one prompt in memory and for both on disk, every hit after the first round
    comes from the disk; each block is written once."""
    trace = write(alternating(101), tmp_path / "trace.jsonl")
    # a sixteenth of the CPU tier is staging
    sizes = ["--token-bytes", "4KiB", "--cpu", "832KiB", "--disk", "16MiB"]
    options = ["--policy", "lru", "--trace", trace, "--write-budget", "1GiB"]
    found = plan(*sizes, *options, "--link", "1GB", "--disk-read", "20MB")
    cpu, disk = found["tiers"]
    assert (cpu["blocks"], found["prompt_tokens_per_s"]) == (12, 101 * 160 / 100)
    assert found["hit_ratio"] == found["hit_ratio_max"] == pytest.approx(99 / 101)
    assert cpu["hit_ratio"] + disk["hit_ratio"] == pytest.approx(99 / 101)
    assert disk["hit_ratio"] > 0.7
    assert found["disk_writes_per_day"] == pytest.approx(20 * 16 * 4096 / 100 * 86_400)
    assert found["write_budget"] == 1 << 30
    notes = "\n".join(found["notes"])
    assert "would exceed its budget" in notes
    assert "cover only 100 s" in notes
    reads = disk["reads_bytes_per_s"]
    assert reads == pytest.approx(disk["hit_ratio"] * 161.6 * 4096)
    assert "will be computed" not in notes
    slow = plan(*sizes, *options, "--disk-read", "300KB")
    assert any("disk: these hits need" in note for note in slow["notes"])


def test_a_plan_for_a_cpu_tier_alone(tmp_path: Path) -> None:
    trace = write(alternating(50), tmp_path / "trace.jsonl")
    found = plan("--token-bytes", "4KiB", "--cpu", "2MiB", "--trace", trace)
    [cpu] = found["tiers"]
    assert cpu["hit_ratio"] == found["hit_ratio"] == pytest.approx(48 / 50)
    assert found["disk_writes_per_day"] is None


def test_endurance_is_a_budget_per_day() -> None:
    found = plan("--token-bytes", "4KiB", "--cpu", "1GiB", "--disk", "10GiB", "--mix",
                 "users=3,turns=2,hours=1", "--endurance", "365TB", "--years", "2")  # fmt: skip
    assert found["write_budget"] == pytest.approx(0.5e12)
    assert 0 < found["hit_ratio"] <= found["hit_ratio_max"] < 1


@pytest.mark.parametrize(
    "mix", ["users=1,turns=1000000000", "prompt=99999999999", "turns=100,answer=9999999"]
)
def test_a_mix_that_fits_no_memory_is_refused(mix: str) -> None:
    result = kvtiers("plan", "--token-bytes", "1KiB", "--cpu", "1GiB", "--mix", mix)
    assert result.code == 2
    assert "Give fewer turns or tokens" in result.err


def test_a_mix_has_the_described_shape() -> None:
    mix = Mix.parse("users=50,turns=4,system=320,prompt=100,answer=60,gap=20,hours=2")
    trace = mix_trace(mix, 16)
    assert trace == mix_trace(mix, 16)
    assert len(trace.requests) == pytest.approx(mix.requests, rel=0.1)
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 7200
    lengths = {mix.tokens(turn) for turn in range(4)}
    assert {request.prompt_tokens for request in trace.requests} == lengths
    for request in trace.requests:
        assert request.block_count == request.prompt_tokens // 16
        assert request.runs[0] == (0, 20)
    # Prompts of one conversation extend each other; prompts of different conversations share only
    # the system prompt.
    by_session: dict[int, list[Request]] = {}
    for request in trace.requests:
        by_session.setdefault(request.session, []).append(request)
    own = [{b for r in found for b in r.blocks()[20:]} for found in by_session.values()]
    assert sum(map(len, own)) == len(set().union(*own))
    for found in by_session.values():
        for earlier, later in itertools.pairwise(found):
            if later.prompt_tokens > earlier.prompt_tokens:
                assert later.blocks()[: earlier.block_count] == earlier.blocks()


def test_the_parts_of_the_arithmetic_agree() -> None:
    model = ModelSize("m", 8192.0, 32, ranks=2)
    machine = Machine(1 << 30, 8 << 30, link_bytes_per_s=1e9, disk_bytes_per_s=5e9)
    trace = alternating(20)
    cpu, disk = capacity_blocks(model, machine, 16)
    simulated = Simulated(trace, bound(trace, None), bound(trace, None))
    simulated.result.extra = {"upper_ratio": 0.5, "lower_ratio": 0.4, "lower_writes": 20.0}
    found = estimate_capacity(model, machine, 16, simulated)
    assert [tier.blocks for tier in found.tiers] == [cpu, disk]
    # Two ranks have two links; data from the disk crosses them too.
    assert [tier.bytes_per_s for tier in found.tiers] == [2e9, 2e9]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_a_plan_for_a_model_of_vllm(llama: Path) -> None:
    options = ["--cpu", "1GiB", "--gpu-tflops", "10", "--mix", "users=3,turns=2,hours=1"]
    found = plan(llama, *options, "--block-size", "32", "--max-model-len", "2048")
    assert found["model"]["chunk_tokens"] == 32
    assert found["model"]["token_bytes"] == 4 * 8192 / 32
    assert 10**5 < found["model"]["parameters"] < 10**8
    assert found["tiers"][0]["tokens"] == GIB // 1024
    assert found["prefill_tokens_per_s"] > 0
    text = kvtiers("plan", llama, "--cpu", "1GiB", "--block-size", "32").out
    assert "1KiB per token on 1 rank; chunks of 32 tokens" in text
    assert len(text.splitlines()) < 24
    refused = kvtiers("plan", llama, "--cpu", "1GiB", "--no-such-flag-of-vllm", "3")
    assert refused.code == 2
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ([], ["2 problems", "--cpu: is required", "neither MODEL nor --token-bytes is given"]),
        (["m", "--token-bytes", "1KiB", "--cpu", "1GiB"], ["both MODEL and --token-bytes"]),
        (["--cpu", "8G", "--token-bytes", "x"], ["--cpu: has an ambiguous unit", "is not a size"]),
        (["--cpu", "0", "--token-bytes", "1KiB"], ["--cpu: must be positive"]),
        (
            ["--cpu", "0", "--token-bytes", "0KiB"],
            [
                "2 problems",
                '--cpu: must be positive (got "0"). Give a positive size',
                '--token-bytes: must be positive (got "0KiB"). Give a positive size',
            ],
        ),
        (
            ["--cpu", "1GiB", "--token-bytes", "-1"],
            ['plan: --token-bytes: is negative (got "-1"). Give a positive size'],
        ),
        (
            ["--cpu", "1GiB", "--token-bytes", "1KiB", "--mix", "user=3", "--policy", "lur"],
            ['--mix: has "user=3". Write name=number with users', "--policy: "],
        ),
        (["--cpu", "1GiB", "--token-bytes", "1KiB", "--mix", "users=0"], ["has no requests"]),
        (["--cpu", "1GiB", "--token-bytes", "1KiB", "--trace", "no"], ["--trace: cannot be read"]),
        (
            ["--cpu", "1GiB", "--token-bytes", "1KiB", "--dsk=1GiB"],
            ["--dsk=1GiB: is not an option"],
        ),
        (
            ["m", "--cpu", "1GiB", "--dsik", "1GiB"],
            ["--dsik: is not an option of kvtiers plan. Did you"],
        ),
    ],
)
def test_bad_input_is_reported(words: list[str], texts: list[str]) -> None:
    result = kvtiers("plan", *words)
    assert result.code == 2
    for text in texts:
        assert text in result.err


@pytest.mark.parametrize("requests", [[], ["--mix", "users=1"]])
def test_a_tier_that_is_too_small_is_reported(requests: list[str]) -> None:
    sizes = ["--token-bytes", "1MiB", *requests]
    result = kvtiers("plan", *sizes, "--cpu", "3MiB")
    assert (result.code, result.out) == (1, "")
    assert "--cpu 3MiB holds no block of 16 tokens (16MiB). Give more" in result.err
    result = kvtiers("plan", *sizes, "--cpu", "1GiB", "--disk", "16MiB")
    assert (result.code, result.out) == (1, "")
    assert "--disk 16MiB holds no block of 16 tokens (16MiB). Give more" in result.err


def test_a_model_that_does_not_exist_is_reported() -> None:
    result = kvtiers("plan", "/no/such/model", "--cpu", "1GiB")
    assert (result.code, result.out) == (3, "")
    assert "plan: MODEL /no/such/model: does not exist" in result.err


def test_bench_of_a_checkout_and_of_an_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offload.cli", "bench", "tiers", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, "disk tiers" in found.stdout) == (0, True)
    for package in ("offload", "tiers", "policies"):
        shutil.copytree(ROOT / package, tmp_path / package)
    found = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert found.returncode == 1
    assert "Run python -m bench in a checkout" in found.stderr
