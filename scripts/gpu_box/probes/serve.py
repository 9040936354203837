"""Serves a model with random weights: first with vLLM's own prefix cache, then with the
connector and a small cache, so that most of each prompt comes from the CPU tier.

``"verify": "device"`` compares every loaded chunk with what was computed, on the device. Tokens are
compared too, but differences are only counted: with random weights the two highest logits are close
together, and another batch may swap them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from site_path import use_site

use_site()

from common import result  # noqa: E402  # after the path

MODELS = Path(__file__).resolve().parents[1] / "models"
CONNECTOR = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
}


def prompts(count: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Prompts in families of four that share three quarters of their tokens."""
    found = []
    for number in range(count):
        family = number // 4
        shared = [(family * 7919 + at * 31) % (vocabulary - 10) for at in range(length * 3 // 4)]
        own = [(number * 104729 + at * 17) % (vocabulary - 10) for at in range(length // 4)]
        found.append({"prompt_token_ids": shared + own})
    return found


def engine(options: argparse.Namespace, **others: Any) -> Any:
    from vllm import LLM

    folder = MODELS / options.model
    if not (folder / "config.json").exists():
        folder = Path(options.model)
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=options.eager,
        max_model_len=options.tokens + 64,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **({"gpu_memory_utilization": 0.6} if not options.cpu else {}),
        **others,
    )


def generate(llm: Any, asked: list[dict[str, list[int]]]) -> tuple[list[list[int]], float]:
    """The tokens of each answer, and the total time in seconds."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def counters(llm: Any) -> dict[str, float]:
    """kvtiers' metrics and vLLM's preemptions, summed over labels."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvtiers_") or "preempt" in metric.name:
            name = metric.name.removeprefix("vllm:kvtiers_")
            found[name] = found.get(name, 0) + getattr(metric, "value", 0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=2048, help="of the small cache")
    parser.add_argument("--capacity", default="16GiB")
    options = parser.parse_args()
    vocabulary = json.loads(
        (
            MODELS / options.model / "config.json"
            if (MODELS / options.model).exists()
            else Path(options.model) / "config.json"
        ).read_text()
    )["vocab_size"]
    asked = prompts(options.requests, options.tokens, vocabulary)
    found: dict[str, Any] = {"requests": options.requests, "prompt tokens": options.tokens}

    llm = engine(options)
    reference, found["reference, cold s"] = generate(llm, asked)
    _, found["reference, warm s"] = generate(llm, asked)
    result(found)
    close(llm)

    extra = {"cpu": {"capacity": options.capacity}, "tiers": [], "verify": "device"}
    transfer = CONNECTOR | {"kv_connector_extra_config": extra}
    llm = engine(options, kv_transfer_config=transfer, num_gpu_blocks_override=options.blocks)
    cold, found["connector, cold s"] = generate(llm, asked)
    result(found)
    warm, found["connector, warm s"] = generate(llm, asked)
    counted = counters(llm)
    found |= {
        "answers equal, cold": sum(map(list.__eq__, reference, cold)),
        "answers equal, warm": sum(map(list.__eq__, reference, warm)),
        "counters": counted,
    }
    result(found)
    close(llm)
    wrong = [
        text
        for text, is_wrong in (
            ("nothing was loaded", not counted.get("loaded_tokens")),
            ("nothing was verified", not counted.get("verified_chunks")),
            ("loaded bytes differ from what was computed", bool(counted.get("differing_chunks"))),
            ("loads failed", bool(counted.get("load_failures"))),
            ("hooks failed", bool(counted.get("hook_faults"))),
        )
        if is_wrong
    ]
    print("\n".join(wrong) or "everything as expected")
    return int(bool(wrong))


def close(llm: Any) -> None:
    """End the engine and release its memory."""
    import gc

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


if __name__ == "__main__":
    sys.exit(main())
