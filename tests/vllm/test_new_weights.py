"""Weights are replaced while requests run. After the reset, the tiers keep only what an engine
computes that never had other weights, and later requests get that engine's answers.

vLLM's own ``reload_weights`` replaces them. The reference is an engine without kvtiers that was
started with the new weights: every record on disk, and every block that is restored from the CPU
tier, must have the bytes of its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.tiny_model import LlamaShape, make_llama
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.old_kv import OldKv
from tests.vllm import faults
from tests.vllm.engine import Engine
from tests.vllm.probes import check, connector, totals
from tests.vllm.protocol import Generation, Prompt
from tests.vllm.restored import HASH, config, loaded_tokens, prompts, settle
from tiers.lmdb.index import DATA_NAME
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import Checker, RecordHealth

OPTIONS: dict[str, Any] = HASH | {"dtype": "float32", "kv_cache_memory_bytes": 24 << 20}
TOLERANCE = 1e-3
"""On some processors the last bits depend on how many tokens are computed at a time; with KV of
other weights, half of the value is wrong."""
BESIDE = 5
"""The number of requests that begin and end after the reset, while one from before it runs."""

Blocks = dict[bytes, bytes]
"""The bytes of blocks by key."""


@dataclass
class Seen:
    """The traces of an update: the blocks on disk, the blocks that were restored from the CPU tier,
    and the prompts and answers of the requests after the reset."""

    asked: list[Prompt] = field(default_factory=list)
    answers: list[Generation] = field(default_factory=list)
    stored: Blocks = field(default_factory=dict)
    restored: Blocks = field(default_factory=dict)

    def wrong_blocks(self, reference: Reference) -> int:
        """The number of blocks that are not what the new weights compute."""
        found = [*self.stored.items(), *self.restored.items()]
        return sum(not is_near(content, reference.blocks[key]) for key, content in found)

    def wrong_answers(self, reference: Reference) -> int:
        """The number of answers that begin with other probabilities than the reference's."""
        expected = [reference.answers[tuple(each)] for each in self.asked]
        return sum(map(differ, self.answers, expected))


@dataclass
class Reference:
    """An engine that never had other weights: its KV, and its answers by prompt."""

    blocks: Blocks = field(default_factory=dict)
    answers: dict[tuple[int, ...], Generation] = field(default_factory=dict)

    @classmethod
    def record(cls, model: Path, log: Path, asked: list[Prompt]) -> Reference:
        found = cls()
        with Engine(model, log=log, **OPTIONS) as engine:
            for prompt in asked:
                found.answers[tuple(prompt)] = engine.generate_one(prompt, max_tokens=1)
                found.blocks |= kv_blocks(engine)
        return found


def kv_blocks(engine: Engine) -> Blocks:
    return {key: content for key, (content,) in engine.kv_snapshot().items()}


def is_near(found: bytes, expected: bytes) -> bool:
    """True if every layer of a block is equal but for rounding."""
    layers = LlamaShape().layers
    a, b = (np.frombuffer(each, np.float32).reshape(layers, -1) for each in (found, expected))
    distance = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return bool(distance.max() < TOLERANCE)


def differ(found: Generation, expected: Generation) -> bool:
    """True if the first token has other probabilities, but for rounding."""
    a, b = dict(found.logprobs[0]), dict(expected.logprobs[0])
    return max(abs(a[token] - b.get(token, 0.0)) for token in a) > TOLERANCE


def on_disk(folder: Path) -> Blocks:
    """Every record of the current epoch, read while the engine owns the folder."""
    found = {}
    [index] = folder.rglob(DATA_NAME)
    reader = LmdbReader(index.parent, is_owned=True)
    checker = Checker(reader)
    for record in (record for batch in reader.batches() for record in batch):
        health, payload = checker.check(record)
        assert health is RecordHealth.GOOD
        found[record.key] = bytes(payload)
    reader.close()
    return found


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def old_kv(llm: Any) -> Any:
    return connector(llm).serving.side.old_kv


def replace_weights(llm: Any, model: Path) -> None:
    """Load the weights of this folder in place, as after a step of training."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def holders(llm: Any) -> int:
    """The number of requests that count as holders of old KV."""
    return len(old_kv(llm)._holders)


def request(llm: Any, name: str) -> Any:
    """vLLM's state of a request, or ``None`` if it has ended. vLLM adds to the name."""
    return next((r for n, r in scheduler(llm).requests.items() if n.startswith(f"{name}-")), None)


def tokens_so_far(llm: Any, name: str) -> Prompt:
    return list(request(llm, name).all_token_ids)


def has_ended(llm: Any, name: str) -> bool:
    return request(llm, name) is None


def decodes(llm: Any, name: str) -> bool:
    return bool(request(llm, name).num_output_tokens >= 3)


def is_in_its_prompt(llm: Any, name: str) -> bool:
    found = request(llm, name)
    return bool(0 < found.num_computed_tokens < found.num_prompt_tokens)


def loads(llm: Any, name: str) -> bool:
    """It waits for its load."""
    return bool(request(llm, name).status.name == "WAITING_FOR_REMOTE_KVS")


def has_loaded(llm: Any, name: str) -> bool:
    """Its load has ended, and it begins in the next step."""
    return request(llm, name).request_id in scheduler(llm).finished_recving_kv_req_ids


def empty_cpu_tier(llm: Any) -> None:
    connector(llm).serving.side.planner.cpu.clear()


