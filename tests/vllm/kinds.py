"""Shows that one kind of model is stored and restored exactly (see ``test_kinds``).

The right answer to a prompt with a restored prefix is vLLM's own answer when its own prefix cache
hits at the same length: then the same tokens are computed in the same pieces, and everything must
be equal to the last bit. (The way in which a prompt is split may change the last bits, even without
offloading.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.models.families import FAMILIES
from tests.vllm import copy_faults, verified
from tests.vllm.engine import Engine
from tests.vllm.faults import on_workers
from tests.vllm.probes import connector, totals
from tests.vllm.protocol import Generation, Prompt
from tests.vllm.restored import HASH, config, prompts, settle

Blocks = dict[bytes, tuple[bytes, ...]]

NEW_TURN = 20
"""Number of tokens that a second turn adds to the first turn and its answer."""


@dataclass(frozen=True)
class Kind:
    """A family of ``tests.models.families`` and how to run it.

    ``goes_on``: the first prompt is the second turn of a conversation, and its hit ends within the
    answer to the first turn, so that blocks and states made while decoding are restored.
    ``prompt_tokens`` replaces the family's prompt length.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    chunk_blocks: int = 1
    goes_on: bool = False
    prompt_tokens: int = 0

    def make(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """The model's folder and the engine's keyword arguments."""
        family = FAMILIES[self.family]
        model = family.make(folder)
        env = {"env": {"KVTEST_KEEP_PREFIX_CACHING": "1"}}
        return model, HASH | env | family.kwargs(model) | self.changes

    def prompts(self) -> list[Prompt]:
        """Two prompts that share their first half."""
        return prompts(2, self.prompt_tokens or FAMILIES[self.family].prompt_tokens)


@dataclass(frozen=True)
class Expected:
    """The results of vLLM alone: answers without a cache and from its own cache, and its KV bytes.

    ``first_turn`` is answered before the first pass over ``prompts``.
    """

    first_turn: list[Prompt]
    prompts: list[Prompt]
    cold: list[Generation]
    warm: list[Generation]
    blocks: Blocks
    groups: int

    @classmethod
    def record(cls, kind: Kind, folder: Path, log: Path) -> Expected:
        """Send everything to an engine without a connector, and then everything again."""
        model, options = kind.make(folder)
        asked, first_turn = kind.prompts(), []
        with Engine(model, log=log, **options) as plain:
            if kind.goes_on:
                first_turn = asked[:1]
                asked[0] = asked[0] + [*ask(plain, first_turn)[0].tokens, *asked[1][-NEW_TURN:]]
            cold = ask(plain, asked)
            blocks = plain.kv_snapshot()
            warm = ask(plain, asked)
            groups = len(plain.geometry["groups"])
        assert all(answer.cached_tokens > 0 for answer in warm), "vLLM's own cache does not hit"
        assert not first_turn or warm[0].cached_tokens > len(first_turn[0]), "no decoded hit"
        return cls(first_turn, asked, cold, warm, blocks, groups)

    def that_were_cut_alike(self, answers: list[Generation]) -> Expected:
        """Leave out the second prompt if its shared half was found completely in the tiers but not
        in vLLM's own cache: the rest was then computed in other pieces."""
        alike = answers[1].cached_tokens == self.cold[1].cached_tokens
        assert alike or answers[1].cached_tokens > self.cold[1].cached_tokens
        return self if alike else replace(self, cold=self.cold[:1], warm=self.warm[:1])


def ask(engine: Engine, asked: list[Prompt]) -> list[Generation]:
    """Send one prompt after the other."""
    return [engine.generate_one(prompt) for prompt in asked]


def show_stored_and_restored(kind: Kind, expected: Expected, folder: Path, tmp: Path) -> None:
    """Store, restore from the CPU tier, and after a restart from disk; then detect planted
    faults."""
    model, options = kind.make(folder)
    # These models have no weight files, so the engine's id identifies them across the restart.
    transfer = config(tmp / "kv", chunk_blocks=kind.chunk_blocks) | {"engine_id": "kinds"}
    options = options | {"connector": transfer}
    with Engine(model, log=tmp / "first.log", **options) as engine:
        engine.call(record_loads)
        ask(engine, expected.first_turn)
        answers = ask(engine, expected.prompts)
        stored = engine.kv_snapshot()
        expected = expected.that_were_cut_alike(answers)
        compare_outputs(answers, expected.cold)
        if len(expected.cold) == len(answers):
            assert stored == expected.blocks, "computed blocks differ from those of plain vLLM"
        settle(engine)
        restore_and_compare(engine, expected, stored, "cpu")
        engine.call(on_workers, verified.stop)
        planted_faults_are_seen(engine, expected, stored)
    with Engine(model, log=tmp / "second.log", **options) as engine:
        engine.call(record_loads)
        restore_and_compare(engine, expected, stored, "lmdb")
        planted_faults_fail_loads(engine, expected)


def show_verified(kind: Kind, tmp: Path) -> None:
    """On one engine: restore from the CPU tier, and from disk once the CPU tier has been emptied.
    Every group must take part, hits must be as long as in vLLM's own cache, answers and bytes must
    equal those from its cache, and planted faults must be detected."""
    model, options = kind.make(tmp / "model")
    transfer = config(tmp / "kv", chunk_blocks=kind.chunk_blocks) | {"engine_id": "kinds"}
    with Engine(model, log=tmp / "log", connector=transfer, **options) as engine:
        engine.call(record_loads)
        asked = kind.prompts()
        if kind.goes_on:
            answer = engine.generate_one(asked[0])
            asked[0] = asked[0] + [*answer.tokens, *asked[1][-NEW_TURN:]]
        ask(engine, asked)
        blocks = engine.kv_snapshot()
        own = Own(asked, ask(engine, asked), engine.kv_snapshot() | blocks)
        assert not kind.goes_on or own.warm[0].cached_tokens > len(kind.prompts()[0]), (
            "no decoded hit"
        )
        settle(engine)
        restored(engine, own, "cpu")
        engine.call(empty_cpu_tier)
        restored(engine, own, "lmdb")
        groups = range(len(engine.geometry["groups"]))
        for group in groups:
            wrong_loads_are_seen(engine, asked[0], copy_faults.wrong_bit, group)
        wrong_loads_are_seen(engine, asked[0], copy_faults.swapped_chunks, None)
        for group in groups:
            overwritten_stores_are_seen(engine, kind, group)


@dataclass(frozen=True)
class Own:
    """An engine's answers if everything is in vLLM's own cache, and the bytes there."""

    prompts: list[Prompt]
    warm: list[Generation]
    blocks: Blocks


def wrong_loads_are_seen(
    engine: Engine, prompt: Prompt, fault: Callable[..., Any], group: int | None
) -> None:
    """Plant a fault in the loads of a group; the comparison must find it, and the engine must
    recompute."""
    engine.call(on_workers, copy_faults.plant, fault, group)
    fails_and_is_recomputed(engine, prompt, group, f"{fault.__name__} in group {group}")
    engine.call(on_workers, copy_faults.heal)
    settle(engine)
    loads_without_differences(engine, prompt)


def overwritten_stores_are_seen(engine: Engine, kind: Kind, group: int) -> None:
    """Store a new prompt, and overwrite its blocks of this group meanwhile."""
    [asked] = prompts(1, len(kind.prompts()[0]), seed=100 + group)
    engine.call(on_workers, copy_faults.overwrite_stores, group)
    engine.generate_one(asked, max_tokens=1)
    settle(engine)
    engine.call(on_workers, copy_faults.heal_stores)
    fails_and_is_recomputed(engine, asked, group, f"overwritten blocks of group {group}")
    settle(engine)
    loads_without_differences(engine, asked)


def fails_and_is_recomputed(engine: Engine, prompt: Prompt, group: int | None, what: str) -> None:
    """Load a prompt with a planted fault. The load must fail, and the log must name the group."""
    failed, before = engine.call(totals)["load_failures"], engine.verified().different
    logged = differences_logged(engine, group)
    engine.call(on_workers, verified.log_again)
    engine.reset_prefix_cache()
    engine.generate_one(prompt, max_tokens=1)
    settle(engine)
    found = engine.verified().different - before
    assert found, f"{what} was not detected"
    assert engine.call(totals)["load_failures"] > failed, f"{what}: no load failed"
    assert differences_logged(engine, group) > logged, f"{what}: the log names no such chunk"
    engine.planted_differences += found


def differences_logged(engine: Engine, group: int | None) -> int:
    """The number of chunks of this group (None: of any) that differ according to the log."""
    of_group = r"\d+" if group is None else str(group)
    return len(re.findall(f"of group {of_group} is not what was computed", engine.whole_log()))


def loads_without_differences(engine: Engine, prompt: Prompt) -> None:
    """Load a prompt while no fault is planted."""
    failed, before = engine.call(totals)["load_failures"], engine.verified()
    engine.reset_prefix_cache()
    engine.generate_one(prompt, max_tokens=1)
    settle(engine)
    found = engine.verified()
    assert found.equal > before.equal, "nothing was loaded and compared"
    assert found.different == before.different, "a chunk differs without a fault"
    assert engine.call(totals)["load_failures"] == failed


def restored(engine: Engine, own: Own, tier: str) -> None:
    """Empty vLLM's own cache and send everything again: the first answer, all hits and the bytes
    must equal those from vLLM's own cache."""
    engine.call(take_loads)
    before, checked = engine.call(totals)[f"loaded_tokens:{tier}"], engine.verified()
    engine.reset_prefix_cache()
    first = engine.generate_one(own.prompts[0])
    loads = engine.call(take_loads)
    answers = [first, *ask(engine, own.prompts[1:])]
    settle(engine)
    assert first.cached_tokens == loads.promised > 0
    hits = [answer.cached_tokens for answer in answers]
    assert hits == [answer.cached_tokens for answer in own.warm]
    # The second prompt shares half of the first; either may have computed a block of that half.
    compare_outputs(answers[:1], own.warm[:1])
    compare_bytes(engine.kv_snapshot(), own.blocks, loads.keys, len(engine.geometry["groups"]))
    assert engine.call(totals)[f"loaded_tokens:{tier}"] > before
    found = engine.verified()
    assert found.equal > checked.equal
    assert (found.different, found.unknown) == (0, 0)


def empty_cpu_tier(llm: Any) -> None:
    """Evict every chunk from the CPU tier; all of them must be on disk."""
    cpu = connector(llm).serving.side.planner.cpu
    assert cpu.evict(cpu.space.used)
    assert not len(cpu)


def restore_and_compare(engine: Engine, expected: Expected, stored: Blocks, tier: str) -> None:
    """Send everything again with vLLM's own cache emptied: ``tier`` must provide what was promised,
    as much as vLLM's own cache would have, and nothing may differ."""
    engine.call(take_loads)
    before = engine.call(totals)
    engine.reset_prefix_cache()
    first = engine.generate_one(expected.prompts[0])
    loads = engine.call(take_loads)
    after = engine.call(totals)
    assert first.cached_tokens == loads.promised > 0
    assert loads.lost == 0
    assert after["load_failures"] == before["load_failures"] == 0
    assert after[f"loaded_tokens:{tier}"] > before[f"loaded_tokens:{tier}"]
    answers = [first, *ask(engine, expected.prompts[1:])]
    keys = loads.keys | engine.call(take_loads).keys
    found = [answer.cached_tokens for answer in answers[: len(expected.warm)]]
    assert found == [answer.cached_tokens for answer in expected.warm], found
    compare_outputs(answers, expected.warm)
    compare_bytes(engine.kv_snapshot(), stored, keys, expected.groups)
    settle(engine)


def compare_outputs(answers: list[Generation], wanted: list[Generation]) -> None:
    """Raises ``AssertionError`` unless tokens and log-probabilities are equal."""
    for number, (answer, right) in enumerate(zip(answers, wanted, strict=False)):
        assert answer.tokens == right.tokens, f"prompt {number}: other tokens"
        assert answer.logprobs == right.logprobs, f"prompt {number}: other log-probabilities"


def compare_bytes(blocks: Blocks, stored: Blocks, restored: set[bytes], groups: int) -> None:
    """Raises ``AssertionError`` unless every restored block has the bytes that were stored, and
    blocks of every group were restored."""
    wrong = wrong_blocks(blocks, stored, restored)
    assert not wrong, f"{len(wrong)} of {len(restored)} blocks have other bytes: {wrong[:4]}"
    seen = {group_of(key) for key in restored}
    assert seen == set(range(groups)), f"blocks of groups {seen} alone were restored"


def wrong_blocks(blocks: Blocks, stored: Blocks, restored: set[bytes]) -> list[bytes]:
    """The restored blocks whose bytes are not those that were stored."""
    return sorted(key for key in restored if blocks[key] != stored[key])


def group_of(key: bytes) -> int:
    """The KV cache group in a key of vLLM's prefix cache."""
    return int.from_bytes(key[-4:], "big")


def planted_faults_fail_loads(engine: Engine, expected: Expected) -> None:
    """A wrong load must be found before the request continues, and reported by group.

    The prompt is then recomputed, perhaps in other pieces, so its bytes may differ from now on.
    """
    engine.may_differ = True
    plans = [(copy_faults.wrong_bit, group) for group in range(expected.groups)]
    for fault, group in [*plans, (copy_faults.swapped_chunks, None)]:
        failed, before = engine.call(totals)["load_failures"], engine.verified().different
        engine.call(on_workers, copy_faults.plant, fault, group)
        engine.reset_prefix_cache()
        engine.generate_one(expected.prompts[0])
        engine.call(on_workers, copy_faults.heal)
        settle(engine)
        what = f"{fault.__name__} in group {group}"
        assert engine.verified().different > before, what
        assert engine.call(totals)["load_failures"] > failed, what
        assert group is None or f"of group {group} is not what was computed" in engine.log(), what


def planted_faults_are_seen(engine: Engine, expected: Expected, stored: Blocks) -> None:
    """The comparison must find one wrong bit in any group, and one swapped pair: exactly these,
    while as many tokens are restored as without the fault."""
    plans = [(copy_faults.wrong_bit, group) for group in range(expected.groups)]
    for fault, group in [*plans, (copy_faults.swapped_chunks, None)]:
        engine.call(on_workers, copy_faults.plant, fault, group)
        engine.call(take_loads)
        engine.reset_prefix_cache()
        answer = engine.generate_one(expected.prompts[0])
        keys = engine.call(take_loads).keys
        engine.call(on_workers, copy_faults.heal)
        blocks = engine.kv_snapshot()
        what = f"{fault.__name__} in group {group}"
        assert answer.cached_tokens == expected.warm[0].cached_tokens, what
        assert {group_of(key) for key in keys} == set(range(expected.groups)), what
        wrong = wrong_blocks(blocks, stored, keys)
        assert wrong, f"{what} was not detected"
        if group is None:
            assert len({group_of(key) for key in wrong}) == 1, what
            # for chunks that are partly outside a window, not all blocks are known
            others = set(stored.values())
            assert any(blocks[key] in others for key in wrong), what
        else:
            assert [group_of(key) for key in wrong] == [group], what
            assert set(map(wrong_bits, blocks[wrong[0]], stored[wrong[0]])) == {1}, what


def wrong_bits(found: bytes, right: bytes) -> int:
    """The number of bits that differ."""
    return (int.from_bytes(found) ^ int.from_bytes(right)).bit_count()


@dataclass(frozen=True)
class Loads:
    """The numbers of tokens that lookups have returned, and the keys of the blocks that were
    loaded; ``lost`` of them are no longer in vLLM's prefix cache."""

    promised: int
    keys: set[bytes]
    lost: int


def record_loads(llm: Any) -> None:
    """From now on, record what the scheduler side promises and loads."""
    side = connector(llm).serving.side
    side.kvtest_loads = ([], set())
    lookup, plan_load = side.lookup, side.planner.loads.plan

    def noted(request: Any, computed_tokens: int) -> int | None:
        tokens: int | None = lookup(request, computed_tokens)
        side.kvtest_loads[0].append(tokens or 0)
        return tokens

    def planned(request: str, chunks: Any) -> Any:
        side.kvtest_loads[1].update(block for chunk in chunks for block in chunk.blocks)
        return plan_load(request, chunks)

    side.lookup, side.planner.loads.plan = noted, planned


def take_loads(llm: Any) -> Loads:
    """Return the records since the previous call."""
    side = connector(llm).serving.side
    promised, blocks = side.kvtest_loads
    side.kvtest_loads = ([], set())
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    keys = [pool.blocks[block].block_hash for block in blocks if block >= 0]
    kept = {bytes(key) for key in keys if key is not None}
    return Loads(sum(promised), kept, keys.count(None))
