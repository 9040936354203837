"""A prompt that ends with a block is restored whole, and vLLM computes only its last token again.

The world compares every KV entry that a forward pass reads with the one that belongs there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, serve

WHOLE = ("full", "full_ngram", "full_fp8", "runner_v2_kernel_blocks", "mla")
"""Models whose groups keep every token, without a draft head."""


def tokens_computed(world: OracleEngine, name: str, prompt: list[int]) -> int:
    """Serve a prompt; return how many of its tokens vLLM computes."""
    starts: list[int] = []
    schedule = world.scheduler.schedule

    def observed() -> object:
        output = schedule()
        if scheduled := output.num_scheduled_tokens.get(name):
            starts.append(world.scheduler.requests[name].num_computed_tokens - scheduled)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.scheduler, "schedule", observed)
        serve(world, name, prompt)
    return len(prompt) - starts[0]


@pytest.mark.parametrize("chunk_blocks", [1, 2])
@pytest.mark.parametrize("model", WHOLE)
def test_only_the_last_token_is_computed(model: str, chunk_blocks: int, tmp_path: Path) -> None:
    conditions = Conditions(slots=100, chunk_blocks=chunk_blocks)
    with OracleEngine(MODELS[model], conditions, tmp_path, 1) as world:
        assert tokens_computed(world, "first", PROMPT) == len(PROMPT)
        world.forget_locally()
        assert tokens_computed(world, "again", PROMPT) == 1
        world.forget_locally()
        longer = [*PROMPT, *range(100, 103)]
        assert tokens_computed(world, "longer", longer) == 3
        world.check_idle()


@pytest.mark.parametrize("model", sorted(MODELS.keys() - set(WHOLE)))
def test_other_models_compute_the_last_block(model: str, tmp_path: Path) -> None:
    """A window, a state or a draft head needs more than the blocks up to the last token."""
    with OracleEngine(MODELS[model], Conditions(slots=200), tmp_path, 1) as world:
        serve(world, "first", [*PROMPT, *range(100, 116)])  # so every chunk of the prompt is proven
        world.forget_locally()
        assert tokens_computed(world, "again", PROMPT) >= MODELS[model].block_tokens
        world.check_idle()


def test_a_block_is_not_loaded_alone(tmp_path: Path) -> None:
    """vLLM's own cache holds all but the last block. Computing that block takes the one step that
    computing the last token would take after a load."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as world:
        serve(world, "first", PROMPT)
        assert tokens_computed(world, "again", PROMPT) == 4
        assert not any(world.loaded().values())
        world.check_idle()