def keep_cache(llm: Any) -> None:
    """A planted fault: vLLM's own cache is not emptied."""
    old_kv(llm)._gpu_cache = GpuCache()


def keep_cache_at_resets(llm: Any) -> None:
    """A planted fault: vLLM's own cache is emptied in steps only."""
    found = old_kv(llm)

    def reset() -> None:
        emptying, found._gpu_cache = found._gpu_cache, GpuCache()
        OldKv.reset(found)
        found._gpu_cache = emptying

    found.reset = reset


def keep_cache_in_steps(llm: Any) -> None:
    """A planted fault: steps neither empty vLLM's own cache nor find what has hit it."""
    old_kv(llm).step = lambda: None


def trust_holders(llm: Any) -> None:
    """A planted fault: what requests compute from old KV is stored."""
    old_kv(llm)._hold = lambda *_: None


def heal(llm: Any) -> None:
    side, manager = connector(llm).serving.side, scheduler(llm).kv_cache_manager
    side.old_kv = OldKv(side.layout, side.requests, GpuCache().with_pool(manager.block_pool))


@dataclass
class Updates:
    """Replaces an engine's weights again and again."""

    engine: Engine
    old: Path
    new: Path
    folder: Path
    count: int = 0

    def run(
        self, condition: Callable[..., bool], fault: Callable[[Any], None] | None = None
    ) -> Seen:
        """Replace the weights and reset the caches when a request has reached this condition. Ask
        for the same prefixes while it runs and after it has ended, then restore everything."""
        engine, seen = self.engine, Seen()
        self.count += 1
        name = f"old{self.count}"
        prompt, other = prompts(2, seed=self.count)
        engine.call(replace_weights, self.old)
        engine.reset_prefix_cache(connector=True)
        if condition is not is_in_its_prompt:
            for each in (prompt, other):
                engine.generate_one(each, max_tokens=1)
            settle(engine)
        if condition in (loads, has_loaded):
            engine.reset_prefix_cache()
        if condition is loads:
            engine.call(empty_cpu_tier)
            engine.call(faults.on_workers, faults.hold_reads)
        engine.submit(name, prompt, max_tokens=300)
        engine.step_until(condition, name)
        engine.call(replace_weights, self.new)
        if fault is not None:
            engine.call(fault)
        assert not engine.try_to_reset(connector=True), "vLLM itself has emptied its cache"
        if condition is loads:
            assert engine.call(totals)["load_failures"] == 0
            engine.call(faults.on_workers, faults.release_reads)
        self._ask(seen, name, prompt, other)
        self._restore(seen)
        return seen

    def _ask(self, seen: Seen, old: str, prompt: Prompt, other: Prompt) -> None:
        engine = self.engine

        def ask(asked: Prompt) -> None:
            name = f"new{self.count}.{len(seen.asked)}"
            seen.asked.append(asked)
            engine.submit(name, asked, max_tokens=4)
            engine.step_until(has_ended, name)

        for each in (prompt, other):
            ask(each)
        while len(seen.asked) < BESIDE:
            ask(engine.call(tokens_so_far, old))
        assert not engine.call(has_ended, old)
        answer = engine.run_until_finished()[old].tokens
        for each in (prompt, [*prompt, *answer, *other[:40]], other):
            ask(each)
        found = engine.run_until_finished()
        seen.answers = [found[f"new{self.count}.{n}"] for n in range(len(seen.asked))]
        settle(engine)

    def _restore(self, seen: Seen) -> None:
        seen.stored = on_disk(self.folder)
        self.engine.reset_prefix_cache()
        before = loaded_tokens(self.engine, "cpu")
        for each in seen.asked:
            self.engine.generate_one(each, max_tokens=1)
        assert loaded_tokens(self.engine, "cpu") > before
        seen.restored = kv_blocks(self.engine)
        self.engine.call(check)


@pytest.mark.thorough
def test_the_tiers_keep_no_kv_of_weights_that_a_request_began_with(
    llama: Path, tmp_path: Path
) -> None:
    new = make_llama(tmp_path / "new", seed=1)
    offload = config(tmp_path / "kv")
    with Engine(llama, log=tmp_path / "log", connector=offload, **OPTIONS) as engine:
        updates = Updates(engine, llama, new, tmp_path / "kv")
        right = {each: updates.run(each) for each in (decodes, is_in_its_prompt, loads, has_loaded)}
        assert engine.call(holders) == 0
        found = engine.verified()
        assert found.different == found.unknown == 0
        # Old KV that was hit has no digest of this epoch.
        engine.may_be_unknown = True
        faulty = {}
        for fault in (keep_cache, keep_cache_at_resets, keep_cache_in_steps, trust_holders):
            condition = is_in_its_prompt if fault is trust_holders else decodes
            faulty[fault] = updates.run(condition, fault)
            engine.call(heal)
    asked = [prompt for seen in (*right.values(), *faulty.values()) for prompt in seen.asked]
    reference = Reference.record(new, tmp_path / "reference.log", asked)
    for condition, seen in right.items():
        assert seen.wrong_blocks(reference) == 0, condition
        if condition is not has_loaded:  # a request of the step in which it begins may hit old KV
            assert seen.wrong_answers(reference) == 0, condition
    wrong = {fault: seen.wrong_blocks(reference) for fault, seen in faulty.items()}
    assert wrong.pop(keep_cache_at_resets) == 0
    assert min(wrong.values()) > 0, wrong
    assert faulty[keep_cache].wrong_answers(reference) > 0
    assert faulty[keep_cache_at_resets].wrong_answers(reference) > 0
