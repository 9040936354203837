"""What every end-to-end test compares: output, log-probabilities, KV bytes, and that blocks were
really restored. Equal text alone proves little on a tiny model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import copy_faults, faults
from tests.vllm.engine import Engine, transfer_config
from tests.vllm.probes import check, is_idle, totals
from tests.vllm.protocol import Generation, Prompt

HASH = {"prefix_caching_hash_algo": "sha256_cbor"}


def prompts(count: int, tokens: int = 600, seed: int = 0) -> list[Prompt]:
    """Prompts of random tokens; pairs of neighbours share their first half."""
    found: list[Prompt] = []
    for number in range(count):
        draw = random.Random(f"{seed}:{number}")
        shared = random.Random(f"{seed}:pair:{number // 2}")
        half = tokens // 2
        found.append(
            [shared.randrange(10, 200) for _ in range(half)]
            + [draw.randrange(10, 200) for _ in range(tokens - half)]
        )
    return found


@dataclass(frozen=True)
class Reference:
    """Answers and KV bytes of a run without offloading."""

    prompts: list[Prompt]
    answers: list[Generation]
    blocks: dict[bytes, tuple[bytes, ...]]

    @classmethod
    def record(cls, model: Path, log: Path, asked: list[Prompt], **engine: Any) -> Reference:
        """Ask a fresh engine without a connector, one prompt after the other."""
        with Engine(model, log=log, **(HASH | engine)) as plain:
            answers = [plain.generate_one(prompt) for prompt in asked]
            return cls(asked, answers, plain.kv_snapshot())


def config(path: Path | None, cpu: str = "64MiB", **others: Any) -> dict[str, Any]:
    """The connector's configuration: a CPU tier, and an LMDB tier at ``path``."""
    tiers = [{"type": "lmdb", "path": str(path), "capacity": "256MiB", "reserve": 0}]
    return transfer_config({"cpu": {"capacity": cpu}, "tiers": tiers if path else []} | others)


def loaded_tokens(engine: Engine, tier: str) -> float:
    """Tokens that this tier has given so far."""
    return float(engine.call(totals).get(f"loaded_tokens:{tier}", 0))


def settle(engine: Engine) -> None:
    """Let write-through end, and check the planner's invariants."""
    engine.step_until(is_idle)
    engine.call(check)


def compare(engine: Engine, reference: Reference, answers: list[Generation]) -> int:
    """Raises ``AssertionError`` unless outputs and KV bytes equal the reference. Returns how many
    blocks were compared."""
    for number, (answer, expected) in enumerate(zip(answers, reference.answers, strict=True)):
        assert answer.tokens == expected.tokens, f"prompt {number}: other tokens"
        assert answer.logprobs == expected.logprobs, f"prompt {number}: other log-probabilities"
    blocks = engine.kv_snapshot()
    common = blocks.keys() & reference.blocks.keys()
    wrong = [key.hex()[:16] for key in common if blocks[key] != reference.blocks[key]]
    assert not wrong, f"{len(wrong)} of {len(common)} blocks have other bytes: {wrong[:4]}"
    return len(common)


def ask_and_compare(engine: Engine, reference: Reference, tier: str) -> None:
    """Empty vLLM's own cache, ask everything again, and require that ``tier`` gave blocks and that
    nothing differs."""
    assert engine.reset_prefix_cache()
    before = loaded_tokens(engine, tier)
    answers = [engine.generate_one(prompt) for prompt in reference.prompts]
    assert compare(engine, reference, answers) > 0
    assert loaded_tokens(engine, tier) > before, f"nothing was loaded from {tier}"
    settle(engine)


def planted_faults_are_seen(engine: Engine, reference: Reference) -> None:
    """The same comparison must fail with one wrong block and with one swapped pair."""
    for fault in (copy_faults.swapped_chunks, copy_faults.wrong_bit):
        engine.call(faults.on_workers, copy_faults.plant, fault, None)
        assert engine.reset_prefix_cache()
        answers = [engine.generate_one(prompt) for prompt in reference.prompts]
        engine.call(faults.on_workers, copy_faults.heal)
        try:
            compare(engine, reference, answers)
        except AssertionError:
            continue
        raise AssertionError(f"{fault.__name__} went unseen")
    ask_and_compare(engine, reference, "cpu")  # healed: nothing that is stored was harmed
