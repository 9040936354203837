"""Many long prompts wait over a CPU tier smaller than two of them (vllm#49902), with the default
limits on loads and the default share of look-ahead, under vLLM's real scheduler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from offload.layout.keys import CPU
from offload.planner.load_or_recompute import SAMPLES_MIN, LoadOrRecompute
from offload.requests.request_log import LoggedRequest
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions
from tests.oracle.test_look_ahead import TOKENS, Backlog, PacedTier, prompts_of, side
from tiers.base import Tier
from tiers.testing.memory_tier import MemoryTier

PROMPTS = 50
SLOTS = 55
STEP_TOKENS = 32


class LargePacedTier(PacedTier):
    """Holds all prompts."""

    def __init__(self, **options: Any) -> None:
        MemoryTier.__init__(self, 1 << 25, **options)
        self.granted = 0.0
        self.order: list[bytes] = []


class LongBacklog(Backlog):
    """``first`` has the step of each request's first token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[str, int] = {}

    def _make_tier(self, spec: Any) -> Tier:
        self.disk = LargePacedTier(namespace=spec.namespace, rank=spec.rank, epoch=spec.epoch)
        return self.disk

    def step(self) -> None:
        waiting = dict(self.scheduler.requests)
        super().step()
        for name, request in waiting.items():
            if request.num_output_tokens:
                self.first.setdefault(name, self.steps)

    def serve_all(self) -> None:
        """Answer all requests; what was read ahead must stay until its request has loaded it."""
        while self.scheduler.requests:
            self.step()
            assert not any(map(self.planner.cpu.is_absent, self.planner.look_ahead._held))
        self.drain()


def world(folder: Path, look_ahead: float) -> LongBacklog:
    conditions = Conditions(
        slots=SLOTS,
        batched_tokens=STEP_TOKENS,
        late=20,
        options={"look_ahead": look_ahead},
    )
    return LongBacklog(dataclasses.replace(MODELS["full"], blocks=75), conditions, folder, 0)


def measure(served: LongBacklog, reads_per_step: int) -> None:
    """Let break-even know both speeds, as on a server whose prompts are long."""
    for _ in range(SAMPLES_MIN):
        served.planner.health[0].loaded(1000, 1000 / (4 * reads_per_step), 0.0)
        served.planner.health.computed(1000, 1000 / STEP_TOKENS)


class Records(dict[str, dict[str, Any]]):
    """A sink of the request log: the entries by request, as they are when they are passed on."""

    dropped = 0

    def __call__(self, logged: LoggedRequest) -> None:
        self[logged.request] = logged.as_json()

    def close(self) -> None:
        """Nothing is open."""


thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("reads_per_step", "measured", "later"),
    [
        (12, True, 0.0),
        (2, True, 0.0),
        pytest.param(4, True, 0.005, marks=thorough),
        pytest.param(8, True, 0.0, marks=thorough),
        pytest.param(12, False, 0.0, marks=thorough),
        pytest.param(4, False, 0.0, marks=thorough),
        pytest.param(2, False, 0.02, marks=thorough, id="slower than the GPU, speeds unknown"),
    ],
)
def test_more_waits_than_the_cpu_tier_holds(
    reads_per_step: int,
    measured: bool,
    later: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that was read is given up or read twice, and the last request is answered as soon as
    without look-ahead, or ``later`` by this share (decision 0091 says why)."""
    monkeypatch.setattr(LoadOrRecompute, "tokens_min", 0.0)  # short loads: not measured in steps
    ended = {}
    for share in (0.0, 0.25):
        with world(tmp_path / str(share), share) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step)
            if measured:
                measure(served, reads_per_step)
            served.serve_all()
            loaded = served.loaded()
            assert len(served.disk.order) * 4 == loaded["file"] + loaded["cpu"]
            counts = served.counts()
            assert counts["wasted"] == 0
            assert (counts["used"] > 0) == (share > 0)
            again = [served.first[f"again{number}"] for number in range(PROMPTS)]
            ended[share] = served.steps, max(again)
            assert served.planner.stats.load_refusals <= PROMPTS, "once per request"
            served.check_idle()
    longer = [ahead / none - 1 for ahead, none in zip(ended[0.25], ended[0.0], strict=True)]
    assert max(longer) <= later, ended


@pytest.mark.parametrize("tokens", [TOKENS, 41])
def test_new_prompts_between_them_evict_nothing_that_was_read(tokens: int, tmp_path: Path) -> None:
    """Every other prompt is new: it is stored while chunks that were read for others wait. Short
    prompts are read for more requests than those whose chunks are wanted soon."""
    with world(tmp_path, 0.5) as served:
        known, new = prompts_of(12, tokens), prompts_of(12, TOKENS, seed=1)
        served.store(known)
        served.reads_per_step = 12
        served.answer_tokens = served.answer_tokens_again
        for number in range(12):
            served.ask(f"again{number}", known[number])
            served.ask(f"new{number}", new[number])
        measure(served, 12)
        served.serve_all()
        counts = served.counts()
        assert (counts["wasted"], counts["used"] > 0) == (0, True)
        assert served.planner.stats.tier(CPU).evicted_chunks > 0
        served.check_idle()


@pytest.mark.parametrize("measured", [True, False])
def test_a_request_whose_load_is_refused_waits_for_the_other_if_computing_takes_longer(
    measured: bool, tmp_path: Path
) -> None:
    """The limit allows only one of two loads, and nothing is read ahead. As long as the speeds are
    not known, the second request is computed."""
    with world(tmp_path, 0.0) as served:
        served.begin(prompts_of(2, TOKENS), reads_per_step=40)
        if measured:
            measure(served, 40)
        served.drain()
        assert served.planner.stats.load_refusals == 1
        assert served.loaded()["file"] == (2 if measured else 1) * (TOKENS // 4 * 4)
        served.check_idle()


def test_a_request_whose_load_is_refused_waits_no_longer_than_for_a_load(tmp_path: Path) -> None:
    """The disk hangs. Chunks are being read for the next request, but it is computed in the end,
    and its entry in the log says that they are wasted."""
    with world(tmp_path, 0.25) as served:
        records = Records()
        side(served).log._sinks = (records,)
        served.planner.health.load_timeout_s = 0.02  # of simulated time
        served.begin(prompts_of(6, TOKENS), reads_per_step=0)
        requests, live = served.scheduler.requests, side(served).requests.by_name
        waits = None
        while waits is None:
            served.step()
            assert served.steps < 100
            refused = (name for name, one in live.items() if one.state.lookup.refused)
            waits = next(filter(served.planner.look_ahead.has_read, refused), None)
        request = requests[waits]
        while not request.num_output_tokens:
            served.step()
            assert served.steps < 200
        assert served.planner.stats.load_refusals < 6, "once per request"
        assert (records[waits]["reason"], records[waits]["loaded_tokens"]) == ("budget", {})
        assert records[waits]["ahead_wasted_tokens"] == 4 * served.counts()["wasted"] > 0
        served.reads_per_step = 12
        served.drain()
        served.check_idle()


def test_prompts_of_default_limits_are_read_once(tmp_path: Path) -> None:
    """The loads of two prompts may be in flight at a time; the others wait for them."""
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(6, TOKENS), reads_per_step=1e9)
        served.drain()
        assert served.counts()["wasted"] == 0
        loaded = served.loaded()
        assert len(served.disk.order) * 4 == loaded["file"] + loaded["cpu"]
        served.check_idle()
