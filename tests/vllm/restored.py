"""The comparisons of every end-to-end test: blocks were really restored, their bytes are those that
were computed, and answers and log-probabilities are equal if both runs computed alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
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
    """vLLM's answers without offloading, by prompt number and by the number of prompt tokens that
    came from vLLM's own cache.

    The kernels that compute a token depend on how many tokens are computed with it. So ``ask`` may
    be used only while every cached block was computed one request at a time, as in the reference,
    and it compares only answers whose hits had the same length. The whole prompt was then computed
    in the same pieces, and both answers are equal to the last bit on every processor. Where blocks
    were computed in a batch, or again after a failed load, use ``ask_twice``.
    """

    prompts: list[Prompt]
    answers: dict[tuple[int, int], Generation]

    @classmethod
    def record(cls, model: Path, log: Path, asked: list[Prompt], **engine: Any) -> Reference:
        """Send prompts one after the other to a fresh engine without a connector, and then again
        with everything in its own cache."""
        with Engine(model, log=log, **(HASH | engine)) as plain:
            return cls(asked, by_hit([plain.generate_one(p) for p in [*asked, *asked]], len(asked)))


def by_hit(answers: list[Generation], count: int) -> dict[tuple[int, int], Generation]:
    """Answers to the first ``count`` prompts in turn, repeatedly, as ``Reference`` keeps them."""
    return {(at % count, answer.cached_tokens): answer for at, answer in enumerate(answers)}


PATIENT = {
    "load_timeout_s": PATIENCE_S,
    "tier_timeout_s": PATIENCE_S,
    "fence_timeout_s": 60,
    "lookup_timeout_s": 10,
    "break_even": False,
}
"""On a busy machine, no load is given up because it is late (the last two limits are the largest
allowed), and no load is skipped because this tiny model computes faster."""


def config(path: Path | None, cpu: str = "64MiB", **others: Any) -> dict[str, Any]:
    """The connector's configuration: a CPU tier, and an LMDB tier at ``path``. Only requests read
    that tier, because a scrub would find damage before them. ``others`` replace entries."""
    tier = {"type": "lmdb", "path": str(path), "capacity": "256MiB", "reserve": 0, "scrub": "off"}
    tiers = [tier] if path else []
    return transfer_config({"cpu": {"capacity": cpu}, "tiers": tiers} | PATIENT | others)


def loaded_tokens(engine: Engine, tier: str) -> float:
    """The number of tokens that this tier has provided so far."""
    return float(engine.call(totals).get(f"loaded_tokens:{tier}", 0))


def settle(engine: Engine) -> None:
    """Wait for the end of write-through, and check the planner's invariants."""
    engine.step_until(is_idle)
    engine.call(check)


def ask(engine: Engine, reference: Reference) -> int:
    """Send everything, one prompt after the other. Raises ``AssertionError`` unless every answer
    equals the reference's answer with a hit of the same length. Returns how many answers were
    compared. After a hit length that the reference never had, or a failed load, nothing more is
    compared, because that prompt was computed in other pieces and may share blocks with others."""
    compared = 0
    for number, prompt in enumerate(reference.prompts):
        answer, has_failed = generate_and_see_failures(engine, prompt)
        expected = reference.answers.get((number, answer.cached_tokens))
        if expected is None or has_failed:
            for other in reference.prompts[number + 1 :]:
                engine.generate_one(other)
            break
        compare(answer, expected, number)
        compared += 1
    return compared


def ask_twice(engine: Engine, reference: Reference) -> int:
    """Send everything, one prompt after the other and each twice. This is exact however the cached
    blocks were computed: the second answer comes from the same blocks, now in vLLM's own cache, so
    both must be equal if their hits had the same length; and an answer without any hit must equal
    the reference's. Only ``verify`` shows that the blocks are the computed ones. Returns how many
    prompts were compared; those with other hits, or whose load failed, are
    not."""
    compared = 0
    for number, prompt in enumerate(reference.prompts):
        first, has_failed = generate_and_see_failures(engine, prompt)
        second = engine.generate_one(prompt)
        if has_failed:
            continue
        cold = reference.answers.get((number, 0))
        if first.cached_tokens == second.cached_tokens:
            compare(first, second, number)
            compared += 1
        elif first.cached_tokens == 0 and cold is not None:
            compare(first, cold, number)
            compared += 1
    return compared


