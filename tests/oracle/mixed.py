"""Worlds whose requests use more of vLLM than plain text, under more of its limits.

Each feature has its own class. ``mixed`` draws the features of a world from its seed; a world
without features is the same as one of ``OracleEngine``.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from policies.registry import policy_names
from tests.oracle.adapters import ADAPTERS, Adapters
from tests.oracle.conditions import SLOT_BYTES, Conditions
from tests.oracle.controls import Controls
from tests.oracle.features import Feature
from tests.oracle.grammars import Grammars
from tests.oracle.images import Images
from tests.oracle.memory import Prefix
from tests.oracle.models import MODELS, OracleModel
from tests.oracle.pauses import Pauses
from tests.oracle.priorities import Priorities
from tests.oracle.serving import OracleEngine, Step

SEQS = (2, 4, 8)
LONG_PREFILL = (0, 0, 5, 12, 20)
WAIT = {"look_ahead": 0.5, "wait_for_reads": "always", "max_load_gpu_share": 1.0}
"""Requests wait for their reads ahead, and loads may take all of the GPU's cache."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "look_ahead": (0, 0.1, 0.5),
    "wait_for_reads": ("auto", "always"),
    "break_even": (False,),
    "max_load_gpu_share": (0.1, 0.3, 1.0),
    "max_inflight_load": (4 * SLOT_BYTES, 12 * SLOT_BYTES),
    "max_inflight_store": (3 * SLOT_BYTES, 12 * SLOT_BYTES),
    "staging": (2 * SLOT_BYTES, 6 * SLOT_BYTES),
    "max_pinned_share": (0, 0.5, 1.0),
}
"""Values that each option has in some worlds; in the others it has its default."""
ADMISSIONS = ("all", "all", "second-use", "frequency")
FILES_BYTES = 64 << 10
"""The capacity that a small tier needs beside its chunks."""


FEATURES: dict[str, type[Feature]] = {
    "priorities": Priorities,
    "adapters": Adapters,
    "images": Images,
    "grammars": Grammars,
    "pauses": Pauses,
    "controls": Controls,
}


def mixed(conditions: Conditions, name: str, seed: int) -> Conditions:
    """Draw more conditions for the world of this model and seed."""
    rng = random.Random(f"mixed {name} {seed}")
    features = tuple(each for each in FEATURES if rng.random() < 0.4)
    seqs, batched_tokens = rng.choice(SEQS), conditions.batched_tokens
    if "adapters" in features:  # vLLM insists on room for the drafts of all requests
        batched_tokens = max(batched_tokens, seqs * (MODELS[name].drafts + 1))
    return dataclasses.replace(
        conditions,
        scheduling="priority" if "priorities" in features else "fcfs",
        seqs=seqs,
        batched_tokens=batched_tokens,
        cpu={"policy": rng.choice(policy_names()), "admission": rng.choice(ADMISSIONS)},
        tiers=_tiers(rng, conditions.slots),
        options=rng.choice([{}, WAIT]) | _options(rng),
        long_prefill=rng.choice(LONG_PREFILL),
        loras=_loras(rng, features),
        features=features,
    )


def _options(rng: random.Random) -> Mapping[str, Any]:
    return {name: rng.choice(OPTIONS[name]) for name in OPTIONS if rng.random() < 0.2}


def _tiers(rng: random.Random, slots: int) -> tuple[Mapping[str, Any], ...]:
    """Draw one or two lower tiers: smaller than the CPU tier, larger, or with room for all
    chunks."""
    sizes = (slots // 2 * SLOT_BYTES + FILES_BYTES, 2 * slots * SLOT_BYTES + FILES_BYTES, "1MiB")
    return tuple(
        {"capacity": rng.choice(sizes), "policy": rng.choice(policy_names())}
        for _ in range(rng.choice([1, 1, 2]))
    )


def _loras(rng: random.Random, features: Sequence[str]) -> int:
    """The number of adapters that one step may use. vLLM does not count those of requests that wait
    for the encoder's cache in the middle of a prompt, and then ends with a failed assertion."""
    if "adapters" not in features:
        return 0
    drawn = rng.choice([1, 2])
    return ADAPTERS if "images" in features else drawn


class MixedEngine(OracleEngine):
    """A world with features. ``seen`` counts what they have done."""

    def __init__(self, model: OracleModel, conditions: Conditions, folder: Path, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self.folder = folder
        self._features: list[Feature] = []
        super().__init__(model, conditions, folder, seed)

    def _start(self) -> None:
        super()._start()
        self.lora_config = self._config.lora_config
        self._features = [FEATURES[each](self) for each in self._conditions.features]

    # -- actions of clients -----------------------------------------------------------------------

    def send(self, name: str, prompt: list[int]) -> Request:
        for feature in self._features:
            prompt = feature.prompt(name, prompt)
        request = super().send(name, prompt)
        for feature in self._features:
            self._prompts[-1] = feature.sent(request) or self._prompts[-1]
        return request

    def make_request(
        self, name: str, prompt: list[int], answer_tokens: int, **options: Any
    ) -> Request:
        for feature in self._features:
            options |= feature.sampling(name)
        request = super().make_request(name, prompt, answer_tokens, **options)
        for feature in self._features:
            feature.made(request)
        return request

    def _features_of(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for feature in self._features:
            found |= feature.arguments(name)
        return found

    # -- actions of operators ---------------------------------------------------------------------

    def act(self) -> None:
        for feature in self._features:
            feature.act()

    def resume(self) -> None:
        for feature in self._features:
            feature.resume()

    def forget_locally(self) -> bool:
        is_empty = super().forget_locally()
        if is_empty:
            for feature in self._features:
                feature.emptied()
        return is_empty

    def change_weights(self) -> None:
        before = self.weights
        super().change_weights()
        if self.weights != before:
            for feature in self._features:
                feature.weights_changed()

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        for feature in self._features:
            feature.before_step()
        if not any(feature.skips_step() for feature in self._features):
            super().step()

    def drain(self, most: int = 1000) -> None:
        self.resume()
        super().drain(most)

    def _submit(self, scheduled: SchedulerOutput) -> Step:
        for feature in self._features:
            feature.submitted(scheduled)
        step = super()._submit(scheduled)
        for name, count in scheduled.num_scheduled_tokens.items():
            start = self._forward.first_computed(name)
            for feature in self._features:
                feature.computes(name, start, start + count)
        return step

    def _begin_run(self, name: str, tokens: Sequence[int]) -> tuple[list[int], Prefix]:
        parts = [feature.prefix(name) for feature in self._features]
        for feature in self._features:
            tokens = feature.content(name, tokens)
        prefix = "/".join([str(self.weights), str(self._salts[name]), *filter(None, parts)])
        return list(tokens), Prefix(prefix)

    def _update_tables(self, scheduled: SchedulerOutput) -> None:
        super()._update_tables(scheduled)
        for new in scheduled.scheduled_new_reqs:
            for feature in self._features:
                feature.started(new.req_id, self._runs[new.req_id])

    def _draft(self, scheduled: SchedulerOutput) -> None:
        for feature in self._features:
            feature.before_sampling(scheduled)
        super()._draft(scheduled)
