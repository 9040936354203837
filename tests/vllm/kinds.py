"""How one kind of model is shown to be stored and restored exactly; the kinds are in ``test_kinds``.

The right answer to a prompt whose prefix was restored is vLLM's own answer when its own prefix
cache hits at the same length. For attention it also equals the answer without any cache; for
recurrent states and MLA the rest of the prompt is cut otherwise, which changes the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models.families import FAMILIES
from tests.vllm import copy_faults
from tests.vllm.engine import Engine
from tests.vllm.faults import on_workers
from tests.vllm.probes import connector, totals
from tests.vllm.protocol import Generation, Prompt
from tests.vllm.restored import HASH, config, prompts, settle

Blocks = dict[bytes, tuple[bytes, ...]]


@dataclass(frozen=True)
class Kind:
    """A family of ``tests.models.families`` and how it is run. ``exact``: a cached prefix does not
    change the answer's last bits."""

    family: str
    exact: bool = True
    changes: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """The model's folder and the engine's keyword arguments."""
        family = FAMILIES[self.family]
        model = family.make(folder)
        return model, HASH | family.kwargs(model) | self.changes

    def prompts(self) -> list[Prompt]:
        """Two prompts that share their first half."""
        return prompts(2, FAMILIES[self.family].prompt_tokens)


@dataclass(frozen=True)
class Expected:
    """What vLLM does alone: answers without a cache and from its own, and its KV bytes."""

    prompts: list[Prompt]
    cold: list[Generation]
    warm: list[Generation]
    blocks: Blocks
    groups: int

    @classmethod
    def record(cls, kind: Kind, folder: Path, log: Path) -> Expected:
        """Ask an engine without a connector: everything once, then everything again."""
        model, options = kind.make(folder)
        asked = kind.prompts()
        with Engine(model, log=log, **options) as plain:
            cold = ask(plain, asked)
            blocks = plain.kv_snapshot()
            warm = ask(plain, asked)
            groups = len(plain.geometry["groups"])
        assert all(answer.cached_tokens > 0 for answer in warm), "vLLM's own cache does not hit"
        if kind.exact:
            assert all(w.same_output(c) for w, c in zip(warm, cold, strict=True))
        return cls(asked, cold, warm, blocks, groups)


def ask(engine: Engine, asked: list[Prompt]) -> list[Generation]:
    """One prompt after the other."""
    return [engine.generate_one(prompt) for prompt in asked]


def show_stored_and_restored(kind: Kind, expected: Expected, folder: Path, tmp: Path) -> None:
    """Store, restore from the CPU tier, and after a restart from disk; then see planted faults."""
    model, options = kind.make(folder)
    options = options | {"connector": config(tmp / "kv")}
    with Engine(model, log=tmp / "first.log", **options) as engine:
        answers = ask(engine, expected.prompts)
        compare(answers, expected.cold, engine.kv_snapshot(), expected)
        settle(engine)
        restore_and_compare(engine, expected, "cpu")
        planted_faults_are_seen(engine, expected)
    with Engine(model, log=tmp / "second.log", **options) as engine:
        restore_and_compare(engine, expected, "lmdb")


def restore_and_compare(engine: Engine, expected: Expected, tier: str) -> None:
    """Everything again with vLLM's own cache emptied: ``tier`` must give what was promised, as much
    as vLLM's own cache would have, and nothing may differ."""
    engine.call(record_promises)
    assert engine.reset_prefix_cache()
    before = engine.call(totals)
    first = engine.generate_one(expected.prompts[0])
    promised = engine.call(promises)
    assert first.cached_tokens == sum(promised) > 0
    after = engine.call(totals)
    assert after["load_failures"] == before["load_failures"] == 0
    name = f"loaded_tokens:{tier}"
    assert after[name] - before[name] > 0, (before, after)
    answers = [first, *ask(engine, expected.prompts[1:])]
    found = [answer.cached_tokens for answer in answers]
    assert found == [answer.cached_tokens for answer in expected.warm], found
    compare(answers, expected.warm, engine.kv_snapshot(), expected)
    settle(engine)


def compare(
    answers: list[Generation], wanted: list[Generation], blocks: Blocks, expected: Expected
) -> None:
    """Raises ``AssertionError`` unless tokens, log-probabilities and the KV bytes of blocks of every
    group are equal."""
    for number, (answer, right) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.tokens == right.tokens, f"prompt {number}: other tokens"
        assert answer.logprobs == right.logprobs, f"prompt {number}: other log-probabilities"
    common = blocks.keys() & expected.blocks.keys()
    wrong = [key.hex()[-12:] for key in common if blocks[key] != expected.blocks[key]]
    assert not wrong, f"{len(wrong)} of {len(common)} blocks have other bytes: {wrong[:4]}"
    seen = {int.from_bytes(key[-4:], "big") for key in common}
    assert seen == set(range(expected.groups)), f"blocks of groups {seen} alone were compared"


def planted_faults_are_seen(engine: Engine, expected: Expected) -> None:
    """The comparison must fail for one wrong bit in any group, and for one swapped pair."""
    plans = [(copy_faults.wrong_bit, group) for group in range(expected.groups)]
    for fault, group in [*plans, (copy_faults.swapped_chunks, None)]:
        engine.call(on_workers, copy_faults.plant, fault, group)
        assert engine.reset_prefix_cache()
        answers = ask(engine, expected.prompts)
        try:
            compare(answers, expected.warm, engine.kv_snapshot(), expected)
        except AssertionError:
            engine.call(on_workers, copy_faults.heal)
            continue
        raise AssertionError(f"{fault.__name__} in group {group} went unseen")


def record_promises(llm: Any) -> None:
    """From now on the scheduler side notes what its lookups answer."""
    side = connector(llm)._scheduler
    side.kvtest_promises = []
    lookup = type(side).lookup

    def noted(request: Any, computed_tokens: int) -> int:
        tokens = lookup(side, request, computed_tokens)
        side.kvtest_promises.append(tokens)
        return int(tokens)

    side.lookup = noted


def promises(llm: Any) -> list[int]:
    """What was answered since ``record_promises``."""
    return list(connector(llm)._scheduler.kvtest_promises)