def until_compared(ask_again: Callable[[], int]) -> int:
    """Repeat ``ask_again`` until answers could be compared; return how many. Whether a hit has the
    same length again, and whether a load fails, may depend on the speed of this machine."""
    deadline = time.monotonic() + PATIENCE_S
    while not (compared := ask_again()):
        assert time.monotonic() < deadline, "no answer was compared"
    return compared


def generate_and_see_failures(engine: Engine, prompt: Prompt) -> tuple[Generation, bool]:
    """The answer to one prompt, and whether a load failed meanwhile."""
    failures = engine.call(totals)["load_failures"]
    answer = engine.generate_one(prompt)
    return answer, engine.call(totals)["load_failures"] != failures


def compare(answer: Generation, expected: Generation, number: int) -> None:
    """Raises ``AssertionError`` unless tokens and log-probabilities are equal."""
    where = f"prompt {number}, {answer.cached_tokens} tokens cached"
    assert answer.tokens == expected.tokens, f"{where}: other tokens"
    assert answer.logprobs == expected.logprobs, f"{where}: other log-probabilities"


def fill(engine: Engine, reference: Reference) -> None:
    """Send everything once, cold, and wait until it has reached the disk."""
    assert ask(engine, reference) == len(reference.prompts)
    settle(engine)


def ask_and_compare(engine: Engine, reference: Reference, tier: str) -> None:
    """Empty vLLM's own cache, send everything again, and require that ``tier`` provided blocks,
    that these were what was computed, and that no answer differs from the reference's."""
    assert restore(engine, tier, lambda: ask(engine, reference)) > 0


def restore_and_verify(engine: Engine, reference: Reference, tier: str) -> int:
    """The same where blocks were computed in batches or again: see ``ask_twice``. Returns how many
    prompts were compared."""
    return restore(engine, tier, lambda: ask_twice(engine, reference))


def restore(engine: Engine, tier: str, ask_again: Callable[[], int]) -> int:
    """Empty vLLM's own cache and send prompts again; ``tier`` must provide blocks, and these must
    be what was computed."""
    engine.reset_prefix_cache()
    before, checked = loaded_tokens(engine, tier), engine.verified()
    compared = ask_again()
    assert loaded_tokens(engine, tier) > before, f"nothing was loaded from {tier}"
    found = engine.verified()
    assert found.equal > checked.equal
    assert found.different == checked.different
    settle(engine)
    return compared


def all_were_compared(engine: Engine) -> bool:
    """True if loaded chunks have been compared and all of them were what was computed, except those
    with planted faults."""
    found = engine.verified()
    return found.equal > 0 == found.unknown and found.different == engine.planted_differences


def planted_faults_are_seen(engine: Engine, reference: Reference, tier: str = "cpu") -> None:
    """One wrong bit and one swapped pair of chunks must be found, and must not be stored. After
    this, chunks have been computed again in other pieces than the reference's."""
    see_planted_faults(engine, lambda: engine.generate_one(reference.prompts[0]))
    # the fault is removed: no stored chunk was damaged
    assert restore_and_verify(engine, reference, tier) > 0


def see_planted_faults(engine: Engine, ask_again: Callable[[], object]) -> None:
    """``ask_again`` sends prompts that are restored."""
    for fault, wrong in ((copy_faults.swapped_chunks, 2), (copy_faults.wrong_bit, 1)):
        settle(engine)
        before = engine.verified()
        engine.call(faults.on_workers, copy_faults.plant, fault, None)
        engine.reset_prefix_cache()
        ask_again()
        engine.call(faults.on_workers, copy_faults.heal)
        seen = engine.verified().different - before.different
        assert seen >= wrong, f"{fault.__name__} was not detected"
        engine.planted_differences += seen
    settle(engine)
